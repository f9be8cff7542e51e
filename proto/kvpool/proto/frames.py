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


def body_length(prefix: bytes | bytearray | memoryview) -> int:
    """The body length announced by the 4 bytes of `prefix`. Raises `ProtocolError`."""
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_FRAME:
        raise ProtocolError(
            f"frame length {length:#x} exceeds {MAX_FRAME:#x}: the peer does not speak kvpool"
            f"{_stranger(bytes(prefix))}"
        )
    return int(length)


def _stranger(prefix: bytes) -> str:
    if prefix[:1] == b"\x16" and prefix[1:2] == b"\x03":
        return " (it looks like TLS)"
    if prefix in (b"GET ", b"POST", b"PUT ", b"HEAD", b"PRI "):
        return " (it looks like HTTP)"
    return ""


class FrameDecoder:
    """Cuts a byte stream into frame bodies, whatever the chunk boundaries.

    After a `ProtocolError` the decoder stays broken: the stream cannot be resynchronised.
    """

    __slots__ = ("_broken", "_buffer")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken = False

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Returns the bodies that `data` completes, in order. Raises `ProtocolError`."""
        if self._broken:
            raise ProtocolError("the stream is broken; close the connection")
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        at = 0
        with memoryview(buffer) as view:
            while len(buffer) - at >= PREFIX.size:
                try:
                    length = body_length(view[at : at + PREFIX.size])
                except ProtocolError:
                    self._broken = True
                    raise
                end = at + PREFIX.size + length
                if end > len(buffer):
                    break
                bodies.append(bytes(view[at + PREFIX.size : end]))
                at = end
        if at:
            del buffer[:at]
        return bodies

    @property
    def buffered(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._buffer)
