"""Sorting a million numbers and more, and the few values among them, several times faster than
`argsort` and `unique`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
_FEW = 8
"""Passes over all values cost less than `np.unique` (measured: 1 ms and 45 ms of a million)."""


def in_order(words: Words) -> tuple[Words, Places]:
    """`words` ascending, and where each of them was, as a stable sort gives it. The lowest
    ``len(words).bit_length()`` bits do not count and come back as 0: the places travel in them."""
    bits = np.uint64(len(words).bit_length())
    packed = words >> bits << bits | np.arange(len(words), dtype=np.uint64)
    packed.sort()
    places = packed & ((np.uint64(1) << bits) - np.uint64(1))
    return packed ^ places, places.view(np.int64)


def ascending(numbers: npt.NDArray[np.integer]) -> tuple[Places, Places]:
    """`numbers` ascending, and where each of them was, as a stable sort gives it. REQUIRES: they
    are not negative, and have at least ``len(numbers).bit_length()`` bits less than 64."""
    bits = np.uint64(len(numbers).bit_length())
    upper, places = in_order(numbers.astype(np.uint64) << bits)
    return (upper >> bits).view(np.int64), places


def distinct(values: npt.NDArray[np.integer]) -> list[int]:
    """The values that there are, ascending. Fast where they are few: mostly it is one."""
    found: set[int] = set()
    while len(values) and len(found) < _FEW:
        found.add(int(values[0]))
        values = values[values != values[0]]
    return sorted({*found, *np.unique(values).tolist()})


def run_starts(values: npt.NDArray[np.generic]) -> Places:
    """Where each run of equal `values` begins."""
    return np.flatnonzero(np.r_[True, values[1:] != values[:-1]][: len(values)])
