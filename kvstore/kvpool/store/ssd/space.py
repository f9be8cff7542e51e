"""Where extents lie on the disk: the slab allocator over whole blocks, with a quarantine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.store.allocator import SlabAllocator, SlabStatistics
from kvpool.store.sorting import distinct


class Space:
    """`files` files of `file_bytes`, in segments. Every address is a multiple of the block."""

    def __init__(self, files: int, file_bytes: int, segment_bytes: int, block_bytes: int) -> None:
        """REQUIRES: a file is whole segments, a segment whole blocks, a block a power of two."""
        self.slabs = SlabAllocator(file_bytes, segment_bytes)
        self._block = block_bytes
        self.quarantined_bytes = 0
        """Where damaged bytes were found: out of use until the next start."""
        for _ in range(files):
            self.slabs.add_region()

    @property
    def capacity_bytes(self) -> int:
        return self.slabs.capacity_bytes

    @property
    def segment_bytes(self) -> int:
        return self.slabs.segment_bytes

    def rounded(self, nbytes: int) -> int:
        """`nbytes` in whole blocks: what is taken and written for them."""
        return -(-nbytes // self._block) * self._block

    def slot_bytes(self, nbytes: int) -> int:
        """The size class. Raises `TooLargeError` if no segment could hold one."""
        return self.slabs.slot_bytes(self.rounded(nbytes))

    def allocate(self, sizes: Sequence[int]) -> list[int] | None:
        """An address for each, or None if not all fit."""
        found: list[int] = []
        for nbytes in sizes:
            address = self.slabs.allocate(self.rounded(nbytes), 1).tolist()
            if not address:
                self.free(found)
                return None
            found += address
        return found

    def free(self, addresses: Iterable[int]) -> None:
        """These may be written again."""
        freed = np.fromiter(addresses, np.int64)
        if len(freed):
            self.slabs.free(freed)

    def quarantine(self, nbytes: int) -> None:
        """One extent of `nbytes` is never freed."""
        self.quarantined_bytes += self.slot_bytes(nbytes)

    def free_slots(self, nbytes: int) -> int:
        """How many extents of `nbytes` would fit now."""
        return self.slabs.free_slots(self.rounded(nbytes))

    def claim(
        self, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Takes what an earlier life had; False where it contradicts the rest."""
        good = np.zeros(len(addresses), np.bool_)
        rounded = -(-sizes // self._block) * self._block
        for nbytes in distinct(rounded):
            if 0 < nbytes <= self.segment_bytes:
                mine = np.flatnonzero(rounded == nbytes)
                good[mine] = self.slabs.claim(addresses[mine], nbytes)
        return good

    def statistics(self) -> SlabStatistics:
        return self.slabs.statistics()

    def check_integrity(self) -> None:
        self.slabs.check_integrity()
