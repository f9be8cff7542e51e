"""The blocking driver: operations run in the caller's thread, over a blocking socket."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvpool.client.effects import Await, Call, Channel, Dial, Effect, Pause, Post, Steps, Work
from kvpool.client.keepalive import keep_alive
from kvpool.client.local import LocalChannel, LocalStore
from kvpool.client.pacing import PATIENCE_S, left, raise_error
from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto.errors import DeadlineError, KvpoolError, UnreachableError
from kvpool.transfer.stream import Stream, dial

A = TypeVar("A")
T = TypeVar("T")

STUCK_S = 1.0
"""After a one-way message found no room in the socket, they wait this long, or for a call."""
REST_S = 1.0
"""How long the rest of a large message may take, once its first byte has moved."""
AWAKE_S = 0.0002
"""How long a thread looks for an answer before it sleeps. A core that sleeps wakes with empty
caches, and what follows takes twice as long in them."""
NAPS = 16
"""Answers that are waited for asleep after one that came too late for that."""
LOOK_S = 0.001
"""What taking a response that has come already may cost, after the deadline."""

_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_WATCHED = select.POLLIN | select.POLLRDHUP
_CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class SocketChannel:
    """Frames over one blocking `Stream`, used by one thread at a time. Thread-safe.

    Whoever waits for a response keeps those that come for others.
    """

    def __init__(self, stream: Stream, address: str) -> None:
        self._stream = stream
        self._fd = stream.fileno()
        self._looks: list[select.poll] = []
        self._address = address
        self._session = protocol.ClientSession()
        self._lock = threading.Lock()
        self._kept: dict[int, Message] = {}
        self._dropped: deque[int] = deque()
        self._outbox: deque[bytes] = deque()
        self._stuck_until = 0.0
        self._naps = 0
        self._silent = False
        self._lost = False
        self._closing = False

    @classmethod
    def dial(cls, address: str, end: float) -> SocketChannel:
        """Raises `UnreachableError`."""
        stream = dial(address, left(end))
        keep_alive(stream.sock)
        return cls(stream, address)

    @property
    def alive(self) -> bool:
        return not self._lost and self._stream.broken is None and not self._look() & _CLOSED

    @property
    def silent(self) -> bool:
        if self._silent and self._look() & select.POLLIN:  # the late answer has come
            self._silent = False
        return self._silent

    def _look(self) -> int:
        """What the socket has for us just now, as `poll` says it."""
        try:
            look = self._looks.pop()  # one thread at a time may use it
        except IndexError:
            look = select.poll()
            look.register(self._fd, _WATCHED)
        found = look.poll(0)
        self._looks.append(look)
        return found[0][1] if found else 0

    def call(self, body: Message | None, end: float) -> Message | None:
        return self._alone(self._call, body, end)

    def post(self, body: Message, end: float) -> int:
        return self._alone(self._send, body, end)

    def wait(self, ticket: int, end: float) -> Message | None:
        return self._alone(self._receive, ticket, max(end, time.monotonic() + LOOK_S))

    def _alone(self, function: Callable[[A, float], T], argument: A, end: float) -> T:
        """`function(argument, end)` while no other thread uses the stream."""
        if self._silent:
            end = min(end, time.monotonic() + PATIENCE_S)
        try:
            _acquire(self._lock, end)
            try:
                result = function(argument, end)
            finally:
                self._lock.release()
        finally:
            if self._closing:
                self._close_if_idle()
        if self._outbox or self._dropped:
            self._flush()
        return result

    def _call(self, body: Message | None, end: float) -> Message | None:
        return self._receive(self._send(body, end), end)

    def _send(self, body: Message | None, end: float) -> int:
        self._check_connected()
        request_id = self._session.number(body) if body is not None else 0
        try:
            if self._outbox:
                self._send_outbox()
            frame = protocol.request_body(request_id, body) if body is not None else b""
            self._stream.send(frame, deadline=left(end))
        except BaseException as error:
            self._failed(request_id, error)
            raise
        return request_id

    def _receive(self, request_id: int, end: float) -> Message | None:
        """The response; those to other requests that come before it are kept for them."""
        try:
            while request_id not in self._kept:
                self._check_connected()
                answer = self._next_frame(end)
                self._silent = False
                if answer:
                    self._accept(answer)
                elif not request_id:  # else it is of a ping that came too late
                    return None
        except BaseException as error:
            self._failed(request_id, error)
            raise
        return self._kept.pop(request_id)

    def _next_frame(self, end: float) -> bytes:
        if self._naps:
            self._naps -= 1
            return self._stream.receive(deadline=left(end))
        started = time.monotonic()
        frame = self._stream.receive(deadline=left(end), awake=AWAKE_S)
        if time.monotonic() - started > AWAKE_S:  # the machine is busy: the daemon needs the core
            self._naps = NAPS
        return frame

    def _check_connected(self) -> None:
        if self._lost or self._stream.broken is not None:
            raise UnreachableError(f"not connected to {self._address}")

    def _accept(self, answer: bytes) -> None:
        request_id, message, wanted = self._session.receive(answer)
        if wanted:
            self._kept[request_id] = message
        else:
            self._release_orphan(message)

    def _release_orphan(self, message: Message | None) -> None:
        if message is not None and (orphan := protocol.orphan_release(message)):
            self._outbox.append(protocol.request_body(0, orphan))

    def _failed(self, request_id: int, error: BaseException) -> None:
        self._session.abandon(request_id)
        self._silent = isinstance(error, DeadlineError)
        # Without sense from here on; not closed, because somebody may be copying.
        self._lost = self._lost or (isinstance(error, KvpoolError) and not self._silent)

    def drop(self, ticket: int) -> None:
        self._dropped.append(ticket)
        self._flush()

    def notify(self, body: Message, *, vital: bool = True) -> bool:
        if self._lost or self._stream.broken is not None:
            return False
        if time.monotonic() < self._stuck_until:
            if vital:
                self._outbox.append(protocol.request_body(0, body))
            return vital
        self._outbox.append(protocol.request_body(0, body))
        self._flush()
        return True

    def _flush(self) -> None:
        """Sends the outbox, unless another thread is in a call: then that one will."""
        while (self._outbox or self._dropped) and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self._forgo(self._dropped.popleft())
                if not self._send_outbox():
                    return
            finally:
                self._lock.release()

    def _forgo(self, ticket: int) -> None:
        """Gives back what was granted, if the response has come; if not, it will be an orphan."""
        silent = self._silent
        try:
            self._release_orphan(self._receive(ticket, time.monotonic() + LOOK_S))
        except DeadlineError:
            self._silent = silent  # it was given no time to speak of
        except KvpoolError:
            return  # a dead connection has given everything back already

    def _send_outbox(self) -> bool:
        """False if the daemon does not read just now."""
        while self._outbox:
            try:
                self._send_at_once(frames.encode(self._outbox[0]))
            except BlockingIOError:
                self._stuck_until = time.monotonic() + STUCK_S
                return False
            except (KvpoolError, OSError):  # a dead connection has given everything back already
                self._lost = True
                self._outbox.clear()
                return False
            self._outbox.popleft()
        return True

    def _send_at_once(self, frame: bytes) -> None:
        """Raises `BlockingIOError` if not even the first byte can be sent without waiting."""
        sent = self._stream.sock.send(frame, _AT_ONCE)
        if sent < len(frame):
            self._stream.send_buffers([frame[sent:]], deadline=REST_S)

    def close(self) -> None:
        self._lost = self._closing = True
        self._stream.abort()  # whoever is in a call ends, and closes
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        # Never waits for the lock: a finaliser may call amid a call of its own thread.
        if self._lock.acquire(blocking=False):
            try:
                self._stream.close()
            finally:
                self._lock.release()

    def forget(self) -> None:
        # A stream closes by itself in a fork child, without a byte to the parent's peer.
        self._lock = threading.Lock()


class BlockingLink:
    """Runs operations in the calling thread. Thread-safe: copies run side by side."""

    def __init__(self, dial: Callable[[float], Channel]) -> None:
        """`dial(end)` opens a channel before `end` on the monotonic clock."""
        self._dial = dial
        self._exclusive = threading.Lock()
        _links.add(self)

    def run(self, steps: Steps[T], end: float) -> T:
        """Runs `steps` to their end; all their waiting ends at `end` on the monotonic clock."""
        try:
            effect = next(steps)
            while True:
                try:
                    result = self._perform(effect, end)
                except BaseException as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _perform(self, effect: Effect, end: float) -> Any:
        if isinstance(effect, Call):
            return raise_error(effect.channel.call(effect.body, end))
        if isinstance(effect, Post):
            return effect.channel.post(effect.body, end)
        if isinstance(effect, Await):
            return raise_error(effect.channel.wait(effect.ticket, end))
        if isinstance(effect, Work):
            return effect.function(end)
        if isinstance(effect, Dial):
            return self._dial(end)
        if isinstance(effect, Pause):
            return time.sleep(min(effect.seconds, left(end)))
        _acquire(self._exclusive, end)
        try:
            return self.run(effect.steps(), min(end, time.monotonic() + effect.seconds))
        finally:
            self._exclusive.release()

    def after_fork(self) -> None:
        """In the child, where the threads that held locks do not exist."""
        self._exclusive = threading.Lock()


def dialler(address: str | LocalStore) -> Callable[[float], Channel]:
    """What opens channels to `address`."""

    def dial(end: float) -> Channel:
        if isinstance(address, LocalStore):
            return address.open_channel(LocalChannel)
        return SocketChannel.dial(address, end)

    return dial


def _acquire(lock: threading.Lock, end: float) -> None:
    """Takes `lock` before `end` on the monotonic clock, or raises `DeadlineError`."""
    if lock.acquire(blocking=False):
        return
    if not lock.acquire(timeout=max(0.0, end - time.monotonic())):
        raise DeadlineError("another thread's request did not end before the deadline")


_links: weakref.WeakSet[BlockingLink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
