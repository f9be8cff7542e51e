"""The DRAM behind one store: memfd regions that appear one after another.

Growth is a generator of steps, so that the daemon's timer, and not this module, decides when the
next pages are taken; before each step the caller-given check may refuse with figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpool.proto.errors import ConfigError
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

    def grow(self, check: Callable[[int], None]) -> Iterator[int]:
        """Takes the whole capacity step by step and yields the bytes that are ready.

        `check(nbytes)` is called before each step and raises to stop. A region is announced to
        the store when all of its pages are there.
        """
        done = 0
        while done + self.region_bytes <= self.capacity:
            region = self.memory.create_region(self.region_bytes)
            steps = region.populate(STEP_BYTES)
            while True:
                check(min(STEP_BYTES, self.region_bytes))
                if (populated := next(steps, None)) is None:
                    break
                yield done + populated
            self.store.add_region()
            done += self.region_bytes
            yield done

    def grow_lazily(self) -> None:
        """Announces the whole capacity now; pages are taken as they are written."""
        for _ in range(self.capacity // self.region_bytes):
            self.memory.create_region(self.region_bytes)
            self.store.add_region()

    def close(self) -> None:
        self.memory.close()
