"""A set of rows with O(1) additions, removals and samples, many at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.base import Rows
from kvpool.store.eviction.sparse import sparse_zeros


class Members:
    """Rows below `capacity`. 8 bytes per row."""

    def __init__(self, capacity: int) -> None:
        self._rows: NDArray[np.int32] = sparse_zeros(capacity, np.int32)  # dense, in no order
        self._place: NDArray[np.int32] = sparse_zeros(capacity, np.int32)
        """In `_rows`, counted from 1; 0: no member."""
        self._rows_at, self._place_at = memoryview(self._rows), memoryview(self._place)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def all(self) -> Rows:
        return self._rows[: self._count].astype(np.intp)

    def at(self, numbers: NDArray[np.int64]) -> Rows:
        """The members of these numbers below the count: a sample, if they are random."""
        return self._rows[numbers].astype(np.intp)

    def add(self, rows: Rows) -> None:
        """REQUIRES: distinct rows that are no members."""
        end = self._count + len(rows)
        self._rows[self._count : end] = rows
        self._place[rows] = np.arange(self._count + 1, end + 1)
        self._count = end

    def remove(self, rows: Rows) -> None:
        """REQUIRES: distinct members. Members from the end move into the holes."""
        places = self._place[rows] - 1
        self._place[rows] = 0
        end = self._count - len(rows)
        tail = self._rows[end : self._count]
        movers = tail[self._place[tail] > 0]
        holes = places[places < end]
        self._rows[holes] = movers
        self._place[movers] = holes + 1
        self._count = end

    def add_one(self, row: int) -> None:
        """`add` of one row, several times faster."""
        self._rows_at[self._count] = row
        self._count += 1
        self._place_at[row] = self._count

    def remove_one(self, row: int) -> None:
        """`remove` of one row, several times faster."""
        place = self._place_at[row]
        self._count -= 1
        mover = self._rows_at[self._count]
        self._rows_at[place - 1] = mover
        self._place_at[mover] = place
        self._place_at[row] = 0

    def check_integrity(self) -> None:
        """O(capacity)."""
        rows = self.all()
        assert np.array_equal(self._place[rows], np.arange(1, self._count + 1)), "places of members"
        assert np.count_nonzero(self._place) == self._count, "places of members only"
