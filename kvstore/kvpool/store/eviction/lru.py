"""Exact least-recently-used order over the rows without children: leaf-only LRU.

Each use gives a row a new *stamp* and appends an entry (row, stamp) to a log. An entry is *live*
while its row still has that stamp, so the live entries list rows from the oldest use to the newest:

    old end  [block 0] [block 1] ... [block k]  new end
             ^ victims walk from here           ^ uses are appended here
             ^ demoted and returning rows go before it

What a walk finds blocked it never looks at again until `unblock` names it. What an eviction passes,
dead, gone or blocked, is dropped; a dropped row that is unblocked returns to its place by stamp.
Two blocks are cleaned of dead entries for each block of new ones, so that the log stays
below two entries per row without a pause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.base import (
    UNKNOWN,
    Evictable,
    Gone,
    Rows,
    require_known,
    require_unknown,
)

BLOCK_ROWS = 4096
"""Entries of a log block, and uses that may wait for being logged."""
_WINDOW_ROWS = 32
"""Entries that a walk looks at first; doubled until it has found enough."""

_FEW_USES = 4
"""Calls whose repetitions are not worth looking for."""

Stamps = NDArray[np.int64]

# States of a row: does the log have its entry, and will a walk consider it?
_LOGGED = 1  # in the log, or a use is pending
_BLOCKED = 2  # in the log, but was not evictable when a walk came by
_DROPPED = 3  # likewise, and its entry is gone
_RETURNING = 4  # dropped, and unblocked since


class _Block:
    """A piece of the log: entries ``[start, end)``, stamps ascending."""

    __slots__ = ("end", "rows", "stamps", "start")

    def __init__(self, size: int) -> None:
        self.rows = np.empty(size, np.intp)
        self.stamps = np.empty(size, np.int64)
        self.start = self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    def write(self, at: int, rows: Rows, stamps: Stamps) -> None:
        self.rows[at : at + len(rows)] = rows
        self.stamps[at : at + len(rows)] = stamps

    def view(self, start: int, stop: int) -> tuple[Rows, Stamps]:
        return self.rows[start:stop], self.stamps[start:stop]


class _Walk:
    """Evicts `n` rows along the log: `over` entries in their order, each once."""

    __slots__ = ("_gone", "_n", "_stamp_at", "_state_at", "aside", "evicted", "freed", "passed")

    def __init__(
        self, n: int, gone: Gone, stamp_at: memoryview[int], state_at: memoryview[int]
    ) -> None:
        self._n = n
        self._gone = gone
        self._stamp_at = stamp_at
        self._state_at = state_at
        self.evicted: list[int] = []
        self.passed: list[int] = []
        """Blocked when the walk came by; some were freed and evicted afterwards."""
        self.freed: set[int] = set()
        """Parents that may go now and did not: the walk comes by."""
        self.aside: list[tuple[int, int]] = []
        """The same (stamp and row, a heap), but the walk has passed them, or an earlier one has
        dropped them."""

    @property
    def missing(self) -> int:
        return self._n - len(self.evicted)

    def over(self, rows: list[int], stamps: list[int], good: list[bool]) -> int:
        """Evicts those that are good or were freed; returns the last stamp that was looked at."""
        freed, aside = self.freed, self.aside
        last = stamps[0] - 1 if stamps else 0
        for row, stamp, may_go in zip(rows, stamps, good, strict=True):
            if aside and aside[0][0] < stamp:
                self.catch_up(stamp)
            if len(self.evicted) == self._n:
                break
            last = stamp
            if row in freed:
                freed.remove(row)
            elif not may_go:
                self.passed.append(row)
                continue
            self._evict(row, stamp)
        return last

    def catch_up(self, stamp: float) -> None:
        """Evicts what is aside and older than `stamp`."""
        while self.aside and self.aside[0][0] < stamp and self.missing:
            older, row = heappop(self.aside)
            self._evict(row, older)

    def _evict(self, row: int, stamp: int) -> None:
        self.evicted.append(row)
        parent = self._gone(row)
        if parent >= 0:
            if self._stamp_at[parent] < stamp or self._state_at[parent] == _DROPPED:
                heappush(self.aside, (self._stamp_at[parent], parent))
            else:
                self.freed.add(parent)


class LruPolicy:
    """See `kvpool.store.eviction.base.Policy`.

    Memory: 9 bytes per row of the capacity and at most 32 per known row. Time: what a walk finds
    dead or blocked is paid for once; the longest call is the walk over rows that are all blocked.
    """

    def __init__(
        self, capacity: int, evictable: Evictable, *, block_rows: int = BLOCK_ROWS
    ) -> None:
        """`block_rows` affects speed only; tests make it small to see many blocks."""
        self._evictable = evictable
        self._block_rows = block_rows
        self._stamp = np.zeros(capacity, np.int64)  # of known rows; negative once demoted
        self._stamp_at = memoryview(self._stamp)
        self._state = np.zeros(capacity, np.uint8)
        self._state_at = memoryview(self._state)
        self._known = 0
        self._newest = 0  # stamp
        self._oldest = 0  # stamp
        self._pending: list[Rows] = []  # uses that are not in the log yet, oldest first
        self._pending_rows = 0
        self._returning: list[Rows] = []
        self._log = [_Block(block_rows)]  # never empty; only the last block takes new uses
        self._spare: list[_Block] = []  # kept, because returning them would fragment the heap
        self._cursor = 0  # block to clean next
        self._uncleaned = 0  # entries that may have died since the last cleaning

    def admit(self, rows: Rows) -> None:
        require_unknown(self._state, rows)
        self._state[rows] = _LOGGED
        self._known += len(rows)
        self.touch(rows)

    def touch(self, rows: Rows) -> None:
        if not len(rows):
            return
        self._pending.append(rows)
        self._pending_rows += len(rows)
        if self._pending_rows >= self._block_rows:
            self._flush()

    def catch_up(self) -> None:
        if 4 * self._pending_rows >= self._block_rows:
            self._flush()

    def victims(self, n: int) -> Rows:
        self._flush()
        self._rejoin()
        if n == 1 and len(head := self._evictable_head()):
            return head
        found = [np.empty(0, np.intp)]
        missing, window = n, max(_WINDOW_ROWS, 2 * n)
        index, position = 0, self._log[0].start
        while missing > 0 and (at := self._reach(index, position)):
            index, position = at
            block = self._log[index]
            stop = min(position + window, block.end)
            rows, first = self._sift(block, position, stop, drop=missing == n)
            if missing == n:
                self._drop_before(index, first)
                index = 0
            found.append(rows[:missing])
            missing -= len(rows)
            position, window = stop, 2 * window
        return np.concatenate(found)

    def evict(self, n: int, gone: Gone) -> int:
        """One walk, that takes what it passes off the log: a parent that is freed is ahead of it,
        or so old that it goes at once, or an earlier walk has dropped it and it waits aside."""
        self._flush()
        self._rejoin()
        if n == 1 and len(head := self._evictable_head()):
            parent = gone(int(head[0]))
            self._leave(head)
            if parent >= 0:
                self.unblock(np.array([parent], np.intp))
            return 1
        walk = _Walk(n, gone, self._stamp_at, self._state_at)
        index, position, window = 0, self._log[0].start, n + _WINDOW_ROWS
        while walk.missing > 0 and (at := self._reach(index, position)):
            index, position = at
            block = self._log[index]
            stop = min(position + window, block.end)
            rows, stamps = block.view(position, stop)
            live = self._stamp[rows] == stamps
            if np.count_nonzero(live) < len(rows):
                rows, stamps = rows[live], stamps[live]
            good = self._state[rows] == _LOGGED
            good &= self._evictable(rows)
            last = walk.over(rows.tolist(), stamps.tolist(), good.tolist())
            if walk.missing > 0:
                position = stop
            else:
                position += int(block.stamps[position:stop].searchsorted(last, "right"))
            window *= 2
        walk.catch_up(math.inf)
        self._drop_before(index, position)
        if walk.passed:
            self._state[walk.passed] = _DROPPED
        self._leave(np.array(walk.evicted, np.intp))
        freed = [*walk.freed, *(row for _, row in walk.aside)]
        if freed:
            self.unblock(np.array(freed, np.intp))
        return len(walk.evicted)

    def _reach(self, index: int, position: int) -> tuple[int, int] | None:
        """Block and position of the next entry; None at the end of the log."""
        while position == self._log[index].end:
            index += 1
            if index == len(self._log):
                return None
            position = self._log[index].start
        return index, position

    def _leave(self, rows: Rows) -> None:
        self._stamp[rows] = 0
        self._state[rows] = UNKNOWN
        self._known -= len(rows)
        self._clean_after(len(rows))

    def unblock(self, rows: Rows) -> None:
        if len(rows) == 1 and self._state_at[rows[0]] <= _LOGGED:
            return
        states = self._state[rows]
        if not np.count_nonzero(states > _LOGGED):
            return
        self._state[rows[states == _BLOCKED]] = _LOGGED
        dropped = rows[states == _DROPPED]
        if len(dropped):
            dropped = dropped[self._evictable(dropped)]
            self._state[dropped] = _RETURNING
            self._returning.append(dropped)

    def demote(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        deepest_first = rows[::-1]
        stamps = np.arange(self._oldest - len(rows), self._oldest)
        self._oldest -= len(rows)
        self._stamp[deepest_first] = stamps
        self._state[deepest_first] = _LOGGED
        self._prepend(deepest_first, stamps)
        self._clean_after(len(rows))

    def forget(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        self._leave(rows)

    def statistics(self) -> Mapping[str, int]:
        """`rows` known, of these `blocked_rows` when last seen; `log_entries` live or dead."""
        blocked = (self._state == _BLOCKED) | (self._state == _DROPPED)
        return {
            "rows": self._known,
            "blocked_rows": int(np.count_nonzero(blocked)),
            "log_entries": sum(map(len, self._log)) + self._pending_rows,
        }

    def check_integrity(self) -> None:
        self._flush()
        known = np.flatnonzero(self._state)
        assert len(known) == self._known, "the count of known rows"
        assert np.array_equal(known, np.flatnonzero(self._stamp)), "a stamp exactly for known rows"
        assert all(map(len, self._log[1:-1])), "only the first and the last block may be empty"
        rows = np.concatenate([block.view(block.start, block.end)[0] for block in self._log])
        stamps = np.concatenate([block.view(block.start, block.end)[1] for block in self._log])
        assert (np.diff(stamps) > 0).all(), "the log ascends"
        live = np.sort(rows[self._stamp[rows] == stamps])
        in_log = (self._state == _LOGGED) | (self._state == _BLOCKED)
        assert np.array_equal(live, np.flatnonzero(in_log)), (
            "one live entry for each row in the log"
        )
        returning = np.concatenate([np.empty(0, np.intp), *self._returning])
        returning = returning[self._state[returning] == _RETURNING]
        assert np.array_equal(np.sort(returning), np.flatnonzero(self._state == _RETURNING))
        blocked = np.flatnonzero((self._state == _BLOCKED) | (self._state == _DROPPED))
        lost = self._evictable(blocked.astype(np.intp))
        assert not lost.any(), f"rows {blocked[lost]} are evictable, but nobody called unblock()"

    def _flush(self) -> None:
        """Log the pending uses: of each call's rows, the deepest gets the smallest stamp."""
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0
        rows = np.concatenate([rows[::-1] for rows in pending])
        require_known(self._state, rows)
        stamps = np.arange(self._newest + 1, self._newest + 1 + len(rows))
        self._newest += len(rows)
        self._state[rows] = _LOGGED
        self._stamp[rows] = stamps
        if len(pending) > _FEW_USES:  # of a row's several uses, only the last needs an entry
            last = self._stamp[rows] == stamps
            rows, stamps = rows[last], stamps[last]
        self._append(rows, stamps)
        self._clean_after(len(rows))

    def _evictable_head(self) -> Rows:
        """The oldest row if it may go, else nothing: a single victim costs no walk."""
        block = self._log[0]
        # The victims before are dead entries now; more than a few are faster to walk over.
        for position in range(block.start, min(block.start + 8, block.end)):
            head = block.rows[position : position + 1]
            row = int(head[0])
            if self._stamp[row] == block.stamps[position]:
                block.start = position
                if self._state[row] == _LOGGED and self._evictable(head)[0]:
                    return head.copy()
                break
        return np.empty(0, np.intp)

    def _sift(self, block: _Block, start: int, stop: int, *, drop: bool) -> tuple[Rows, int]:
        """The evictable rows among entries ``[start, stop)``, and the position of the first.

        The others become blocked; with `drop`, those before the first become dropped.
        """
        rows, stamps = block.view(start, stop)
        live = np.flatnonzero(self._stamp[rows] == stamps)
        rows = rows[live]
        good = self._state[rows] == _LOGGED
        good[good] = self._evictable(rows[good])
        self._state[rows[~good]] = _BLOCKED
        first = int(good.argmax()) if good.any() else len(rows)
        if drop and first:
            self._state[rows[:first]] = _DROPPED
        return rows[good], start + int(live[first]) if first < len(rows) else stop

    def _drop_before(self, index: int, position: int) -> None:
        """Shorten the log to what begins at this entry of this block."""
        self._log[index].start = position
        self._spare.extend(self._log[:index])
        del self._log[:index]
        self._cursor = max(0, self._cursor - index)

    def _rejoin(self) -> None:
        """Merge the returning rows into the log by stamp."""
        if not self._returning:
            return
        rows, self._returning = np.concatenate(self._returning), []
        rows = rows[self._state[rows] == _RETURNING]  # some were used or left since
        if not len(rows):
            return
        self._state[rows] = _LOGGED
        stamps = self._stamp[rows]
        older_rows, older_stamps = self._cut_before(int(stamps.max()))
        rows, stamps = np.append(rows, older_rows), np.append(stamps, older_stamps)
        order = np.argsort(stamps)
        self._prepend(rows[order], stamps[order])

    def _cut_before(self, stamp: int) -> tuple[Rows, Stamps]:
        """Take the entries that are older than `stamp` off the log; returns the live ones."""
        rows, stamps = [], []
        index = 0
        while True:
            block = self._log[index]
            _, candidates = block.view(block.start, block.end)
            cut = block.start + int(np.searchsorted(candidates, stamp))
            rows.append(block.rows[block.start : cut])
            stamps.append(block.stamps[block.start : cut])
            if cut < block.end or index + 1 == len(self._log):
                break
            index += 1
        older_rows, older_stamps = np.concatenate(rows), np.concatenate(stamps)
        self._drop_before(index, cut)
        live = self._stamp[older_rows] == older_stamps
        return older_rows[live], older_stamps[live]

    def _new_block(self, start: int) -> _Block:
        block = self._spare.pop() if self._spare else _Block(self._block_rows)
        block.start = block.end = start
        return block

    def _append(self, rows: Rows, stamps: Stamps) -> None:
        while len(rows):
            block = self._log[-1]
            room = self._block_rows - block.end
            if room == 0:
                self._log.append(self._new_block(0))
                continue
            block.write(block.end, rows[:room], stamps[:room])
            block.end += min(room, len(rows))
            rows, stamps = rows[room:], stamps[room:]

    def _prepend(self, rows: Rows, stamps: Stamps) -> None:
        while len(rows):
            block = self._log[0]
            if block.start == 0:
                self._log.insert(0, self._new_block(self._block_rows))
                self._cursor += 1
                continue
            taken = min(block.start, len(rows))
            block.start -= taken
            block.write(block.start, rows[-taken:], stamps[-taken:])
            rows, stamps = rows[:-taken], stamps[:-taken]

    def _clean_after(self, deaths: int) -> None:
        """Clean two blocks for each block of entries that may have died.

        Then at most half of the entries die while the cursor crosses the log once, so that it
        holds no more than two per row.
        """
        self._uncleaned += deaths
        while self._uncleaned >= self._block_rows:
            self._uncleaned -= self._block_rows
            self._clean_next()
            self._clean_next()

    def _clean_next(self) -> None:
        """Drop the block's dead entries, and fill the block before it with what is left."""
        if self._cursor >= len(self._log) - 1:  # the last block is still being written
            self._cursor = 0
            return
        block = self._log[self._cursor]
        rows, stamps = block.view(block.start, block.end)
        live = self._stamp[rows] == stamps
        rows, stamps = rows[live], stamps[live]
        if self._cursor:
            before = self._log[self._cursor - 1]
            room = self._block_rows - before.end
            before.write(before.end, rows[:room], stamps[:room])
            before.end += min(room, len(rows))
            rows, stamps = rows[room:], stamps[room:]
        block.write(0, rows, stamps)
        block.start, block.end = 0, len(rows)
        if len(rows):
            self._cursor += 1
        else:
            self._spare.append(self._log.pop(self._cursor))
