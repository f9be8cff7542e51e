"""The DRAM behind one store: memfd regions that appear one after another.

Growth is a generator of steps, so that the daemon, and not this module, decides when and where
the next pages are taken; before each step the caller-given check may refuse with figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpool.proto.errors import ConfigError, InvalidError
from kvpool.store.store import Store
from kvpool.transfer.memory import SharedMemory, SharedRegion

REGION_BYTES_MAX = 8 << 30
REGION_BYTES_GROW = 256 << 20
"""Pools of several of these come in up to four regions, so that the first is soon ready."""
STEP_BYTES = 64 << 20
"""Faulted in at once: about 50 ms of work between two looks at the free memory."""
PAGE = 4096
CAPACITY_MIN = 4 * PAGE


def region_bytes_for(capacity: int) -> int:
    """Region size in bytes: the capacity split evenly and rounded down to pages.

    Raises `ConfigError` for a capacity below `CAPACITY_MIN` bytes.
    """
    if capacity < CAPACITY_MIN:
        raise ConfigError(f"capacity {capacity} is below the minimum of {CAPACITY_MIN} bytes")
    regions = max(-(-capacity // REGION_BYTES_MAX), min(4, capacity // REGION_BYTES_GROW), 1)
    return capacity // regions // PAGE * PAGE


@dataclass(slots=True)
class Pool:
    """Regions of `region_bytes`, at most `capacity` bytes of them, announced to `store`."""

    store: Store
    memory: SharedMemory
    capacity: int
    region_bytes: int

    @property
    def regions(self) -> list[SharedRegion]:
        """The regions that the store may hand out, in address order."""
        return self.memory.regions[: self.store.regions]

    @property
    def room(self) -> int:
        """Bytes of the regions that are still to come."""
        missing = self.capacity // self.region_bytes - self.store.regions
        return missing * self.region_bytes

    def build_region(self, check: Callable[[int], None], populate: bool) -> Iterator[int]:
        """Makes the next region and yields how many of its bytes are there. Blocks; may run
        beside the store's thread, which then calls `announce`.

        `check(nbytes)` is called before bytes are taken and raises to refuse. If that, or the
        system, ends it early, what was taken is given back.
        """
        check(self.region_bytes)
        region = self.memory.create_region(self.region_bytes)
        try:
            steps = region.populate(STEP_BYTES) if populate else iter((self.region_bytes,))
            for done in steps:
                yield done
                if missing := self.region_bytes - done:
                    check(min(STEP_BYTES, missing))
        except BaseException:
            with contextlib.suppress(InvalidError):  # the pool was closed meanwhile
                self.memory.drop_region(region.region)
            raise

    def announce(self) -> None:
        """The next region may be handed out."""
        self.store.add_region()

    def grow_lazily(self) -> None:
        """Announces the whole capacity now; pages are taken as they are written."""
        for _ in range(self.capacity // self.region_bytes):
            self.memory.create_region(self.region_bytes)
            self.store.add_region()

    def close(self) -> None:
        self.memory.close()
