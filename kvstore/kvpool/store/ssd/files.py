"""The real disk: preallocated files, read and written by position, directly or buffered.

Direct I/O wants memory, offsets and lengths in whole blocks. What is in whole blocks goes straight
between the device and the caller's memory; the rest (an unaligned buffer, a last partial block)
goes through one aligned block buffer of the calling thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np

from kvpool.proto.errors import ConfigError
from kvpool.store.ssd.disk import ShortReadError
from kvpool.store.ssd.folder import SCRATCH, Folder
from kvpool.transfer.copying import Bytes, move

BOUNCE_BYTES = 1 << 20


def data_name(number: int) -> str:
    return f"data.{number:04}"


class Files:
    """`count` data files of `file_bytes` in `folder`. Thread-safe."""

    def __init__(
        self,
        folder: Folder,
        count: int,
        file_bytes: int,
        block_bytes: int,
        *,
        direct: bool,
        reserve: bool = True,
    ) -> None:
        """`reserve`: makes missing files and takes the space of all. Raises `ConfigError` with
        figures if the file system has not enough."""
        self.block_bytes = block_bytes
        self.file_bytes = file_bytes
        self.direct = direct
        self._folder = folder
        self._local = threading.local()
        self._fds: list[int] = []
        self._dirty: set[int] = set()
        self._dirty_lock = threading.Lock()
        flags = os.O_DIRECT if direct else 0
        try:
            for number in range(count):
                self._fds.append(folder.open(data_name(number), flags))
                if reserve:
                    self._preallocate(self._fds[-1], count)
            folder.sync()
        except BaseException:
            self.close()
            raise

    def _preallocate(self, fd: int, count: int) -> None:
        try:
            os.posix_fallocate(fd, 0, self.file_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise ConfigError(
                f"{self._folder.path}: {count * self.file_bytes} bytes of ssd_capacity do not fit, "
                f"{self._folder.free_bytes()} bytes are free: lower ssd_capacity, or free space"
            ) from error

    def read(self, address: int, target: Bytes) -> None:
        fd, offset = self._locate(address)
        for piece, at, bounce in self._pieces(target):
            if bounce is None:
                _read(fd, piece, offset + at)
            else:
                _read(fd, bounce, offset + at)
                move(piece, bounce[: piece.size])

    def write(self, address: int, source: Bytes) -> None:
        fd, offset = self._locate(address)
        for piece, at, bounce in self._pieces(source):
            if bounce is None:
                _write(fd, piece, offset + at)
            else:
                move(bounce[: piece.size], piece)
                bounce[piece.size :] = 0
                _write(fd, bounce, offset + at)
        with self._dirty_lock:
            self._dirty.add(fd)

    def sync(self) -> None:
        with self._dirty_lock:
            dirty, self._dirty = self._dirty, set()
        for fd in dirty:
            os.fdatasync(fd)

    def free_bytes(self) -> int:
        return self._folder.free_bytes()

    def check(self) -> None:
        written = os.urandom(64)
        fd = self._folder.open(SCRATCH)
        try:
            os.pwrite(fd, written, 0)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.pread(fd, 64, 0) != written:
                raise OSError(errno.EIO, "the disk gives back other bytes than it was given")
        finally:
            os.close(fd)

    def close(self) -> None:
        """Idempotent. REQUIRES: no read or write is in progress."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _locate(self, address: int) -> tuple[int, int]:
        number, offset = divmod(address, self.file_bytes)
        return self._fds[number], offset

    def _pieces(self, view: Bytes) -> list[tuple[Bytes, int, Bytes | None]]:
        """(piece, where it starts, the block buffer that it must go through) of `view`."""
        if not self.direct:
            return [(view, 0, None)]
        whole = view.size // self.block_bytes * self.block_bytes
        if view.ctypes.data % self.block_bytes:
            whole = 0
        pieces: list[tuple[Bytes, int, Bytes | None]] = [(view[:whole], 0, None)] if whole else []
        for at in range(whole, view.size, BOUNCE_BYTES):
            piece = view[at : at + BOUNCE_BYTES]
            blocks = -(-piece.size // self.block_bytes) * self.block_bytes
            pieces.append((piece, at, self._bounce()[:blocks]))
        return pieces

    def _bounce(self) -> Bytes:
        """Page-aligned memory of the calling thread."""
        bounce: Bytes | None = getattr(self._local, "bounce", None)
        if bounce is None:
            size = max(BOUNCE_BYTES, self.block_bytes)
            bounce = self._local.bounce = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return bounce


def _read(fd: int, target: Bytes, offset: int) -> None:
    view = memoryview(target)
    while view:
        done = os.preadv(fd, [view], offset)
        if not done:
            raise ShortReadError(errno.EIO, f"the file ends {len(view)} bytes early")
        view, offset = view[done:], offset + done


def _write(fd: int, source: Bytes, offset: int) -> None:
    view = memoryview(source)
    while view:
        done = os.pwritev(fd, [view], offset)
        view, offset = view[done:], offset + done
