"""Sorting of a million numbers and more, several times faster than `argsort`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


def in_order(words: Words) -> tuple[Words, Places]:
    """`words` ascending, and where each of them was, as a stable sort gives it. The lowest
    ``len(words).bit_length()`` bits do not count and come back as 0: the places travel in them."""
    bits = np.uint64(len(words).bit_length())
    packed = words >> bits << bits | np.arange(len(words), dtype=np.uint64)
    packed.sort()
    places = packed & ((np.uint64(1) << bits) - np.uint64(1))
    return packed ^ places, places.view(np.int64)


def order_of(numbers: npt.NDArray[np.integer]) -> Places:
    """As `argsort` of a stable sort. REQUIRES: `numbers` are not negative, and have at least
    ``len(numbers).bit_length()`` bits less than 64."""
    return in_order(numbers.astype(np.uint64) << np.uint64(len(numbers).bit_length()))[1]


def run_starts(ascending: npt.NDArray[np.generic]) -> Places:
    """Where each run of equal values begins."""
    return np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]][: len(ascending)])
