"""What plain LRU of the same capacity would have hit: the yardstick of a policy that learns.

An LRU of C entries holds the C entries used last. So it needs no list: stamps are cut into blocks,
each with the number of entries last used in it, and LRU holds the newest blocks that have at most
C entries together. Exact up to one block, 1/128 of the capacity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCKS_PER_CAPACITY = 128
_BLOCKS_MIN = 1024

Stamps = NDArray[np.int64]


class LruShadow:
    """Fed with every use; the n-th use ever has stamp n, from 1."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """May change as it goes."""
        self._size = max(1, capacity // _BLOCKS_PER_CAPACITY)
        self._live = [0] * _BLOCKS_MIN  # entries by block, from `_base` on
        self._base = 0
        self._cutoff = 0  # oldest block that LRU holds
        self._held = 0
        self.newest = 0
        """Stamp of the last use it was told of."""

    @property
    def reach(self) -> int:
        """The oldest age that LRU holds, in uses."""
        return self.newest - self._cutoff * self._size

    def use(self, count: int, previous: Stamps) -> int:
        """`count` entries were used; those that ever were before had the stamps `previous`.

        Returns how many of them LRU still held.
        """
        self._grow(count)
        self._fill(count)
        live, base, cutoff = self._live, self._base, self._cutoff
        hits = 0
        for block in (previous // self._size).tolist():  # mostly a few
            if block >= cutoff:
                live[block - base] -= 1
                hits += 1
        self._held += count - hits
        while self._held > self.capacity:
            self._held -= live[self._cutoff - base]
            self._cutoff += 1
        return hits

    def _fill(self, count: int) -> None:
        """Counts the next stamps into their blocks."""
        first, end = self.newest + 1, self.newest + 1 + count
        self.newest += count
        while first < end:
            block = first // self._size
            stop = min(end, (block + 1) * self._size)
            self._live[block - self._base] += stop - first
            first = stop

    def _grow(self, count: int) -> None:
        """Makes room for the next blocks, dropping what is older than the cutoff."""
        newest = (self.newest + count) // self._size
        if newest - self._base < len(self._live):
            return
        kept = self._live[self._cutoff - self._base :]
        size = max(_BLOCKS_MIN, 2 * (newest - self._cutoff + 1))
        self._live, self._base = kept + [0] * (size - len(kept)), self._cutoff
