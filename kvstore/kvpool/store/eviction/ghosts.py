"""What policies remember of rows that left: bounded, and without a Python object per entry.

A hash table of lines with four entries each. A tag names two lines, and the oldest of their eight
entries makes way for it, which is nearly the oldest of all: what lasts is what a queue would keep
(Y. Azar et al., "Balanced allocations", SIAM J. Comput. 29, 1999). A line is a cache line::

    tag  tag  tag  tag  stamp·class  stamp·class  stamp·class  stamp·class

A tag is 64 bits of the chunk's key, so two chunks are taken for one with a probability of 2^-64
each; this costs a wrong guess, never a wrong hit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.base import firsts
from kvpool.store.eviction.sparse import sparse_zeros

_WAYS = 4
CLASS_BITS = 8
_LINE = 2 * _WAYS
_HALF = np.array(32, np.uint64)
_CLASS_BITS_U64 = np.array(CLASS_BITS, np.uint64)
_BURIED_TOGETHER = 128
_RUN_LINES = 8

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
        bits = max(0, (-(-entries // _WAYS) - 1).bit_length())
        self.capacity = _WAYS << bits
        self._mask = np.array((1 << bits) - 1, np.uint64)
        self._lines: Tags = sparse_zeros(2 * self.capacity, np.uint64).reshape(-1, _LINE)
        self._words = self._lines.reshape(-1)
        self._graves: dict[int, int] = {}  # the newest, not in the table yet
        self._buried = 0  # entries in the table

    def take(self, tags: Tags) -> tuple[NDArray[np.int64], Ghost]:
        """Positions in `tags` that are remembered, and what of them; they are forgotten."""
        found, ghost = self._take_buried(tags)
        if not self._graves:  # a million rows are admitted at once when a daemon starts
            return found, ghost
        asked = tags.tolist()
        if self._graves.keys().isdisjoint(asked):
            return found, ghost
        new = [i for i, tag in enumerate(asked) if tag in self._graves]
        dug_up = _ghost(np.array([self._graves.pop(asked[i]) for i in new], np.uint64))
        return np.append(found, new), Ghost(
            np.append(ghost.stamps, dug_up.stamps), np.append(ghost.classes, dug_up.classes)
        )

    def add(self, ghosts: Iterable[tuple[int, int]]) -> bool:
        """Remembers (tag, stamp << CLASS_BITS | class) of tags that are not here; True if it is
        time to `bury`."""
        self._graves.update(ghosts)
        return len(self._graves) >= _BURIED_TOGETHER

    def add_one(self, tag: int, entry: int) -> bool:
        """`add` of one, several times faster."""
        self._graves[tag] = entry
        return len(self._graves) >= _BURIED_TOGETHER

    def bury(self) -> Ghost:
        """Gives the newest entries their slots; returns the entries that made way."""
        if not self._graves:
            return _NO_GHOSTS
        count = len(self._graves)
        tags = np.fromiter(self._graves, np.uint64, count)
        entries = np.fromiter(self._graves.values(), np.uint64, count)
        self._graves.clear()
        lost = []
        while len(tags):
            places = self._oldest(tags)
            self._words[places - _WAYS] = tags
            # Of several tags that want one place, the last gets it; the others look again.
            last = self._words[places - _WAYS] == tags
            chosen = places[last]
            lost.append(self._words[chosen])
            self._words[chosen] = entries[last]
            tags, entries = tags[~last], entries[~last]
        before = np.concatenate(lost)
        self._buried += count - int(np.count_nonzero(before))
        return _ghost(before[before != 0])

    def sample(self, random: np.random.Generator, runs: int) -> tuple[Ghost, float]:
        """Some entries, and how many entries each of them stands for.

        Runs of sets: where tags are random, neighbours are too, and a run is in one page.
        """
        run = min(_RUN_LINES, len(self._lines))
        starts = random.integers(0, len(self._lines) // run, runs) * run
        entries = self._lines[(starts[:, None] + np.arange(run)).ravel(), _WAYS:]
        return _ghost(entries[entries != 0]), self.capacity / entries.size

    def count(self) -> int:
        """Entries."""
        return self._buried + len(self._graves)

    def check_integrity(self) -> None:
        """O(capacity)."""
        tags, entries = self._lines[:, :_WAYS], self._lines[:, _WAYS:]
        assert np.array_equal(tags != 0, entries != 0), "a tag for each entry"
        assert np.count_nonzero(entries) == self._buried, "the count of entries"
        assert len(self._graves) <= _BURIED_TOGETHER, "graves are bounded"
        live = tags[tags != 0]
        assert len(np.unique(live)) == len(live), "one entry per tag"

    def _take_buried(self, tags: Tags) -> tuple[NDArray[np.int64], Ghost]:
        if not self._buried:
            return _NO_PLACES, _NO_GHOSTS
        lines = self._lines_of(tags)
        held = self._lines.take(lines, axis=0)[:, :, :_WAYS]
        alike = (held == tags[:, None, None]).ravel().nonzero()[0]
        if not len(alike):
            return _NO_PLACES, _NO_GHOSTS
        found = alike // _LINE
        once = firsts(found)  # a tag's two lines may be one
        found, alike = found[once], alike[once]
        here = lines.ravel()[alike // _WAYS] * _LINE + alike % _WAYS
        entries = self._words[here + _WAYS]
        self._buried -= len(found)
        self._words[here] = 0
        self._words[here + _WAYS] = 0
        return found, _ghost(entries)

    def _oldest(self, tags: Tags) -> NDArray[np.int64]:
        """For each tag, where the oldest of its eight entries is: an empty one, if there is one."""
        lines = self._lines_of(tags)
        held = self._lines.take(lines, axis=0)[:, :, _WAYS:]
        oldest = held.reshape(-1, _LINE).argmin(axis=1)
        line = lines[np.arange(len(tags)), oldest // _WAYS]
        out: NDArray[np.int64] = line * _LINE + (_WAYS + oldest % _WAYS)
        return out

    def _lines_of(self, tags: Tags) -> NDArray[np.int64]:
        """The two lines in which each tag may be, shape (n, 2)."""
        lines = np.empty((len(tags), 2), np.uint64)
        lines[:, 0] = tags
        lines[:, 1] = tags >> _HALF
        lines &= self._mask
        return lines.view(np.int64)


def _ghost(entries: NDArray[np.uint64]) -> Ghost:
    """Unpacks (stamp << CLASS_BITS | class)."""
    return Ghost((entries >> _CLASS_BITS_U64).view(np.int64), entries.astype(np.uint8))


_NO_PLACES = np.empty(0, np.int64)
_NO_GHOSTS = _ghost(np.empty(0, np.uint64))
