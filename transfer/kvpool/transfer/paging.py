"""What the kernel is asked to do with pages: to fault them in beforehand, and to make them huge.

Each process pays for the first touch of a page, a huge one or a small one, and copies through small
pages are slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

from numpy.lib.array_utils import byte_bounds

from kvpool.transfer.copying import Bytes

HUGE = 2 << 20
"""Bytes of a huge page (512 small ones). Where they are of another size, pages stay small."""

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2). Raises `OSError`."""
    if _libc.madvise(address, nbytes, advice):
        raise last_error()


def last_error() -> OSError:
    """What the last call of the C library in this thread complained of."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def populate(address: int, nbytes: int) -> bool:
    """Faults pages in, with an error where touching them would raise SIGBUS; huge ones where the
    kernel has them, whatever /sys/kernel/mm/transparent_hugepage says of shared memory (Linux 6.1,
    unless that is "deny").

    REQUIRES: a writable map, `address` a multiple of the page size. Returns whether the kernel
    knows how (Linux 5.14); raises `OSError` if there is no memory.
    """
    try:
        for page in _huge_pages(address, address + nbytes):
            advise(page, mmap.PAGESIZE, _MADV_POPULATE_WRITE)  # without any it does not collapse
            _collapse(page)
        advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def make_huge(memory: Bytes) -> None:
    """Gathers the pages of `memory` that are in use into huge ones, as far as the kernel has them
    (Linux 6.1): once, in about the time of a copy. Untouched memory stays untaken."""
    for page in _huge_pages(*byte_bounds(memory)):
        _collapse(page)


def _huge_pages(start: int, end: int) -> range:
    """The addresses of what whole huge pages there are from `start` to `end`."""
    return range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE)


def _collapse(page: int) -> None:
    with contextlib.suppress(OSError):  # then it stays as it is
        advise(page, HUGE, _MADV_COLLAPSE)
