"""Rows that go before all others until they are used: of the last call first, the deepest first."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from kvpool.store.eviction.base import Evictable, Rows

Entry = tuple[float, int, int]
"""(value, stamp, row): what is least goes first."""
_VALUE = float("-inf")
_STALE_MAX = 1024


class Taken(NamedTuple):
    going: list[Entry]
    blocked: list[int]
    """Rows that may not go; they are not looked at again until `offer`."""


class Demoted(dict[int, int]):
    """A policy's demoted rows: the order of each."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int]] = []  # (order, row); stale unless the order is the row's
        self._oldest = 0

    def add(self, rows: Rows) -> None:
        for row in rows.tolist():
            self._oldest -= 1
            self[row] = self._oldest
            heappush(self._heap, (self._oldest, row))
        if len(self._heap) > 2 * len(self) + _STALE_MAX:
            self._heap = [entry for entry in self._heap if self.get(entry[1]) == entry[0]]
            heapify(self._heap)

    def discard(self, row: int) -> bool:
        """True if it was demoted."""
        return self.pop(row, None) is not None

    def entry(self, row: int) -> Entry:
        return _VALUE, self[row], row

    def offer(self, row: int) -> None:
        """A demoted row that was blocked may go."""
        heappush(self._heap, (self[row], row))

    def take(self, n: int, evictable: Evictable) -> Taken:
        """The first `n` that may go; `put` those back that stay."""
        taken = Taken([], [])
        while self._heap and len(taken.going) < n:
            order, row = heappop(self._heap)
            if self.get(row) != order or self._heap[:1] == [(order, row)]:
                continue  # stale, or offered twice: equal entries come up one after the other
            if evictable(np.array([row], np.intp))[0]:
                taken.going.append((_VALUE, order, row))
            else:
                taken.blocked.append(row)
        return taken

    def put(self, entries: Iterable[Entry]) -> None:
        for _, order, row in entries:
            heappush(self._heap, (order, row))

    def offered(self) -> set[int]:
        """The rows that `take` may find."""
        return {row for order, row in self._heap if self.get(row) == order}
