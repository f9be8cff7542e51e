"""Belady's optimum: evict what is used again last. Offline: it asks the future, so only a replay
or a test can run it.

Chained keys make a parent's next use no later than its child's, so that the farthest next uses are
at leaves, and leaf-only eviction loses nothing (L. A. Belady, "A study of replacement algorithms
for a virtual-storage computer", IBM Systems Journal 5, 1966).
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np

from kvpool.store.eviction.base import (
    UNKNOWN,
    Evictable,
    Facts,
    Gone,
    Rows,
    require_known,
    require_unknown,
)
from kvpool.store.eviction.demoted import Demoted, Entry

# States of a row.
_HEAPED = 1
_BLOCKED = 2


class BeladyPolicy:
    """See `kvpool.store.eviction.base.Policy`. O(log n) per use. Without `next_uses`, all rows are
    never used again, and the order is LRU's."""

    def __init__(self, capacity: int, evictable: Evictable, facts: Facts | None = None) -> None:
        self._evictable = evictable
        self._next_uses = facts.next_uses if facts else None
        self._state = np.zeros(capacity, np.uint8)
        self._state_at = memoryview(self._state)
        self._stamp = np.zeros(capacity, np.int64)
        self._next = np.zeros(capacity, np.int64)
        self._stamp_at, self._next_at = memoryview(self._stamp), memoryview(self._next)
        self._clock = self._known = 0
        self._heap: list[Entry] = []  # (-next use, stamp, row); stale unless the stamp is the row's
        self._pending: list[Rows] = []
        self._demoted = Demoted()

    def admit(self, rows: Rows) -> None:
        require_unknown(self._state, rows)
        self._state[rows] = _HEAPED
        self._known += len(rows)
        self._pending.append(rows)

    def touch(self, rows: Rows) -> None:
        self._pending.append(rows)

    def catch_up(self) -> None:
        self._flush()

    def victims(self, n: int) -> Rows:
        self._flush()
        found = self._take(n)
        for entry in found:
            self._put(entry)
        return np.array([row for _, _, row in found], np.intp)

    def evict(self, n: int, gone: Gone) -> int:
        self._flush()
        for evicted in range(n):
            found = self._take(1)
            if not found:
                return evicted
            row = found[0][2]
            parent = gone(row)
            self._drop(row)
            if parent >= 0 and self._state_at[parent] == _BLOCKED:
                self._return(parent)
        return n

    def unblock(self, rows: Rows) -> None:
        waiting = rows[self._state[rows] == _BLOCKED]
        for row in waiting[self._evictable(waiting)].tolist():
            self._return(row)

    def demote(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        self._state[rows] = _HEAPED
        self._demoted.add(rows)

    def forget(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        for row in rows.tolist():
            self._drop(row)

    def statistics(self) -> Mapping[str, int]:
        """`rows` known; `entries` of the heap, stale ones included."""
        return {"rows": self._known, "entries": len(self._heap)}

    def check_integrity(self) -> None:
        self._flush()
        known = np.flatnonzero(self._state)
        assert len(known) == self._known, "the count of known rows"
        heaped = {row for _, stamp, row in self._heap if self._stamp[row] == stamp}
        reachable = heaped | self._demoted.offered()
        assert set(np.flatnonzero(self._state == _HEAPED).tolist()) <= reachable
        blocked = known[self._state[known] == _BLOCKED]
        lost = self._evictable(blocked)
        assert not lost.any(), f"rows {blocked[lost]} are evictable, but nobody called unblock()"

    def _flush(self) -> None:
        """Stamps what was used, the deepest the oldest, and asks for its next use."""
        pending, self._pending = self._pending, []
        for rows in pending:
            require_known(self._state, rows)
            count = len(rows)
            stamps = np.arange(self._clock + count, self._clock, -1)
            self._clock += count
            self._stamp[rows] = stamps
            self._next[rows] = self._next_uses(rows) if self._next_uses else 0
            if self._demoted:
                for row in rows.tolist():
                    self._demoted.discard(row)
            heaped = self._state[rows] == _HEAPED
            values = -self._next[rows].astype(np.float64)
            columns = (column[heaped].tolist() for column in (values, stamps, rows))
            for entry in zip(*columns, strict=True):
                heappush(self._heap, entry)

    def _entry(self, row: int) -> Entry:
        return -float(self._next_at[row]), self._stamp_at[row], row

    def _take(self, n: int) -> list[Entry]:
        """The first `n` entries that may go, which leave the heap."""
        out: list[Entry] = []
        any_demoted = bool(self._demoted)
        if any_demoted:
            found = self._demoted.take(n, self._evictable)
            self._state[found.blocked] = _BLOCKED
            out = found.going
        while self._heap and len(out) < n:
            entry = heappop(self._heap)
            row = entry[2]
            if self._stamp_at[row] != entry[1] or (any_demoted and row in self._demoted):
                continue
            if self._state_at[row] != _HEAPED:
                continue
            if self._evictable(np.array([row], np.intp))[0]:
                out.append(entry)
            else:
                self._state_at[row] = _BLOCKED
        return out

    def _put(self, entry: Entry) -> None:
        if entry[2] in self._demoted:
            self._demoted.put([entry])
        else:
            heappush(self._heap, entry)

    def _return(self, row: int) -> None:
        """A row that was blocked may go."""
        self._state_at[row] = _HEAPED
        if row in self._demoted:
            self._demoted.offer(row)
        else:
            heappush(self._heap, self._entry(row))

    def _drop(self, row: int) -> None:
        if self._demoted:
            self._demoted.discard(row)
        self._stamp_at[row] = 0
        self._state_at[row] = UNKNOWN
        self._known -= 1
