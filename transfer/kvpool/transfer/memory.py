"""Shared memory without names: the owner's regions and a reader's maps of them.

A region is a sealed memfd. It has no path, leaves nothing behind when its processes die, and
nobody can change its size, so that no access through a map can raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

from kvpool.proto.errors import InvalidError, ProtocolError, StaleError, TooLargeError
from kvpool.transfer.base import Region
from kvpool.transfer.copying import Bytes
from kvpool.transfer.mapping import Mapping

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CLOSED = "the region is closed"
_FORKED = "the region was opened before fork(); connect again in this process"


class SharedMemory:
    """The owner of shared regions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, SharedRegion] = {}
        self._generations: dict[int, int] = {}

    @property
    def regions(self) -> list[SharedRegion]:
        """The regions that exist, by id."""
        with self._lock:
            return [self._regions[id] for id in sorted(self._regions)]

    def create_region(self, nbytes: int) -> SharedRegion:
        """A new region of zeros. No page of it is in memory before `populate` or first use.

        Raises `InvalidError` for a size of 0 and `TooLargeError` if the system refuses.
        """
        if nbytes <= 0:
            raise InvalidError(f"a region has at least 1 byte, not {nbytes}")
        with self._lock:
            id = next(id for id in range(len(self._regions) + 1) if id not in self._regions)
            generation = self._generations.get(id, 0) + 1
            created = SharedRegion(Region(id, generation, nbytes))
            self._regions[id] = created
            self._generations[id] = generation
        return created

    def drop_region(self, region: Region) -> None:
        """Close it here. Peers that map it keep their maps, and its memory, until they close.

        Raises `InvalidError` if it does not exist.
        """
        with self._lock:
            found = self._regions.get(region.id)
            if found is None or found.region != region:
                raise InvalidError(f"{region} does not exist")
            del self._regions[region.id]
        found.close()

    def close(self) -> None:
        """Drop all regions. Idempotent."""
        with self._lock:
            regions = list(self._regions.values())
            self._regions.clear()
        for region in regions:
            region.close()

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedRegion:
    """A memfd of the owner, mapped writable. Made by `SharedMemory.create_region`."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._lock = threading.Lock()  # so that no descriptor is closed while it is in use
        self._lost: str | None = None
        try:
            self._fd = _sealed_memfd(region.nbytes)
        except OSError as error:
            raise TooLargeError(
                f"cannot create a region of {region.nbytes} bytes: {error.strerror}"
            ) from error
        try:
            self._mapping: Mapping | None = Mapping(self._fd, region.nbytes, writable=True)
        except InvalidError as error:
            os.close(self._fd)
            raise TooLargeError(str(error)) from error
        _of_this_process.add(self)

    @property
    def array(self) -> Bytes:
        """All bytes, writable. Raises `StaleError` once closed and in fork children."""
        mapping = self._mapping
        if mapping is None:
            raise StaleError(self._lost)
        return mapping.array

    def populate(self, step_bytes: int) -> Iterator[int]:
        """Fault pages in, `step_bytes` (rounded up to pages) at a time; yields the bytes done.

        Memory is taken between two yields, so that the caller can look at what is free before it
        asks for the next step. Content is kept. Raises `TooLargeError` if the system has no more
        memory for it, and `StaleError` if the region was closed meanwhile.
        """
        step = -(-step_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if step <= 0:
            raise InvalidError(f"a step has at least 1 byte, not {step_bytes}")
        for offset in range(0, self.region.nbytes, step):
            nbytes = min(step, self.region.nbytes - offset)
            with self._lock:
                self._populate(offset, nbytes)
            yield offset + nbytes

    def descriptor(self, writable: bool) -> int:
        """A new descriptor, which the caller closes.

        Without `writable` it was opened anew for reading only, so that no map made from it can be
        written to. (That stops accidents. A peer of the same user could open the file once more
        through /proc: within a trust domain peers are trusted.) Raises `StaleError`.
        """
        with self._lock:
            if self._mapping is None:
                raise StaleError(self._lost)
            if writable:
                return fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0)
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the region up; views of `array` stay valid until they are dropped. Idempotent."""
        with self._lock:
            self._lose(_CLOSED)

    def _populate(self, offset: int, nbytes: int) -> None:
        if self._mapping is None:
            raise StaleError(self._lost)
        try:
            # Both say when there is no memory, where touching the page would end in SIGBUS.
            if not self._mapping.populate(offset, nbytes):
                os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            raise TooLargeError(
                f"no memory for bytes {offset} to {offset + nbytes} of region {self.region.id}: "
                f"{error.strerror}"
            ) from error

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._mapping = None
            os.close(self._fd)

    def _forget_in_child(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        self._lose(_FORKED)


class MappedRegion:
    """A peer's region, mapped into this process. Closing it is up to the holder."""

    def __init__(self, region: Region, fd: int, writable: bool) -> None:
        """Maps `fd` and closes it in any case.

        Raises `ProtocolError` if the descriptor is not what `region` says (size, seals), and
        `InvalidError` if it cannot be mapped so, e.g. writable although it is read-only.
        """
        self.region = region
        self.writable = writable
        self._lost: str | None = None
        try:
            _check_descriptor(region, fd)
            self._mapping: Mapping | None = Mapping(fd, region.nbytes, writable)
        finally:
            os.close(fd)
        _of_this_process.add(self)

    def view(self, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Bytes of the region, read-only unless the map is writable; all from `offset` on if
        `nbytes` is None.

        A view stays valid after `close`, but in a fork child using one ends the process. Raises
        `InvalidError` out of range, and `StaleError` once closed and in fork children.
        """
        mapping = self._mapping
        if mapping is None:
            raise StaleError(self._lost)
        end = self.region.nbytes if nbytes is None else offset + nbytes
        if not 0 <= offset <= end <= self.region.nbytes:
            raise InvalidError(
                f"bytes {offset} to {end} leave region {self.region.id} "
                f"of {self.region.nbytes} bytes"
            )
        return mapping.array[offset:end]

    def close(self) -> None:
        """No new views from now on; unmapped when the last view is gone. Idempotent."""
        self._lost = self._lost or _CLOSED
        self._mapping = None

    def _forget_in_child(self) -> None:
        self._lost = self._lost or _FORKED
        self._mapping = None


_of_this_process: weakref.WeakSet[SharedRegion | MappedRegion] = weakref.WeakSet()


def _sealed_memfd(nbytes: int) -> int:
    fd = os.memfd_create("kvpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # A descriptor's mode does not depend on this, but opening it anew through /proc does.
        os.fchmod(fd, 0o400)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_descriptor(region: Region, fd: int) -> None:
    """Without the right size and the seals, an access to the map could raise SIGBUS."""
    seals = 0
    with contextlib.suppress(OSError):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ProtocolError(f"the descriptor of region {region.id} is no sealed memory")
    nbytes = os.fstat(fd).st_size
    if nbytes != region.nbytes:
        raise ProtocolError(
            f"region {region.id} should have {region.nbytes} bytes, its descriptor has {nbytes}"
        )


def _forget_in_child() -> None:
    """A fork child has none of the maps and must not keep the memory alive by descriptors."""
    for region in _of_this_process:
        region._forget_in_child()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forget_in_child)
