"""Columns that cost nothing until they are used, and then a little at a time."""

from __future__ import annotations

from mmap import MADV_NOHUGEPAGE, mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def sparse_zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """As `np.zeros`, in small pages. NumPy asks for huge ones, and the first touch of one of them
    clears 2 MiB: columns that are touched at random would make dozens of such pauses at once."""
    memory = mmap(-1, max(1, size * np.dtype(dtype).itemsize))
    memory.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count=size)
