"""Prefix hazard: evict what has the lowest rate of reuse per reference of keeping it.

`Experience` values each row: the Gittins index of its class and age, learned from all uses. Victims
are the least of a sample of the leaves; the parent that an eviction frees competes at once. What
was used lately is protected from it, by as much as the learned values may still lose to plain LRU:
at first, and while they lose, all is, and the order is LRU's.

    touch, admit, hint ──► pending ──► experience ──► value of (class, age)
                                                             │
    unblock ──► members: rows that may go ──► sample ──► queue, the least first ──► victims, evict
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import compress, islice

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.base import (
    UNKNOWN,
    Evictable,
    Facts,
    Gone,
    Hint,
    Rows,
    idle_by,
    require_known,
    require_unknown,
)
from kvpool.store.eviction.demoted import Demoted, Entry
from kvpool.store.eviction.experience import Experience
from kvpool.store.eviction.members import Members
from kvpool.store.eviction.sparse import sparse_zeros

_FEW_LEAVES = 1024
"""So many leaves are all looked at; of more, a sample."""
SAMPLE_ROWS = 2048
QUEUE_SHARE = 32
"""Of this many sampled leaves, one becomes a victim: as good as the least of 32."""
_QUEUE_MIN = 16
_RUN_ROWS = 8
_RUN = np.arange(_RUN_ROWS)
_FRESH_ROWS = 1024
_PENDING_ROWS = 1024
"""Uses and new rows that may wait for being taken in, but for the last call's: bounds the pause."""
_PENDING_SHARE = 1024
"""Of the known rows, one of so many may be new or used before victims are chosen anew."""
_HINT_STEPS = np.array([0.25, 0.85])
"""Borders between the classes of hinted probabilities: it ends, a turn ended, a tool was called."""

COST_PER_CHUNK = 512 / 30_500
"""For chunks of 512 tokens: a token at position 30,500 costs twice what the first one costs."""

# States of a row.
_OPEN = 1  # a member: it could go when last looked at
_FIRST = 2  # demoted, and not known to be blocked
_FRESH = 3  # nobody has asked yet whether it may go
_BLOCKED = 4

# What is pending: a hint's level, or one of these.
_ADMIT = -2
_TOUCH = -1


