"""The frame codec: bytes in, frames out, no sockets.

    frame = length (4 bytes, big-endian, of the body) ‖ body (one protobuf message)

An empty frame is a *ping* and is answered by an empty frame. A length over `MAX_FRAME` ends the
connection before anything is buffered for it. In big-endian order the first bytes of HTTP ("GET "
reads as 1.2 GB) and of TLS (16 03 01 02: 369 MB) are over it, so strangers are told apart at once.
"""

from __future__ import annotations

import struct

from kvpool.proto.errors import ProtocolError, TooLargeError

MAX_FRAME = 64 << 20
"""Largest body in bytes."""

PREFIX = struct.Struct(">I")
"""The length in front of each body."""

PING = PREFIX.pack(0)
"""The empty frame."""


def encode(body: bytes) -> bytes:
    """The frame around `body`. Raises `TooLargeError` above `MAX_FRAME`."""
    if len(body) > MAX_FRAME:
        raise TooLargeError(
            f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}; split the batch"
        )
    return PREFIX.pack(len(body)) + body


def body_length(prefix: bytes | bytearray | memoryview, limit: int = MAX_FRAME) -> int:
    """The body length announced by the 4 bytes of `prefix`. Raises `ProtocolError`."""
    if len(prefix) != PREFIX.size:
        raise ProtocolError(f"a frame begins with {PREFIX.size} bytes of length, not {len(prefix)}")
    (length,) = PREFIX.unpack(prefix)
    if length > limit:
        raise ProtocolError(
            f"frame length {length:#x} exceeds {limit:#x}: the peer does not speak kvpool"
            f"{_stranger(bytes(prefix))}"
        )
    return int(length)


_HTTP = frozenset(
    (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"CONN", b"OPTI", b"PATC", b"PRI ", b"HTTP")
)


def _stranger(prefix: bytes) -> str:
    if prefix[:1] == b"\x16" and prefix[1:2] == b"\x03":
        return " (it looks like TLS)"
    if prefix in _HTTP:
        return " (it looks like HTTP)"
    return ""


class FrameDecoder:
    """Cuts a byte stream into frame bodies, whatever the chunk boundaries.

    It holds what was received and not yet taken, never room for what a prefix announces. After a
    `ProtocolError` it stays broken and holds nothing: the stream cannot be resynchronised.
    """

    __slots__ = ("_broken", "_buffer", "_start")

    def __init__(self) -> None:
        self._buffer: bytes | bytearray = b""  # as received; a bytearray once it has to grow
        self._start = 0  # of the first byte that was not taken
        self._broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Returns the bodies that `data` completes, in order. Raises `ProtocolError`."""
        self.push(data)
        bodies: list[bytes] = []
        while (body := self.take()) is not None:
            bodies.append(body)
        return bodies

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Appends `data`; `take` returns what it completes. Raises `ProtocolError` once broken."""
        self._check()
        if self._start == len(self._buffer):
            self._buffer = bytes(data)  # mostly whole frames, which are cut without another copy
        else:
            rest = self._buffer
            if isinstance(rest, bytes):
                rest = bytearray(rest[self._start :])
            else:
                del rest[: self._start]
            rest += data
            self._buffer = rest
        self._start = 0

    def take(self, limit: int = MAX_FRAME) -> bytes | None:
        """The next body, or None until more was pushed. Raises `ProtocolError` above `limit`."""
        self._check()
        buffer, start = self._buffer, self._start
        body_start = start + PREFIX.size
        if body_start > len(buffer):
            return None
        (length,) = PREFIX.unpack_from(buffer, start)
        if length > limit:
            self._broken = True
            self._buffer, self._start = b"", 0
            body_length(buffer[start:body_start], limit)
        end = body_start + length
        if end > len(buffer):
            return None
        if end == len(buffer):
            self._buffer, self._start = b"", 0
        else:
            self._start = end
        if isinstance(buffer, bytes):
            return buffer[body_start:end]
        with memoryview(buffer) as view:
            return bytes(view[body_start:end])

    @property
    def buffered(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer) - self._start

    def _check(self) -> None:
        if self._broken:
            raise ProtocolError("the stream is broken; close the connection")
