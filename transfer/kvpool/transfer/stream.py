"""A blocking, framed connection over TCP or Unix sockets, with a deadline on every call.

What travels: frames (`kvpool.proto.frames`), each optionally followed by raw payload whose length
both sides know from the frame. Payload goes straight from and to the caller's own buffers.

Deadlines are kept by the kernel (SO_RCVTIMEO, SO_SNDTIMEO) and set again only when they change: a
small request and its response cost the same two system calls as bare `send` and `recv`.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from kvpool.proto import frames
from kvpool.proto.errors import DeadlineError, KvpoolError, ProtocolError, UnreachableError
from kvpool.transfer.base import Buffer
from kvpool.transfer.copying import Bytes, as_bytes
from kvpool.transfer.sockets import close_listener, connect, listen

__all__ = ["Stream", "close_listener", "dial", "listen"]

READ_AHEAD = 16 << 10
"""Bytes read at once while a frame is expected: a small frame costs one `recv`, and no more than
this much of the payload behind it is copied once more."""

SLACK_S = 0.01
"""How far the kernel's timeout may exceed the time left before it is set again."""

IOV_MAX = 1024
"""Buffers per sendmsg or recvmsg; Linux accepts no more."""

_TIMEVAL = struct.Struct("@ll")
_PREFIX = frames.PREFIX.size
# As plain integers: converting the enumeration members costs more than the branch around them.
_DONTWAIT = int(socket.MSG_DONTWAIT)
_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_WAITALL = int(socket.MSG_WAITALL)


def dial(address: str, deadline: float) -> Stream:
    """A stream to `unix:PATH` or `tcp://HOST:PORT`, within `deadline` seconds.

    Raises `InvalidError` for an address that cannot be parsed, `DeadlineError` and
    `UnreachableError`.
    """
    return Stream(connect(address, deadline))


