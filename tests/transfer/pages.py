"""Small pages to begin with, and how many of what size a map has."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.transfer.copying import Bytes
from kvpool.transfer.paging import HUGE

PAGE = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ALL = slice(None)


def small_pages(huge: int, touched: slice, content: npt.ArrayLike = 7) -> Bytes:
    """Memory for `huge` huge pages that has small ones, also where the kernel gives all programs
    huge ones unasked; `content` is written to what is `touched`, the rest has no page yet."""
    pages = mmap.mmap(-1, (huge + 1) * HUGE, flags=PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE
    memory = memory[start : start + huge * HUGE]
    memory[touched] = content
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # the only way to take the other advice back
    return memory


def kilobytes(memory: Bytes, name: str) -> int:
    """`name` of the map that `memory` lies in, by /proc/self/smaps."""
    address = memory.ctypes.data
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return int(re.findall(rf"^{name}: +(\d+) kB", entry, re.MULTILINE)[0])
    raise AssertionError(f"{address:#x} is not mapped")


def kernel_collapses() -> bool:
    """Linux 6.1, where huge pages of programs are not switched off."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    return release >= (6, 1) and setting.exists() and "[never]" not in setting.read_text()
