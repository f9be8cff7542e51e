"""S3-FIFO over the rows that may go: a small queue sieves new rows, a main queue keeps used ones.

J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New rows enter
`small`; what was used there moves on to `main`, the rest leaves and is remembered by a ghost, which
on its return enters `main` at once. In `main` a used row gets another round.

    new ──► small (30 %) ──used──► main ◄── new, with a ghost
              │                    │  └──used──┐
              ▼ ghost              ▼     ◄─────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

import numpy as np

from kvpool.store.eviction.base import (
    UNKNOWN,
    Evictable,
    Facts,
    Gone,
    Rows,
    idle_by,
    require_known,
    require_unknown,
)
from kvpool.store.eviction.demoted import Demoted, Entry
from kvpool.store.eviction.ghosts import CLASS_BITS, Ghosts

SMALL_SHARE = 0.3
_USES_MAX = 3
_GHOSTS_PER_ROW = 4
_SCAN_ROWS = 8
"""Rows that were not used, in one scan."""

_STALE_MAX = 1024

# States of a row.
_QUEUED = 1
_BLOCKED = 2

_NOWHERE = -1

_SMALL = 0
_MAIN = 1

_USED = np.minimum(np.arange(256) + 1, _USES_MAX).astype(np.uint8)
"""The count of uses after one more."""

Slot = tuple[int, int]
"""(place, row): stale unless the place is the row's."""


