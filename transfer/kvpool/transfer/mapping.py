"""Shared maps of a file descriptor whose pages live exactly as long as the last view of them.

`mmap.mmap` will not do. It keeps a duplicate of the descriptor, with which a fork child holds the
whole pool in memory; its `close` raises while views exist; and with MADV_DONTFORK its destructor
in a fork child unmaps whatever the child has placed at that address since.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import numpy as np

from kvpool.proto.errors import InvalidError
from kvpool.transfer import paging
from kvpool.transfer.copying import Bytes
from kvpool.transfer.paging import HUGE

_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """`nbytes` of `fd` mapped MAP_SHARED, as `array`; fork children do not inherit it.

    The pages are unmapped when the last view of `array` is gone, so that no view ever dangles. In
    a fork child the addresses stay reserved without access: a view kept across the fork faults,
    it never shows other memory.
    """

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        """Raises `InvalidError` if the descriptor does not allow the map, or there is no room."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            address = _map_aligned(nbytes, protection, fd)
            self._pages = _Pages(address, nbytes, writable)
            paging.advise(address, nbytes, mmap.MADV_DONTFORK)
        except OSError as error:
            raise InvalidError(f"cannot map {nbytes} bytes: {error.strerror}") from error
        self.array: Bytes = np.asarray(self._pages)

    def populate(self, offset: int, nbytes: int) -> bool:
        """See `paging.populate`; `offset` is a multiple of the page size."""
        return paging.populate(self._pages.address + offset, nbytes)


class _Pages:
    """Mapped addresses as an array interface; the base object of all views."""

    def __init__(self, address: int, nbytes: int, writable: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, not writable),
        }
        # Not at exit: other threads may still be copying.
        weakref.finalize(self, _unmap, address, nbytes, os.getpid()).atexit = False
        _all_pages.add(self)


_all_pages: weakref.WeakSet[_Pages] = weakref.WeakSet()


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        raise paging.last_error()
    return int(mapped)


def _map_aligned(nbytes: int, protection: int, fd: int) -> int:
    """Maps `fd` where huge pages fit, if it is that large."""
    if nbytes < HUGE:
        return _map(None, nbytes, protection, mmap.MAP_SHARED, fd)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    around = _map(None, nbytes + HUGE, _PROT_NONE, flags, -1)
    address = -(-around // HUGE) * HUGE
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _map(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(around, nbytes + HUGE)
        raise
    for start, stop in ((around, address), (end, around + nbytes + HUGE)):
        if stop > start:
            _libc.munmap(start, stop - start)
    return address


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # In a fork child nothing of ours is mapped there.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


def _reserve_in_child() -> None:
    """Keep the addresses that were not inherited from being given to other memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
    for pages in _all_pages:
        # Something of the child's may be there already; it must not be replaced.
        with contextlib.suppress(OSError):
            _map(pages.address, pages.nbytes, _PROT_NONE, flags, -1)
    _all_pages.clear()


os.register_at_fork(after_in_child=_reserve_in_child)
