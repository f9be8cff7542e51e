"""Region descriptors over a Unix socket (SCM_RIGHTS).

    message = header ‖ count × entry, with `count` descriptors attached to its first byte
    header  = "KVFD" ‖ version u8 ‖ writable u8 ‖ count u16 ‖ regions still to come u32
    entry   = region id u32 ‖ generation u64 ‖ nbytes u64            (all big-endian)

The header is read alone, so that nothing behind the last message is swallowed. A socket that was
read through a `Stream` before must have been read with `exact=True`: what a `Stream` reads ahead
loses its descriptors.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool.proto.errors import DeadlineError, KvpoolError, ProtocolError, UnreachableError
from kvpool.transfer.base import Region
from kvpool.transfer.memory import MappedRegion, SharedRegion

BATCH = 250
"""Descriptors per message; Linux accepts no more than 253."""

MAX_REGIONS = 1 << 16
"""Most regions in one answer; a larger figure is garbage."""

_MAGIC = b"KVFD"
_VERSION = 1
_HEADER = struct.Struct(">4sBBHI")
_ENTRY = struct.Struct(">IQQ")
_FD_SIZE = array.array("i").itemsize


class PassedRegion(NamedTuple):
    """A region with its descriptor, which belongs to the receiver."""

    region: Region
    fd: int
    writable: bool


def send_descriptors(
    sock: socket.socket, regions: Sequence[SharedRegion], writable: bool, deadline: float
) -> None:
    """Hand `regions` to the peer of the connected Unix socket, within `deadline` seconds.

    Raises `DeadlineError`, `UnreachableError`, and `StaleError` for a closed region. After an
    error the connection cannot be used any more.
    """
    end = time.monotonic() + deadline
    with _deadlines(sock):
        for at in range(0, max(len(regions), 1), BATCH):
            batch = regions[at : at + BATCH]
            later = len(regions) - at - len(batch)
            _send_message(sock, batch, writable, later, end)


def receive_descriptors(sock: socket.socket, deadline: float) -> list[PassedRegion]:
    """What the peer's `send_descriptors` sent, within `deadline` seconds.

    Raises `ProtocolError` for anything else (the end of the connection included), `DeadlineError`
    and `UnreachableError`. After an error no descriptor stays open.
    """
    end = time.monotonic() + deadline
    passed: list[PassedRegion] = []
    try:
        with _deadlines(sock):
            while True:
                later = _receive_message(sock, passed, end)
                if not later:
                    return passed
    except BaseException:
        for one in passed:
            os.close(one.fd)
        raise


def map_regions(passed: Sequence[PassedRegion]) -> list[MappedRegion]:
    """Map each and close its descriptor. If one fails, none stays mapped; raises its error."""
    mapped: list[MappedRegion] = []
    for index, one in enumerate(passed):
        try:
            mapped.append(MappedRegion(one.region, one.fd, one.writable))
        except KvpoolError:
            for region in mapped:
                region.close()
            for rest in passed[index + 1 :]:
                os.close(rest.fd)
            raise
    return mapped


@contextlib.contextmanager
def _deadlines(sock: socket.socket) -> Iterator[None]:
    """Translate what the socket raises and give it back as blocking or not as it was."""
    before = sock.gettimeout()
    try:
        yield
    except TimeoutError as error:
        raise DeadlineError("deadline passed while passing descriptors") from error
    except OSError as error:
        raise UnreachableError(f"passing descriptors failed: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            sock.settimeout(before)


def _limit(sock: socket.socket, end: float) -> None:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _send_message(
    sock: socket.socket, batch: Sequence[SharedRegion], writable: bool, later: int, end: float
) -> None:
    entries = (_ENTRY.pack(r.region.id, r.region.generation, r.region.nbytes) for r in batch)
    data = _HEADER.pack(_MAGIC, _VERSION, writable, len(batch), later) + b"".join(entries)
    fds: list[int] = []
    try:
        fds.extend(region.descriptor(writable) for region in batch)
        _limit(sock, end)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        sent = sock.sendmsg([data], [rights] if fds else [], socket.MSG_NOSIGNAL)
    finally:
        for fd in fds:
            os.close(fd)
    while sent < len(data):
        _limit(sock, end)
        sent += sock.send(data[sent:], socket.MSG_NOSIGNAL)


def _receive_message(sock: socket.socket, passed: list[PassedRegion], end: float) -> int:
    """Appends one message's regions to `passed`; returns how many are still to come."""
    _limit(sock, end)
    data, ancillary, flags, _ = sock.recvmsg(
        _HEADER.size, socket.CMSG_SPACE(BATCH * _FD_SIZE), socket.MSG_CMSG_CLOEXEC
    )
    fds = _descriptors_in(ancillary)
    try:
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were lost: too many, or the limit of open files")
        data += _receive_exactly(sock, _HEADER.size - len(data), end)
        magic, version, writable, count, later = _HEADER.unpack(data)
        if (magic, version) != (_MAGIC, _VERSION) or writable > 1:
            raise ProtocolError(f"not a descriptor message: {data!r}")
        if count != len(fds) or count > BATCH or len(passed) + count + later > MAX_REGIONS:
            raise ProtocolError(f"{len(fds)} descriptors for {count} regions, {later} to come")
        if later and not count:
            raise ProtocolError("an empty descriptor message before the last")
        entries = _receive_exactly(sock, count * _ENTRY.size, end)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for (id, generation, nbytes), fd in zip(_ENTRY.iter_unpack(entries), fds, strict=True):
        passed.append(PassedRegion(Region(id, generation, nbytes), fd, bool(writable)))
    return int(later)


def _receive_exactly(sock: socket.socket, nbytes: int, end: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        _limit(sock, end)
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ProtocolError("the connection ended within a descriptor message")
        data += piece
    return data


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_SIZE])
    return fds.tolist()