class S3FifoPolicy:
    """See `kvpool.store.eviction.base.Policy`. O(1) amortised per row, in plain Python."""

    def __init__(self, capacity: int, evictable: Evictable, facts: Facts | None = None) -> None:
        self._evictable = evictable
        self._idle = idle_by(evictable, facts)
        self._tags = facts.tags if facts else None
        self._ghosts = Ghosts(_GHOSTS_PER_ROW * capacity)
        self._state = np.zeros(capacity, np.uint8)
        self._state_at = memoryview(self._state)
        self._uses = np.zeros(capacity, np.uint8)
        self._uses_at = memoryview(self._uses)
        self._queue = np.zeros(capacity, np.uint8)  # _SMALL or _MAIN
        self._queue_at = memoryview(self._queue)
        self._place = np.zeros(capacity, np.int64)  # tells a row's entry from stale ones
        self._place_at = memoryview(self._place)
        self._tag = np.zeros(capacity if self._tags else 0, np.uint64)
        self._places = 0
        self._rows = [0, 0]  # known ones by queue
        self._queues: tuple[deque[Slot], deque[Slot]] = (deque(), deque())  # (place, row)
        self._ready: deque[Slot] = deque()  # victims that were found and did not go
        self._pending: list[Rows] = []
        self._demoted = Demoted()

    # ---- what the store says

    def admit(self, rows: Rows) -> None:
        require_unknown(self._state, rows)
        self._state[rows] = _QUEUED
        self._uses[rows] = 0
        deepest_first = rows[::-1]
        if self._tags is not None:
            self._tag[deepest_first] = tags = self._tags(deepest_first)
            here = self._ghosts.take(tags)[0]
            if len(here):
                self._enter(_MAIN, deepest_first[np.sort(here)])
                deepest_first = np.delete(deepest_first, here)
        self._enter(_SMALL, deepest_first)
        self._compact()

    def touch(self, rows: Rows) -> None:
        self._pending.append(rows)

    def unblock(self, rows: Rows) -> None:
        waiting = rows[self._state[rows] == _BLOCKED]
        for row in waiting[self._evictable(waiting)].tolist():
            self._return(row)

    def demote(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        self._state[rows] = _QUEUED
        self._place[rows] = _NOWHERE
        self._demoted.add(rows)

    def forget(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        main = int(np.count_nonzero(self._queue[rows]))
        self._rows[_MAIN] -= main
        self._rows[_SMALL] -= len(rows) - main
        self._leave(rows)

    # ---- what goes

    def catch_up(self) -> None:
        self._flush()

    def victims(self, n: int) -> Rows:
        self._flush()
        first = self._take_demoted(n)
        self._demoted.put(first)
        self._validate()
        self._find(n - len(first))
        found = [*first, *islice(self._ready, n - len(first))]
        return np.array([entry[-1] for entry in found], np.intp)

    def evict(self, n: int, gone: Gone) -> int:
        self._flush()
        self._validate()
        evicted: list[int] = []
        any_demoted = bool(self._demoted)
        while len(evicted) < n:
            if any_demoted and (first := self._take_demoted(1)):
                row = first[0][-1]
            elif self._ready or self._find(1):
                _, row = self._ready.popleft()
            else:
                break
            evicted.append(row)
            self._rows[self._queue_at[row]] -= 1
            parent = gone(row)
            if parent >= 0 and self._state_at[parent] == _BLOCKED:
                self._return(parent)
        self._leave(np.array(evicted, np.intp))
        return len(evicted)

    def statistics(self) -> Mapping[str, int]:
        """`rows` known, of these `main` in the main queue; `ghosts`."""
        return {"rows": sum(self._rows), "main": self._rows[_MAIN], "ghosts": self._ghosts.count()}

    def check_integrity(self) -> None:
        self._flush()
        known = np.flatnonzero(self._state)
        assert len(known) == sum(self._rows), "the count of known rows"
        entries = [entry for queue in (*self._queues, self._ready) for entry in queue]
        live = [row for place, row in entries if self._place[row] == place]
        assert len(set(live)) == len(live), "one live entry per row"
        reachable = {*live, *self._demoted.offered()}
        queued = np.flatnonzero(self._state == _QUEUED).tolist()
        assert set(queued) <= reachable, "a scan finds every row that is not blocked"
        blocked = known[self._state[known] == _BLOCKED]
        lost = self._evictable(blocked)
        assert not lost.any(), f"rows {blocked[lost]} are evictable, but nobody called unblock()"
        self._ghosts.check_integrity()

    # ---- uses

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for rows in pending:
            require_known(self._state, rows)
            self._uses[rows] = _USED[self._uses[rows]]
            if self._demoted:
                for row in rows[::-1].tolist():
                    if self._demoted.discard(row) and self._state_at[row] == _QUEUED:
                        self._enqueue(row)

    def _leave(self, rows: Rows) -> None:
        """Known rows, which are counted no longer, are forgotten."""
        if self._demoted:
            for row in rows.tolist():
                self._demoted.discard(row)
        if self._tags is not None:
            for tag in self._tag[rows[self._queue[rows] == _SMALL]].tolist():  # sifted out
                if self._ghosts.add([(tag, 1 << CLASS_BITS)]):
                    self._ghosts.bury()
        self._place[rows] = _NOWHERE
        self._state[rows] = UNKNOWN

    # ---- queues

    def _enter(self, queue: int, rows: Rows) -> None:
        """New rows, the oldest first, at the new end of a queue."""
        self._rows[queue] += len(rows)
        first, self._places = self._places + 1, self._places + len(rows)
        self._queue[rows] = queue
        self._place[rows] = np.arange(first, self._places + 1)
        self._queues[queue].extend(zip(range(first, self._places + 1), rows.tolist(), strict=True))

    def _new_slot(self, row: int) -> Slot:
        place = self._places = self._place_at[row] = self._places + 1
        return place, row

    def _enqueue(self, row: int) -> None:
        """At the new end of its queue."""
        self._queues[self._queue_at[row]].append(self._new_slot(row))

    def _compact(self) -> None:
        """Keeps stale slots, of rows that left otherwise, from piling up."""
        for queue, rows in zip(self._queues, self._rows, strict=True):
            if len(queue) > 2 * rows + _STALE_MAX:
                live = [slot for slot in queue if self._place_at[slot[1]] == slot[0]]
                queue.clear()
                queue.extend(live)

    def _return(self, row: int) -> None:
        """A row that was blocked may go: at the old end of its queue."""
        self._state_at[row] = _QUEUED
        if self._demoted and row in self._demoted:
            self._demoted.offer(row)
        else:
            self._queues[self._queue_at[row]].appendleft(self._new_slot(row))

    def _validate(self) -> None:
        """What is ready was found by an earlier call: since then it may have been used or held."""
        before, self._ready = self._ready, deque()
        for slot in before:
            self._sift(slot)

    def _find(self, n: int) -> bool:
        """Scans until `n` victims are ready, or all that may go; True if there are any."""
        while len(self._ready) < n and self._scan():
            pass
        return len(self._ready) > 0

    def _scan(self) -> bool:
        """Sifts the oldest slots, until some rows were not used; False if there are no more."""
        small, main = self._queues
        share = SMALL_SHARE * sum(self._rows)
        unused = 0
        while unused < _SCAN_ROWS and (small or main):
            from_small = small and (not main or len(small) > share)
            unused += self._sift((small if from_small else main).popleft())
        return unused > 0

    def _sift(self, slot: Slot) -> bool:
        """The row of a slot is ready if it may go; a used one moves on. True if it was not used."""
        place, row = slot
        if self._place_at[row] != place:
            return False
        if self._uses_at[row]:
            self._keep(row)
            return False
        if self._idle(row):
            self._ready.append(slot)
        else:
            self._state_at[row] = _BLOCKED
        return True

    def _keep(self, row: int) -> None:
        """A used row gets another round, in the main queue."""
        queue = self._queue_at[row]
        self._uses_at[row] = self._uses_at[row] - 1 if queue == _MAIN else 0
        self._rows[queue] -= 1
        self._rows[_MAIN] += 1
        self._queue_at[row] = _MAIN
        self._enqueue(row)

    def _take_demoted(self, n: int) -> list[Entry]:
        taken = self._demoted.take(n, self._evictable)
        self._state[taken.blocked] = _BLOCKED
        return taken.going
