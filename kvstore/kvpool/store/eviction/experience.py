"""What a learning policy knows of each row, and what it learned from all of them.

Every row has an age (references since its last use) and a class: how many chunks its request
brought that were never seen before, how often it was used, and what a hint says of it. `Hazards`
learns when each class is used again. Rows that left are remembered as ghosts, so that a chunk that
returns teaches as much as one that stayed. `Guard` says which ages are not to be judged by that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.base import Facts, Rows, firsts
from kvpool.store.eviction.demoted import Entry
from kvpool.store.eviction.ghosts import CLASS_BITS, Classes, Ghosts, Stamps, Tags
from kvpool.store.eviction.guard import EVERY_AGE, Guard
from kvpool.store.eviction.hazards import BUCKETS, FIRST_AGES, KINDS, Hazards, buckets_of
from kvpool.store.eviction.shadow import LruShadow
from kvpool.store.eviction.sparse import sparse_zeros

_GHOSTS_PER_ROW = 8
_GHOST_ROWS_MIN = 4096
_BREADTHS = np.array([0, 1, 4, 8, 16])
"""Never seen chunks of a request: at most this many, of breadths 0, 1, ... and 5 beyond."""
_LESSON_ROWS = 4096
"""Uses that are learned from at once."""
_RANK_REFERENCES_MIN = 4096
_STUDY_REFERENCES_MIN = 512
_STUDIES_PER_CAPACITY = 8
"""References until new uses are learned from, and the stakes are found anew."""
_CENSUS = 4096
_CENSUS_RUNS = 128
"""Rows, and runs of ghosts, that a ranking looks at."""

_PROTECTED = 1e12
"""Added to the stamps of protected rows: more than any index."""
_STRIDE_WEIGHT = 0.1
"""Of the newest requests in the average size of a request."""

_CLASS = np.arange(256)
_TOUCHED = (_CLASS % KINDS + (_CLASS % 3 < 2)).astype(np.uint8)
"""The class after a use: one more touch, no hint."""
_FIRST_CLASSES = 3 * np.arange(len(_BREADTHS) + 1, dtype=np.uint8)
"""The class of a new row, by breadth."""
_TOUCHED_BEFORE = np.stack([_CLASS, _TOUCHED, _TOUCHED[_TOUCHED]]).astype(np.uint8)
"""The class after none, one, and two or more uses."""
_BUCKETS = np.array(BUCKETS)
_FIRST_AGES: list[int] = FIRST_AGES.tolist()


class _Census(NamedTuple):
    """A sample of what waits for its next use."""

    stamps: Stamps
    classes: Classes
    weights: NDArray[np.float64]
    """Entries that each stands for."""


class _Uses(NamedTuple):
    """Rows of several calls, of each call the deepest first, and their stamps."""

    rows: Rows
    stamps: Stamps
    lengths: NDArray[np.int64]
    ends: Stamps
    """By call: how many rows, and the last stamp."""

    def by_row(self, column: NDArray[Any]) -> NDArray[Any]:
        """What is said of each call, of its rows; of a single call, once for all rows."""
        return column if len(column) == 1 else column.repeat(self.lengths)


def _laid_out(calls: Sequence[tuple[int, Rows]]) -> _Uses:
    """Of each call: the newest stamp before it, and its rows."""
    if len(calls) == 1:
        ((clock, rows),) = calls
        end = clock + len(rows)
        stamps = np.arange(clock + 1, end + 1)
        return _Uses(rows[::-1], stamps, np.array([len(rows)]), np.array([end]))
    lengths = np.array([len(rows) for _, rows in calls])
    ends = np.array([clock for clock, _ in calls]) + lengths
    every = np.concatenate([rows[::-1] for _, rows in calls])
    stamps = np.arange(1, len(every) + 1) + (ends - lengths.cumsum()).repeat(lengths)
    return _Uses(every, stamps, lengths, ends)


class Experience:
    """Memory: 17 bytes per row of the capacity, 16 per ghost."""

    def __init__(self, capacity: int, facts: Facts, *, seed: int, cost_per_chunk: float) -> None:
        self._room = facts.room
        self._known = 0
        self._capacity = self._fitting(capacity)
        self._tags = facts.tags
        self._depths = facts.depths if cost_per_chunk else None
        self._cost = cost_per_chunk
        self._random = np.random.default_rng(seed)
        self.stamps: Stamps = sparse_zeros(capacity, np.int64)
        """Last use by row, in references; 0 for rows that are not known."""
        self._classes: Classes = sparse_zeros(capacity, np.uint8)
        self._tag: Tags = sparse_zeros(capacity if facts.tags else 0, np.uint64)
        self.stamps_at = memoryview(self.stamps)
        self._classes_at, self._tag_at = memoryview(self._classes), memoryview(self._tag)
        self._rows_end = 0  # all known rows are below
        self._clock = 0  # references so far, and the newest stamp
        per_row = min(_GHOSTS_PER_ROW, facts.ghosts_per_row or _GHOSTS_PER_ROW)
        self.ghosts = Ghosts(per_row * max(self._capacity, min(capacity, _GHOST_ROWS_MIN)))
        self.hazards = Hazards()
        self._use_index()
        self._next_rank = _RANK_REFERENCES_MIN
        self._next_study = _STUDY_REFERENCES_MIN
        self._stride = 0.0  # references per request: no row is used again sooner than that
        self._now = 0  # the clock, a stride ahead: what ages are counted to
        self._requests = 0  # since the last review
        self._lessons: dict[bool, list[tuple[Classes, Stamps]]] = {True: [], False: []}
        self._lesson_rows = 0
        self._shadow = LruShadow(self._capacity)
        self.guard = Guard(lenient=cost_per_chunk > 0)
        self._own_hits = 0
        self._met: list[Stamps] = []  # earlier stamps of what was used since the last review

    # ---- what happens to rows

    def use(self, calls: Sequence[tuple[bool, Rows]]) -> None:
        """Rows were used, call by call; True: these became known by it."""
        admits: list[tuple[int, Rows]] = []
        touches: list[tuple[int, Rows]] = []
        for new, rows in calls:
            (admits if new else touches).append((self._clock, rows))
            self._clock += len(rows)
        self._requests += max(len(admits), len(touches))
        if admits:
            self._admit(_laid_out(admits))
        if touches:
            self._touch(_laid_out(touches))

    def _admit(self, uses: _Uses) -> None:
        """New rows get a class, from what is remembered of them if they were here before."""
        rows = uses.rows
        self._known += len(rows)
        if self._rows_end < len(self.stamps):
            self._rows_end = max(self._rows_end, int(rows.max()) + 1)
        self.stamps[rows] = uses.stamps
        size, touches = uses.lengths, None
        if self._tags is not None:
            self._tag[rows] = tags = self._tags(rows)
            back, ghosts = self.ghosts.take(tags)
            if len(back):
                call = size.cumsum().searchsorted(back, "right")
                size = size - np.bincount(call, minlength=len(size))
                touches = np.zeros(len(rows), np.uint8)
                touches[back] = _TOUCHED[ghosts.classes] % 3
                self._meet(ghosts.classes, ghosts.stamps, uses.ends[call])
        classes = uses.by_row(_FIRST_CLASSES[_BREADTHS.searchsorted(size)])
        self._classes[rows] = classes if touches is None else classes + touches

    def _touch(self, uses: _Uses) -> None:
        """Known rows get new stamps, and teach by their ages."""
        rows, stamps = uses.rows, uses.stamps
        classes, before = self._classes[rows], self.stamps[rows]
        self.stamps[rows] = stamps
        several = len(uses.lengths) > 1
        if several and (self.stamps[rows] != stamps).any():  # some were used several times
            order = rows.argsort(kind="stable")
            again = ~firsts(rows[order])
            before[order[again]] = stamps[order[again.nonzero()[0] - 1]]
            number = np.arange(len(rows))
            nth = number - np.maximum.accumulate(np.where(again, 0, number))
            classes[order] = _TOUCHED_BEFORE[np.minimum(nth, 2), classes[order]]
        self._classes[rows] = _TOUCHED[classes]
        self._meet(classes, before, uses.by_row(uses.ends))
        self._own_hits += len(rows)

    def hint(self, rows: Rows, level: int) -> None:
        """Until their next use, known rows belong to this hint's classes."""
        self._classes[rows] = self._classes[rows] % KINDS + KINDS * level

    def leave(self, rows: Rows) -> None:
        """Known rows became ghosts."""
        self._known -= len(rows)
        if self._tags is not None:
            entries = self.stamps[rows] * (1 << CLASS_BITS) + self._classes[rows]
            tags = self._tag[rows].tolist()
            if self.ghosts.add(zip(tags, entries.tolist(), strict=True)):
                self._bury()
        self.stamps[rows] = 0

    def leave_one(self, row: int) -> None:
        """`leave` of one row, several times faster."""
        self._known -= 1
        if self._tags is not None:
            entry = self.stamps_at[row] << CLASS_BITS | self._classes_at[row]
            if self.ghosts.add_one(self._tag_at[row], entry):
                self._bury()
        self.stamps_at[row] = 0

    def review(self) -> bool:
        """After some requests; True if entries made before are worthless now."""
        if self._room is not None:
            self._capacity = self._shadow.capacity = self._fitting(0)
        used = self._clock - self._shadow.newest
        self.hazards.references += used
        requests, self._requests = max(1, self._requests), 0
        self._stride += _STRIDE_WEIGHT * (used / requests - self._stride)
        self._now = self._clock + int(self._stride)
        met = np.concatenate(self._met) if self._met else np.empty(0, np.int64)
        self._met = []
        lru_hits = self._shadow.use(used, met)
        lessons = requests if len(met) else 0
        self.guard.account(requests, used, self._own_hits, lru_hits, lessons, self._shadow.reach)
        self._own_hits = 0
        if self._clock >= self._next_rank:
            self._rank()
            return True
        if self._clock >= self._next_study:
            self._study()
        return False

    # ---- order

    def values(self, rows: Rows) -> NDArray[np.float64]:
        """The less, the sooner a row goes; equal ones by their stamps."""
        stamps = self.stamps[rows]
        last = stamps.astype(np.float64) + _PROTECTED
        if self.guard.protected == EVERY_AGE:
            return last
        ages = self._now - stamps
        values = self._worth(rows, ages)
        if self.guard.protected:
            np.copyto(values, last, where=ages < self.guard.protected)
        return values

    def worth(self, rows: Rows) -> NDArray[np.float64]:
        """What was learned of known rows, protected or not: the index, times the cost."""
        return self._worth(rows, self._now - self.stamps[rows])

    def _worth(self, rows: Rows, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        cells = self._classes[rows] * _BUCKETS
        cells += buckets_of(ages)
        worth: NDArray[np.float64] = self._index[cells]
        if self._depths is not None:
            worth *= 1 + self._cost * self._depths(rows)
        return worth

    def uses(self, rows: Rows) -> NDArray[np.int64]:
        """Of known rows, their storing included; 3 stands for more."""
        return self._classes[rows] % 3 + np.int64(1)

    def entry(self, row: int) -> Entry:
        """`values` of one row, several times faster."""
        stamp = self.stamps_at[row]
        age = self._now - stamp
        if age < self.guard.protected:
            return stamp + _PROTECTED, stamp, row
        bucket = bisect_right(_FIRST_AGES, age)
        value: float = self._index_at[self._classes_at[row] * BUCKETS + bucket]
        if self._depths is not None:
            value *= 1 + self._cost * float(self._depths(np.array([row], np.intp))[0])
        return value, stamp, row

    # ---- learning

    def dump(self) -> bytes:
        self._study()
        return self.hazards.dump()

    def load(self, dumped: bytes) -> None:
        self.hazards.load(dumped)
        self._use_index()
        self.guard = Guard(learned=self.hazards.references, lenient=self._cost > 0)

    def _fitting(self, otherwise: int) -> int:
        """Rows that may be known at once. What others hold of the store changes it."""
        return max(1, self._known + self._room()) if self._room is not None else otherwise

    def _meet(self, classes: Classes, stamps: Stamps, ends: Stamps) -> None:
        """Entries are used again, by requests that end with these stamps."""
        self._met.append(stamps)
        self._learn(classes, ends - stamps, hit=True)

    def _bury(self) -> None:
        lost = self.ghosts.bury()
        self._learn(lost.classes, self._clock - lost.stamps, hit=False)

    def _learn(self, classes: Classes, ages: Stamps, *, hit: bool) -> None:
        self._lessons[hit].append((classes, ages))
        self._lesson_rows += len(ages)
        if self._lesson_rows >= _LESSON_ROWS:
            self._study()

    def _study(self) -> None:
        for hit, lessons in self._lessons.items():
            if lessons:
                classes, ages = (np.concatenate(column) for column in zip(*lessons, strict=True))
                self.hazards.observe(classes, ages, hit=hit)
                lessons.clear()
        self._lesson_rows = 0
        self._next_study = self._clock + max(
            _STUDY_REFERENCES_MIN, self._capacity // _STUDIES_PER_CAPACITY
        )
        self.guard.weigh(self.hazards.hits.sum(0), self._shadow.reach)

    def _rank(self) -> None:
        """Learns from all until now, and from a sample of what still waits for its next use."""
        self._bury()
        self._study()
        rows, ghosts = self._census_of_rows(), self._census_of_ghosts()
        self.hazards.rank(
            np.append(rows.classes, ghosts.classes),
            self._clock - np.append(rows.stamps, ghosts.stamps),
            np.append(rows.weights, ghosts.weights),
        )
        self._use_index()
        self._next_rank = self._clock + max(_RANK_REFERENCES_MIN, self._capacity)

    def _use_index(self) -> None:
        self._index = self.hazards.index.reshape(-1)
        self._index_at = memoryview(self._index)

    def _census_of_rows(self) -> _Census:
        if self._rows_end > _CENSUS:
            rows = self._random.integers(0, self._rows_end, _CENSUS)
        else:
            rows = np.arange(self._rows_end)
        weight = self._rows_end / max(1, len(rows))
        rows = rows[self.stamps[rows] > 0]
        return _Census(self.stamps[rows], self._classes[rows], np.full(len(rows), weight))

    def _census_of_ghosts(self) -> _Census:
        (stamps, classes), weight = self.ghosts.sample(self._random, _CENSUS_RUNS)
        return _Census(stamps, classes, np.full(len(stamps), weight))