class Stream:
    """One connection. Blocking; every `deadline` is in seconds from the call.

    One thread may send while another receives; otherwise one thread at a time. `abort` may come
    from any thread.

    Every call raises `DeadlineError` when its time is over and `UnreachableError` when the peer is
    gone. If that happens amid a frame or its payload the stream is *broken*: nobody can know any
    more what the next byte means, so all later calls raise `UnreachableError` with the first
    reason. A deadline that passes before the first byte of a frame leaves the stream whole.

    A fork child cannot use the streams of its parent. Its copies are closed at once, so that the
    two never mix their bytes, and the peer sees the end as soon as the parent closes.
    """

    __slots__ = (
        "__weakref__",
        "_broken",
        "_ended",
        "_held",
        "_read_ahead",
        "_receive_timeout_s",
        "_send_timeout_s",
        "_sock",
        "_start",
    )

    def __init__(self, sock: socket.socket, exact: bool = False) -> None:
        """Takes over the connected `sock`.

        With `exact` nothing behind the current frame or payload is ever read, at the cost of one
        more system call per frame; needed where descriptors follow (`shm.receive_descriptors`).
        """
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._read_ahead = _PREFIX if exact else READ_AHEAD
        self._held = b""  # read from the socket; from `_start` on not yet handed out
        self._start = 0
        self._receive_timeout_s = math.nan  # what the kernel has; NaN = nothing yet
        self._send_timeout_s = math.nan
        self._broken: str | None = None
        self._ended = False
        _of_this_process.add(self)

    @property
    def sock(self) -> socket.socket:
        """The socket below. Reading from it misses what is buffered here, unless `exact`."""
        return self._sock

    @property
    def broken(self) -> str | None:
        """Why the stream cannot be used any more, or None."""
        return self._broken

    @property
    def ended(self) -> bool:
        """Whether the peer closed in good order, between two frames."""
        return self._ended

    def fileno(self) -> int:
        """The socket's descriptor. `select` does not see bytes that are buffered already."""
        return self._sock.fileno()

    def send(self, body: bytes, buffers: Sequence[Buffer] = (), *, deadline: float) -> None:
        """Send one frame around `body` and then the bytes of `buffers`, without copying them.

        Raises `TooLargeError` for a body above the frame limit and `InvalidError` for a buffer
        that is not contiguous, both before anything is sent.
        """
        frame = frames.encode(body)
        views = [as_bytes(buffer) for buffer in buffers] if buffers else []
        end = self._begin(deadline)
        try:
            sent = self._send_first(frame, views, deadline)
            if sent < len(frame) + sum(view.size for view in views):
                self._send_rest([as_bytes(frame), *views], sent, end)
        except BaseException as error:
            self._spoil(error)
            raise

    def send_buffers(self, buffers: Sequence[Buffer], *, deadline: float) -> None:
        """Send payload that a frame announced earlier, without copying it; errors as `send`."""
        views = [as_bytes(buffer) for buffer in buffers]
        end = self._begin(deadline)
        try:
            self._send_rest(views, 0, end)
        except BaseException as error:
            self._spoil(error)
            raise

    def receive(
        self,
        *,
        deadline: float,
        idle: float | None = None,
        limit: int = frames.MAX_FRAME,
        awake: float = 0.0,
    ) -> bytes:
        """The body of the next frame. `b""` is a ping: whoever serves answers it by `send(b"")`.

        For the first `awake` seconds the thread looks for it again and again before it sleeps.
        A server gives `idle`, the seconds that it waits for a frame's first byte; `deadline` then
        counts from that byte. Raises `ProtocolError` for a length above `limit` bytes, which
        breaks the stream, and `UnreachableError` when the peer has closed (see `ended`).
        """
        patience = deadline if idle is None else idle
        end = self._begin(patience)
        try:
            if self._start == len(self._held):
                looked = self._look(min(awake, patience)) if awake else None
                self._held = looked or self._receive_some(self._read_ahead, patience, clean=True)
                self._start = 0
                if idle is not None:
                    end = time.monotonic() + deadline
            return self._cut_frame(end, limit)
        except BaseException as error:
            self._spoil(error)
            raise

    def receive_into(self, buffers: Sequence[Buffer], *, deadline: float) -> None:
        """Fill all `buffers` with the payload behind the last frame, straight from the socket.

        Raises `InvalidError` for a buffer that is read-only or not contiguous, before any byte
        is read. After any other error the stream is broken and the buffers are undefined.
        """
        views = [as_bytes(buffer, writable=True) for buffer in buffers]
        pending = [view for view in views if view.size]
        end = self._begin(deadline)
        try:
            if self._start < len(self._held):
                pending = _after(pending, self._drain(pending))
            while pending:
                pending = _after(pending, self._receive_all(pending[:IOV_MAX], end))
        except BaseException as error:
            self._spoil(error)
            raise

    def ping(self, *, deadline: float) -> None:
        """Send an empty frame and wait for the empty answer.

        REQUIRES: no answer is outstanding. Raises `ProtocolError` if another frame comes.
        """
        end = time.monotonic() + deadline
        self.send(b"", deadline=deadline)
        if self.receive(deadline=end - time.monotonic()):
            raise self._break(ProtocolError("a frame with content answered a ping"))

    def abort(self) -> None:
        """From any thread: calls in flight and all later ones raise `UnreachableError` at once."""
        self._broken = self._broken or "aborted"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. REQUIRES: no other thread is in a call (`abort` ends those)."""
        self._broken = self._broken or "closed"
        self._sock.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, seconds: float) -> float:
        """The time at which a call ends that starts now."""
        if self._broken is not None:
            raise UnreachableError(f"the stream is broken: {self._broken}")
        return time.monotonic() + seconds

    def _send_first(self, frame: bytes, views: list[Bytes], deadline: float) -> int:
        try:
            if deadline != self._send_timeout_s:
                self._arm_send(deadline)
            if not views:
                return self._sock.send(frame, _NOSIGNAL)
            return self._sock.sendmsg([frame, *views[: IOV_MAX - 1]], (), _NOSIGNAL)
        except OSError as error:
            raise self._translated(error, "sending", clean=True) from error

    def _send_rest(self, views: Sequence[Bytes], sent: int, end: float) -> None:
        pending = _after(views, sent)
        while pending:
            try:
                self._arm_send(end - time.monotonic())
                sent = self._sock.sendmsg(pending[:IOV_MAX], (), _NOSIGNAL)
            except OSError as error:
                raise self._translated(error, "sending") from error
            pending = _after(pending, sent)

    def _cut_frame(self, end: float, limit: int) -> bytes:
        """The frame, of at most `limit` bytes, that begins with what is held."""
        while len(self._held) - self._start < _PREFIX:
            held = self._held[self._start :]
            missing = max(self._read_ahead - len(held), 1)
            self._held = held + self._receive_some(missing, end - time.monotonic())
            self._start = 0
        (nbytes,) = frames.PREFIX.unpack_from(self._held, self._start)
        body_start = self._start + _PREFIX
        if nbytes > limit:
            self._refuse(self._held[self._start : body_start], limit)
        body = self._held[body_start : body_start + nbytes]
        self._start = body_start + len(body)
        return body if len(body) == nbytes else self._receive_rest(body, nbytes, end)

    def _look(self, seconds: float) -> bytes | None:
        """The first bytes of a frame if they come so soon; nothing, too, if the peer has closed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                return self._sock.recv(self._read_ahead, _DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._translated(error, "receiving", clean=True) from error
        return None

    def _receive_some(self, limit: int, seconds: float, clean: bool = False) -> bytes:
        """1 to `limit` bytes; `clean` if no byte of the frame has come yet."""
        try:
            if seconds != self._receive_timeout_s:
                self._arm_receive(seconds)
            piece = self._sock.recv(limit)
        except OSError as error:
            raise self._translated(error, "receiving", clean) from error
        return piece or self._eof(clean)

    def _receive_rest(self, head: bytes, nbytes: int, end: float) -> bytes:
        """A body of `nbytes` that begins with `head`."""
        pieces, missing = [head], nbytes - len(head)
        while missing:
            try:
                self._arm_receive(end - time.monotonic())
                piece = self._sock.recv(missing, _WAITALL) or self._eof()
            except OSError as error:
                raise self._translated(error, "receiving") from error
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def _receive_all(self, views: Sequence[Bytes], end: float) -> int:
        """As many bytes into `views`, none of them empty, as come before `end`; at least one."""
        try:
            self._arm_receive(end - time.monotonic())
            if len(views) == 1:
                return self._sock.recv_into(views[0], 0, _WAITALL) or self._eof()
            return self._sock.recvmsg_into(views, 0, _WAITALL)[0] or self._eof()
        except OSError as error:
            raise self._translated(error, "receiving") from error

    def _drain(self, views: Sequence[Bytes]) -> int:
        """Move bytes that were read ahead to the front of `views`; returns how many."""
        ahead = np.frombuffer(self._held, np.uint8)[self._start :]
        drained = 0
        for view in views:
            piece = ahead[drained : drained + view.size]
            view[: piece.size] = piece
            drained += piece.size
        self._start += drained
        return drained

    def _arm_send(self, seconds: float) -> None:
        """Let the kernel end the next send after `seconds`. Raises `BlockingIOError` for <= 0."""
        if not seconds <= self._send_timeout_s <= seconds + SLACK_S or seconds <= 0:
            self._send_timeout_s = self._set_timeout(socket.SO_SNDTIMEO, seconds)

    def _arm_receive(self, seconds: float) -> None:
        if not seconds <= self._receive_timeout_s <= seconds + SLACK_S or seconds <= 0:
            self._receive_timeout_s = self._set_timeout(socket.SO_RCVTIMEO, seconds)

    def _set_timeout(self, option: int, seconds: float) -> float:
        if seconds <= 0:
            raise BlockingIOError
        # Rounded up to milliseconds: a timeval of zero would wait for ever.
        milliseconds = math.ceil(seconds * 1000)
        timeval = _TIMEVAL.pack(milliseconds // 1000, milliseconds % 1000 * 1000)
        self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        return milliseconds / 1000

    def _translated(self, error: OSError, doing: str, clean: bool = False) -> KvpoolError:
        if isinstance(error, BlockingIOError):
            late = DeadlineError(f"deadline passed while {doing}")
            return late if clean else self._break(late)
        return self._break(UnreachableError(f"{doing} failed: {error}"))

    def _spoil(self, error: BaseException) -> None:
        """Anything but our own errors comes amid a call (a signal handler raised, memory is out):
        how many bytes have moved is not known then."""
        if not isinstance(error, KvpoolError):
            self._broken = self._broken or "a call was interrupted"

    def _refuse(self, prefix: bytes, limit: int) -> None:
        """Raise the codec's own words for a length that it does not accept."""
        try:
            frames.body_length(prefix, limit)
        except ProtocolError as error:
            raise self._break(error) from None

    def _eof(self, clean: bool = False) -> NoReturn:
        self._ended = clean and self._broken is None
        where = "the peer closed the connection"
        raise self._break(UnreachableError(where if clean else f"{where} in mid-frame"))

    def _break(self, error: KvpoolError) -> KvpoolError:
        """Remember the first reason; returns `error`, to be raised."""
        self._broken = self._broken or str(error)
        return error


def _after(views: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """What is left of `views` behind the first `nbytes` bytes, without empty views."""
    for index, view in enumerate(views):
        if nbytes < view.size:
            return [view[nbytes:], *(later for later in views[index + 1 :] if later.size)]
        nbytes -= view.size
    return []


_of_this_process: weakref.WeakSet[Stream] = weakref.WeakSet()


def _close_in_child() -> None:
    for stream in _of_this_process:
        stream._broken = "it was opened before fork(); connect again in this process"
        stream._sock.close()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_close_in_child)