class PhzPolicy:
    """See `kvpool.store.eviction.base.Policy`.

    Memory: 26 bytes per row of the capacity and 16 per ghost, of which there are up to 16 per row
    that fits.
    Time: a request costs a few array operations, a victim its share of a sample; learning and
    ranking are done every few thousand references and take a few milliseconds.
    """

    def __init__(
        self,
        capacity: int,
        evictable: Evictable,
        facts: Facts | None = None,
        *,
        seed: int = 0,
        cost_per_chunk: float = 0.0,
    ) -> None:
        """`cost_per_chunk`: what recomputing a chunk costs more for each chunk above it, as a
        share of what the first one costs. 0: all hits are worth the same."""
        self._evictable = evictable
        self._idle = idle_by(evictable, facts)
        self._experience = Experience(
            capacity, facts or Facts(), seed=seed, cost_per_chunk=cost_per_chunk
        )
        self._random = np.random.default_rng(seed + 1)
        self._state: NDArray[np.uint8] = sparse_zeros(capacity, np.uint8)
        self._state_at = memoryview(self._state)
        self._known = 0
        self._pending: list[tuple[int, Rows]] = []
        self._pending_rows = 0
        self._waiting: set[int] = set()  # rows of the first `_counted` calls that are pending
        self._counted = 0
        self._fresh: list[Rows] = []
        self._fresh_rows = 0
        self._open = Members(capacity)
        self._demoted = Demoted()
        self._queue: deque[Entry] = deque()

    # ---- what the store says

    def admit(self, rows: Rows) -> None:
        require_unknown(self._state, rows)
        if len(rows):
            self._state[rows] = _FRESH
            self._known += len(rows)
            self._add_fresh(rows)
            self._defer(_ADMIT, rows)

    def touch(self, rows: Rows) -> None:
        if len(rows):
            self._defer(_TOUCH, rows)

    def hint(self, rows: Rows, hint: Hint) -> None:
        if hint.will_continue is not None:
            self._defer(1 + int(_HINT_STEPS.searchsorted(hint.will_continue)), rows)

    @property
    def behind(self) -> bool:
        self._flush()
        return self._experience.guard.lead < 0

    def unblock(self, rows: Rows) -> None:
        if len(rows) == 1 and self._state_at[rows[0]] != _BLOCKED:
            return
        blocked = rows[self._state[rows] == _BLOCKED]
        if len(blocked):
            self._state[blocked] = _FRESH
            self._add_fresh(blocked)

    def demote(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        self._open.remove(rows[self._state[rows] == _OPEN])
        self._state[rows] = _FIRST
        self._demoted.add(rows)

    def forget(self, rows: Rows) -> None:
        self._flush()
        require_known(self._state, rows)
        self._drop(rows)

    # ---- what goes

    def catch_up(self) -> None:
        if 4 * self._pending_rows >= _PENDING_ROWS:
            self._flush()
        if 4 * self._fresh_rows >= _FRESH_ROWS:
            self._sort_in_fresh()

    def victims(self, n: int) -> Rows:
        self._take_in()
        self._validate(n)
        first = self._take_demoted(n)
        self._demoted.put(first)
        self._fill(n - len(first))
        front = [*first, *islice(self._queue, n - len(first))]
        return np.array([row for _, _, row in front], np.intp)

    def evict(self, n: int, gone: Gone) -> int:
        if self._demoted or _PENDING_SHARE * self._pending_rows > self._known:
            self._take_in()
        else:
            self._count_waiting()
        if n == 1 and not self._demoted:
            return self._evict_one(gone)
        self._validate(n)
        evicted = 0
        freed: list[Entry] = []
        while (missing := n - evicted) > 0:
            if self._demoted and (first := deque(self._take_demoted(missing))):
                evicted += self._evict_from(first, missing, gone, freed)
                self._demoted.put(first)
            elif self._queue:
                evicted += self._evict_from(self._queue, missing, gone, freed)
            elif not self._lengthen(missing):
                break
            if not self._queue:
                self._open_up(freed)
        self._open_up(freed)
        return evicted

    def _evict_one(self, gone: Gone) -> int:
        """`evict` of one row, none being demoted, several times faster."""
        queue = self._queue
        while not queue or not self._still(queue[0]):
            if queue:
                queue.popleft()
            elif not self._lengthen(1):
                return 0
        _, _, row = queue.popleft()
        parent = gone(row)
        self._open.remove_one(row)
        self._state_at[row] = UNKNOWN
        self._experience.leave_one(row)
        self._known -= 1
        if parent >= 0 and self._state_at[parent] != _OPEN:
            self._open_one(parent)
        return 1

    def _lengthen(self, n: int) -> bool:
        """Makes the empty queue longer, for `n` victims; False if there are none."""
        few = len(self._open) <= _FEW_LEAVES
        if not (few and self._pending):
            if self._fill(n if few else 1):
                return True
            if not self._pending:
                return False
        self._take_in()
        return True

    def _evict_from(self, queue: deque[Entry], n: int, gone: Gone, freed: list[Entry]) -> int:
        """Merges the queue with the parents that are freed on the way; ends with the queue."""
        evicted: list[int] = []
        spared: list[int] = []
        waiting = self._waiting
        entry_of = self._entry if self._demoted else self._experience.entry
        while queue and len(evicted) < n:
            entry = heappop(freed) if freed and freed[0] < queue[0] else queue.popleft()
            rival = min(queue[0], freed[0]) if queue and freed else queue[0] if queue else None
            while True:  # a chain goes on while the parent that it frees is the least
                evicted.append(entry[2])
                parent = gone(entry[2])
                if parent < 0:
                    break
                if parent in waiting:
                    spared.append(parent)
                    break
                entry = entry_of(parent)
                if rival is None or entry > rival or len(evicted) == n:
                    heappush(freed, entry)
                    break
        self._drop(np.array(evicted, np.intp))
        if spared:
            self.unblock(np.array(spared, np.intp))
        return len(evicted)

    def statistics(self) -> Mapping[str, int]:
        """`rows` known, of these `leaves` that could go when last looked at; `ghosts`; `learned`
        uses; `trusted`: 1 while the learned order is used; `lead` hits over plain LRU."""
        return {
            "rows": self._known,
            "leaves": len(self._open),
            "ghosts": self._experience.ghosts.count(),
            "learned": self._experience.hazards.observed,
            "trusted": int(self._experience.guard.trusts),
            "lead": self._experience.guard.lead,
        }

    def dump(self) -> bytes:
        """What was learned, for `load` after a restart."""
        self._flush()
        return self._experience.dump()

    def load(self, dumped: bytes) -> None:
        """Starts from what another life learned. `ValueError` for anything else."""
        self._experience.load(dumped)
        self._queue.clear()

    def values(self, rows: Rows) -> NDArray[np.float64]:
        """See `kvpool.store.eviction.admission.Values`."""
        self._flush()
        return self._experience.worth(rows)

    def uses(self, rows: Rows) -> NDArray[np.int64]:
        """See `kvpool.store.eviction.admission.Values`; 3 stands for more."""
        self._flush()
        return self._experience.uses(rows)

    def check_integrity(self) -> None:
        self._flush()
        state = self._state
        known = np.flatnonzero(state)
        assert len(known) == self._known, "the count of known rows"
        assert np.array_equal(known, np.flatnonzero(self._experience.stamps)), (
            "a stamp exactly for known rows"
        )
        self._open.check_integrity()
        assert np.array_equal(np.sort(self._open.all()), np.flatnonzero(state == _OPEN))
        offered = self._demoted.offered()
        assert set(np.flatnonzero(state == _FIRST).tolist()) <= offered, "demoted, and offered"
        fresh = np.concatenate([np.empty(0, np.intp), *self._fresh])
        assert set(np.flatnonzero(state == _FRESH).tolist()) <= set(fresh.tolist())
        blocked = known[state[known] == _BLOCKED]
        lost = self._evictable(blocked)
        assert not lost.any(), f"rows {blocked[lost]} are evictable, but nobody called unblock()"
        self._experience.ghosts.check_integrity()

    # ---- uses

    def _defer(self, what: int, rows: Rows) -> None:
        if self._pending_rows >= _PENDING_ROWS:  # not for these, whoever says them waits for us
            self._flush()
        self._pending.append((what, rows))
        self._pending_rows += len(rows)

    def _count_waiting(self) -> None:
        """What is pending is no victim: what is known of it is out of date."""
        for _, rows in self._pending[self._counted :]:
            self._waiting.update(rows.tolist())
        self._counted = len(self._pending)

    def _take_in(self) -> None:
        self._flush()
        self._sort_in_fresh()

    def _flush(self) -> None:
        """Takes in what is pending, in its order."""
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0
        self._waiting.clear()
        self._counted = 0
        uses: list[tuple[int, Rows]] = []
        for what, rows in pending:
            if what <= _TOUCH:
                uses.append((what, rows))
                continue
            self._use(uses)
            uses = []
            require_known(self._state, rows)
            self._experience.hint(rows, what)
        self._use(uses)
        few = len(self._open) <= _FEW_LEAVES
        share = 0 if self._experience.review() or few else len(self._open) // QUEUE_SHARE
        while len(self._queue) > share:  # what is queued must be among the least after these uses
            self._queue.pop()

    def _use(self, calls: list[tuple[int, Rows]]) -> None:
        touched = [rows for what, rows in calls if what == _TOUCH]
        if touched:
            rows = np.concatenate(touched)
            require_known(self._state, rows)
            self._promote(rows)
        self._experience.use([(what == _ADMIT, rows) for what, rows in calls])

    def _promote(self, rows: Rows) -> None:
        """Used rows are no longer demoted."""
        if self._demoted:
            for row in rows.tolist():
                if self._demoted.discard(row) and self._state[row] == _FIRST:
                    self._state[row] = _OPEN
                    self._open.add_one(row)

    def _drop(self, rows: Rows) -> None:
        """Known rows have left."""
        for row in rows[self._state[rows] == _OPEN].tolist():  # few: the others were parents
            self._open.remove_one(row)
        if self._demoted:
            for row in rows.tolist():
                self._demoted.discard(row)
        self._state[rows] = UNKNOWN
        self._experience.leave(rows)
        self._known -= len(rows)

    # ---- order

    def _entry(self, row: int) -> Entry:
        if row in self._demoted:
            return self._demoted.entry(row)
        return self._experience.entry(row)

    def _validate(self, n: int) -> None:
        """Of the queue, the first `n` entries are valid afterwards."""
        queue = self._queue
        if n == 1:
            while queue and not self._still(queue[0]):
                queue.popleft()
            return
        valid: list[Entry] = []
        while queue and len(valid) < n:
            front = [queue.popleft() for _ in range(min(n - len(valid), len(queue)))]
            valid += self._still_among(front)
        queue.extendleft(reversed(valid))

    def _still(self, entry: Entry) -> bool:
        """Whether it is as it was when it was queued, and may go."""
        _, stamp, row = entry
        if self._experience.stamps_at[row] != stamp or self._state_at[row] != _OPEN:
            return False
        return row not in self._waiting and self._idle(row)

    def _still_among(self, entries: list[Entry]) -> list[Entry]:
        """`_still` of many."""
        if self._waiting:
            entries = [entry for entry in entries if entry[2] not in self._waiting]
        if not entries:
            return []
        _, stamps, rows = (np.array(column) for column in zip(*entries, strict=True))
        same = (self._experience.stamps[rows] == stamps) & (self._state[rows] == _OPEN)
        same[same] = self._evictable(rows[same].astype(np.intp))
        return list(compress(entries, same.tolist()))

    def _fill(self, n: int) -> bool:
        """Lengthens the queue to `n` entries if there are so many; True if it is not empty.

        While something is pending, it may find less than there is.
        """
        while (missing := n - len(self._queue)) > 0:
            exact = len(self._open) <= max(_FEW_LEAVES, QUEUE_SHARE * missing)
            if self._enqueue(missing, exact=exact):
                continue
            if self._waiting or (exact and not self._sort_in_fresh()):
                break
        return len(self._queue) > 0

    def _enqueue(self, n: int, *, exact: bool) -> bool:
        """Appends the least of all members or of a sample; False if there is nothing new."""
        rows = self._open.all() if exact else self._sample()
        rows = self._without_blocked(rows)
        if self._queue:
            queued = {row for _, _, row in self._queue}
            rows = rows[[row not in queued for row in rows.tolist()]]
        wanted = max(n, _QUEUE_MIN) if exact else max(1, len(rows) // QUEUE_SHARE)
        values = self._experience.values(rows)
        if len(rows) > wanted:
            least = values <= np.partition(values, wanted - 1)[wanted - 1]
            rows, values = rows[least], values[least]
        stamps = self._experience.stamps[rows]
        order = np.lexsort((stamps, values))[:wanted]
        columns = (column[order].tolist() for column in (values, stamps, rows))
        found = list(zip(*columns, strict=True))
        if self._waiting:
            found = [entry for entry in found if entry[2] not in self._waiting]
        self._queue.extend(found)
        return len(found) > 0

    def _sample(self) -> Rows:
        """Distinct members, in short runs: who is neighbours there is often so in memory."""
        last = len(self._open) - _RUN_ROWS
        starts = np.sort(self._random.integers(0, last + 1, SAMPLE_ROWS // _RUN_ROWS))
        seen = np.append(-1, starts[:-1] + _RUN_ROWS - 1)  # the last of the run before
        numbers = starts[:, None] + _RUN
        return self._open.at(numbers[numbers > seen[:, None]])

    def _without_blocked(self, rows: Rows) -> Rows:
        """Those of the members that may go; the others are members no longer."""
        good = self._evictable(rows)
        if False not in good.tobytes():
            return rows
        blocked = rows[~good]
        self._state[blocked] = _BLOCKED
        self._open.remove(blocked)
        return rows[good]

    def _add_fresh(self, rows: Rows) -> None:
        self._fresh.append(rows)
        self._fresh_rows += len(rows)
        if self._fresh_rows > len(self._state) + _FRESH_ROWS:  # most are fresh no longer
            waiting = np.flatnonzero(self._state == _FRESH)
            starts = range(0, len(waiting), _FRESH_ROWS)
            self._fresh = [waiting[start : start + _FRESH_ROWS] for start in starts]
            self._fresh_rows = len(waiting)

    def _sort_in_fresh(self) -> int:
        """Looks at the next fresh rows, whether they may go; returns how many."""
        looked: list[Rows] = []
        count = 0
        while self._fresh and count < _FRESH_ROWS:
            looked.append(self._fresh.pop())
            count += len(looked[-1])
        if not looked:
            return 0
        self._fresh_rows -= count
        rows = np.concatenate(looked)
        waiting = rows[self._state[rows] == _FRESH]
        rows = np.unique(waiting[self._evictable(waiting)])  # some come twice
        self._state[waiting] = _BLOCKED
        if self._demoted:
            for row in rows.tolist():
                self._open_one(row)
        else:
            self._state[rows] = _OPEN
            self._open.add(rows)
        return count

    def _open_up(self, freed: list[Entry]) -> None:
        """Parents that were freed and did not go become members."""
        for _, _, row in freed:
            if self._state_at[row] != _OPEN:
                self._open_one(row)
        freed.clear()

    def _open_one(self, row: int) -> None:
        """A row that may go becomes a member, or is offered first."""
        if row in self._demoted:
            self._state_at[row] = _FIRST
            self._demoted.offer(row)
        else:
            self._state_at[row] = _OPEN
            self._open.add_one(row)

    def _take_demoted(self, n: int) -> list[Entry]:
        """Up to `n` demoted rows that may go; those that stay are to be put back."""
        taken = self._demoted.take(n, self._evictable)
        self._state[taken.blocked] = _BLOCKED
        return taken.going


class CostWeightedPhz(PhzPolicy):
    """phz that keeps what is dear to compute: it trades hits for saved prefill work."""

    def __init__(
        self,
        capacity: int,
        evictable: Evictable,
        facts: Facts | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__(capacity, evictable, facts, seed=seed, cost_per_chunk=COST_PER_CHUNK)
