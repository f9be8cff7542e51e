"""What policies remember of rows that left: bounded, and without a Python object per entry.

A set-associative table: an entry lies in one of the `WAYS` slots that its tag names, which are
filled in turn, so that the oldest of them makes way. A tag is 64 bits of the chunk's key, so two
chunks are taken for one with a probability of 2^-64 each; this costs a wrong guess, never a wrong
hit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WAYS = 4
_BURIED_TOGETHER = 256

Tags = NDArray[np.uint64]
Stamps = NDArray[np.int64]
Classes = NDArray[np.uint8]


class Ghost(NamedTuple):
    """Columns of entries."""

    stamps: Stamps
    """Last use; positive."""
    classes: Classes


class Ghosts:
    """Room for at least `entries` entries, 18 bytes each; pages are touched as they fill."""

    def __init__(self, entries: int) -> None:
        bits = max(0, (-(-entries // WAYS) - 1).bit_length())
        self.capacity = WAYS << bits
        self._mask = np.uint64((1 << bits) - 1)
        self._tags = np.zeros((1 << bits, WAYS), np.uint64)
        self._stamps = np.zeros(self.capacity, np.int64)
        self._classes = np.zeros(self.capacity, np.uint8)
        self._turn = np.zeros(1 << bits, np.uint8)
        self._graves: dict[int, tuple[int, int]] = {}  # the newest, not in the table yet
        self._flat_tags = self._tags.reshape(-1)

    def take(self, tags: Tags) -> tuple[NDArray[np.int64], Ghost]:
        """Positions in `tags` that are remembered, what of them; they are forgotten."""
        sets = (tags & self._mask).view(np.int64)
        found, ways = (self._tags.take(sets, axis=0) == tags[:, None]).nonzero()
        places = sets[found] * WAYS + ways
        stamps, classes = self._stamps[places], self._classes[places]
        if len(places):
            self._flat_tags[places] = 0
            self._stamps[places] = 0
        dug_up = [i for i, tag in enumerate(tags.tolist()) if tag in self._graves]
        if dug_up:
            entries = [self._graves.pop(tag) for tag in tags[dug_up].tolist()]
            more_stamps, more_classes = zip(*entries, strict=True)
            found = np.append(found, dug_up)
            stamps = np.append(stamps, np.array(more_stamps, np.int64))
            classes = np.append(classes, np.array(more_classes, np.uint8))
        return found, Ghost(stamps, classes)

    def add(self, tag: int, stamp: int, class_: int) -> bool:
        """Remembers a tag that is not here; True if `bury` should be called soon."""
        self._graves[tag] = (stamp, class_)
        return len(self._graves) >= _BURIED_TOGETHER

    def bury(self) -> Ghost:
        """Gives the newest entries their slots; returns the entries that made way."""
        if not self._graves:
            return Ghost(np.empty(0, np.int64), np.empty(0, np.uint8))
        tags = np.array(list(self._graves), np.uint64)
        stamps, classes = (np.array(column) for column in zip(*self._graves.values(), strict=True))
        self._graves.clear()
        sets = (tags & self._mask).view(np.int64)
        # Of several tags in one set, one takes the slot and the others are lost: rare.
        places = sets * WAYS + self._turn[sets]
        self._turn[sets] = (self._turn[sets] + 1) % WAYS
        before = self._stamps[places]
        lost = before.nonzero()[0]
        out = Ghost(before[lost], self._classes[places[lost]])
        self._flat_tags[places] = tags
        self._stamps[places] = stamps
        self._classes[places] = classes
        return out

    def sample(self, numbers: NDArray[np.int64]) -> Ghost:
        """The entries among the slots of these numbers below `capacity`."""
        stamps = self._stamps[numbers]
        here = stamps.nonzero()[0]
        return Ghost(stamps[here], self._classes[numbers[here]])

    def count(self) -> int:
        """Entries. O(capacity)."""
        return int(np.count_nonzero(self._stamps)) + len(self._graves)

    def check_integrity(self) -> None:
        """O(capacity)."""
        assert ((self._flat_tags != 0) >= (self._stamps != 0)).all(), "every entry has its tag"
        assert (self._stamps >= 0).all(), "stamps are positive"
        assert len(self._graves) <= _BURIED_TOGETHER, "graves are bounded"
        tags = self._flat_tags[self._flat_tags != 0]
        assert len(np.unique(tags)) == len(tags), "one entry per tag"
