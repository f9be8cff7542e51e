"""What policies remember of rows that left: bounded, and without a Python object per entry.

A set-associative table: an entry lies in one of the four ways of the set that its tag names, which
are filled in turn, so that the oldest entry makes way. A set is one cache line::

    tag  tag  tag  tag  stamp·class  stamp·class  stamp·class  stamp·class

A tag is 64 bits of the chunk's key, so two chunks are taken for one with a probability of 2^-64
each; this costs a wrong guess, never a wrong hit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.sparse import sparse_zeros

WAYS = 4
_CLASS_BITS = 8
_BURIED_TOGETHER = 64
_RUN_SETS = 8

Tags = NDArray[np.uint64]
Stamps = NDArray[np.int64]
Classes = NDArray[np.uint8]


class Ghost(NamedTuple):
    """Columns of entries."""

    stamps: Stamps
    """Last use; positive."""
    classes: Classes


class Ghosts:
    """Room for at least `entries` entries, 16 bytes each; pages are touched as they fill."""

    def __init__(self, entries: int) -> None:
        bits = max(0, (-(-entries // WAYS) - 1).bit_length())
        self.capacity = WAYS << bits
        self._mask = np.uint64((1 << bits) - 1)
        self._lines: Tags = sparse_zeros(2 * self.capacity, np.uint64).reshape(-1, 2 * WAYS)
        self._words = self._lines.reshape(-1)
        self._turn: Classes = sparse_zeros(1 << bits, np.uint8)
        self._graves: dict[int, tuple[int, int]] = {}  # the newest, not in the table yet
        self._buried = False

    def take(self, tags: Tags) -> tuple[NDArray[np.int64], Ghost]:
        """Positions in `tags` that are remembered, and what of them; they are forgotten."""
        found, ghost = self._take_buried(tags)
        new = [i for i, tag in enumerate(tags.tolist()) if tag in self._graves]
        if not new:
            return found, ghost
        stamps, classes = zip(*map(self._graves.pop, tags[new].tolist()), strict=True)
        return np.append(found, new), Ghost(
            np.append(ghost.stamps, np.array(stamps, np.int64)),
            np.append(ghost.classes, np.array(classes, np.uint8)),
        )

    def add(self, tag: int, stamp: int, class_: int) -> bool:
        """Remembers a tag that is not here; True if it is time to `bury`."""
        self._graves[tag] = (stamp, class_)
        return len(self._graves) >= _BURIED_TOGETHER

    def bury(self) -> Ghost:
        """Gives the newest entries their slots; returns the entries that made way."""
        if not self._graves:
            return _ghost(np.empty(0, np.uint64))
        self._buried = True
        tags = np.array(list(self._graves), np.uint64)
        entries = [stamp << _CLASS_BITS | class_ for stamp, class_ in self._graves.values()]
        self._graves.clear()
        sets = (tags & self._mask).view(np.int64)
        # Of several tags in one set, one takes the slot and the others are lost: rare.
        ways = self._turn[sets]
        self._turn[sets] = (ways + 1) % WAYS
        places = sets * (2 * WAYS) + ways
        before = self._words[places + WAYS]
        self._words[places] = tags
        self._words[places + WAYS] = entries
        return _ghost(before[before != 0])

    def sample(self, random: np.random.Generator, runs: int) -> tuple[Ghost, float]:
        """Some entries, and how many entries each of them stands for.

        Runs of sets: where tags are random, neighbours are too, and a run is in one page.
        """
        run = min(_RUN_SETS, len(self._lines))
        starts = random.integers(0, len(self._lines) // run, runs) * run
        entries = self._lines[(starts[:, None] + np.arange(run)).ravel(), WAYS:]
        return _ghost(entries[entries != 0]), self.capacity / entries.size

    def count(self) -> int:
        """Entries. O(capacity)."""
        return int(np.count_nonzero(self._lines[:, WAYS:])) + len(self._graves)

    def check_integrity(self) -> None:
        """O(capacity)."""
        tags, entries = self._lines[:, :WAYS], self._lines[:, WAYS:]
        assert np.array_equal(tags != 0, entries != 0), "a tag for each entry"
        assert len(self._graves) <= _BURIED_TOGETHER, "graves are bounded"
        live = tags[tags != 0]
        assert len(np.unique(live)) == len(live), "one entry per tag"

    def _take_buried(self, tags: Tags) -> tuple[NDArray[np.int64], Ghost]:
        if not self._buried:
            return np.empty(0, np.int64), _ghost(np.empty(0, np.uint64))
        sets = (tags & self._mask).view(np.int64)
        found, ways = (self._lines.take(sets, axis=0)[:, :WAYS] == tags[:, None]).nonzero()
        places = sets[found] * (2 * WAYS) + ways
        entries = self._words[places + WAYS]
        if len(found):
            self._words[places] = 0
            self._words[places + WAYS] = 0
        return found, _ghost(entries)


def _ghost(entries: NDArray[np.uint64]) -> Ghost:
    """Unpacks (stamp << 8 | class)."""
    return Ghost((entries >> np.uint64(_CLASS_BITS)).view(np.int64), entries.astype(np.uint8))
