"""How the files of a folder are best read: block size asked, direct or buffered measured."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpool.store.ssd.folder import SCRATCH, Folder
from kvpool.transfer.copying import Bytes

GUESS_BYTES_S = 500e6
PIECE_BYTES = 4 << 20
PIECES = 4
DIRECT_SHARE = 0.5
"""Direct I/O is taken from this share of the buffered speed on. It takes half of the CPU or less
and leaves the page cache to others; and reads one after another, as here, show it too slow: in use
there are many at once, from which buffered ones gain little."""


@dataclass(frozen=True, slots=True)
class Access:
    """How the data files are opened, and the figures that decided."""

    block_bytes: int
    direct: bool
    direct_bytes_s: float
    """Cold reads; 0 where the file system has no direct I/O, or no room to measure."""
    buffered_bytes_s: float
    reason: str

    @property
    def bytes_s(self) -> float:
        """Of the chosen way; a guess where nothing was measured."""
        return (self.direct_bytes_s if self.direct else self.buffered_bytes_s) or GUESS_BYTES_S


def measure(folder: Folder, clock: Callable[[], float] = time.perf_counter) -> Access:
    """Writes a scratch file of 16 MiB, reads it cold both ways and removes it. Some 100 ms."""
    buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
    buffer[:] = np.arange(PIECE_BYTES, dtype=np.uint32).view(np.uint8)[:PIECE_BYTES]
    fd = folder.open(SCRATCH, os.O_TRUNC)
    try:
        block = block_bytes(fd)
        try:
            for piece in range(PIECES):
                os.pwritev(fd, [buffer], piece * PIECE_BYTES)
            os.fdatasync(fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return Access(block, False, 0.0, 0.0, "the file system has no room to measure")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffered = _speed(fd, buffer, clock)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        direct = _direct_speed(folder, buffer, clock)
    finally:
        os.close(fd)
        folder.remove(SCRATCH)
    if not direct:
        return Access(block, False, 0.0, buffered, "the file system has no direct I/O")
    chosen = direct >= DIRECT_SHARE * buffered
    compared = f"direct reads have {direct / buffered:.2f} of the buffered speed"
    return Access(block, chosen, direct, buffered, compared)


def block_bytes(fd: int) -> int:
    """What direct I/O on this file wants offsets, lengths and memory to be multiples of.

    The larger of the device's logical sector and the kernel's page: both are powers of two, and
    neither is the same everywhere.
    """
    return max(_sector_bytes(os.fstat(fd).st_dev), os.sysconf("SC_PAGE_SIZE"))


def _sector_bytes(device: int) -> int:
    """0 for a file system that is on no block device."""
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (folder / "queue", folder / ".." / "queue"):  # a disk, or a partition of one
        with contextlib.suppress(OSError):
            return int((queue / "logical_block_size").read_text())
    return 0


def _direct_speed(folder: Folder, buffer: Bytes, clock: Callable[[], float]) -> float:
    try:
        fd = folder.open(SCRATCH, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0.0
        raise
    try:
        return _speed(fd, buffer, clock)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0.0
        raise
    finally:
        os.close(fd)


def _speed(fd: int, buffer: Bytes, clock: Callable[[], float]) -> float:
    started = clock()
    for piece in range(PIECES):
        os.preadv(fd, [buffer], piece * PIECE_BYTES)
    return PIECES * PIECE_BYTES / max(clock() - started, 1e-9)
