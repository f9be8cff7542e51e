"""The connection below a client: what drivers share, and the carriers of the blocking one."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from kvpool.client.effects import Call, Dial, Exclusive, Steps, Work
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import DeadlineError, KvpoolError, UnreachableError, from_code
from kvpool.transfer.stream import Stream, dial

T = TypeVar("T")

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0


class Backoff:
    """After a failed dial, later ones fail at once until the pause is over; it doubles to 1 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = BACKOFF_S_MIN
        self._not_before = 0.0
        self._reason = ""

    def check(self) -> None:
        """Raises `UnreachableError` while a dial would be too early."""
        if self._clock() < self._not_before:
            raise UnreachableError(f"{self._reason} (next try in at most {BACKOFF_S_MAX:g} s)")

    def failed(self, error: KvpoolError) -> None:
        self._reason = str(error)
        self._not_before = self._clock() + self._pause
        self._pause = min(2 * self._pause, BACKOFF_S_MAX)

    def succeeded(self) -> None:
        self._pause = BACKOFF_S_MIN
        self._not_before = 0.0


class Carrier(Protocol):
    """How a blocking link reaches the service: a socket, or the service in this process."""

    @property
    def alive(self) -> bool: ...
    def dial(self, deadline: float) -> None:
        """Connects anew. Raises `UnreachableError`."""

    def call(self, body: Message, deadline: float) -> Message:
        """Raises `UnreachableError`, `DeadlineError`; an Error response is returned as it is."""

    def notify(self, body: Message) -> None:
        """Sends without wanting a response. Raises `UnreachableError`."""

    def close(self) -> None: ...
    def forget(self) -> None:
        """In a fork child: drop the inherited connection without disturbing the parent's."""


class SocketCarrier:
    """Frames over a blocking `Stream`, one request at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stream: Stream | None = None
        self._session = protocol.ClientSession()

    @property
    def alive(self) -> bool:
        return self._stream is not None and self._stream.broken is None

    def dial(self, deadline: float) -> None:
        self.close()
        self._session = protocol.ClientSession()
        self._stream = dial(self._address, deadline)

    def call(self, body: Message, deadline: float) -> Message:
        stream = self._connected()
        request_id = self._session.number(body)
        end = time.monotonic() + deadline
        try:
            stream.send(protocol.request_body(request_id, body), deadline=deadline)
            remaining = deadline
            while True:
                answer = stream.receive(deadline=remaining)
                answer_id, message, wanted = self._session.receive(answer)
                if answer_id == request_id:
                    return message
                if not wanted and (orphan := protocol.orphan_release(message)):
                    stream.send(protocol.request_body(0, orphan), deadline=deadline)
                remaining = max(end - time.monotonic(), 0.001)
        except DeadlineError:
            self._session.abandon(request_id)
            raise
        except KvpoolError:
            stream.close()  # what follows on this connection has no meaning any more
            raise

    def notify(self, body: Message) -> None:
        self._connected().send(protocol.request_body(0, body), deadline=1.0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    forget = close  # closing our descriptor neither shuts the parent's socket down nor sends a byte

    def _connected(self) -> Stream:
        if self._stream is None or self._stream.broken is not None:
            raise UnreachableError(f"not connected to {self._address}")
        return self._stream


class Link(Protocol):
    """A driver of operations."""

    @property
    def alive(self) -> bool: ...
    def notify(self, body: Message) -> None: ...


class BlockingLink:
    """Runs operations by blocking calls. Thread-safe: one request travels at a time, copies run
    side by side."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._backoff = Backoff()
        self._renew_locks()
        _links.add(self)

    def _renew_locks(self) -> None:
        self._call_lock = threading.Lock()
        self._exclusive_lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        return self._carrier.alive

    def run(self, steps: Steps[T], deadline: float) -> T:
        """Runs `steps` to their end; all waiting together is bounded by `deadline` seconds."""
        end = time.monotonic() + deadline
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

    def _perform(self, effect: Any, end: float) -> Any:
        if isinstance(effect, Call):
            with _held(self._call_lock, end):
                return raise_error(self._carrier.call(effect.body, _left(end)))
        if isinstance(effect, Work):
            return effect.function()
        if isinstance(effect, Dial):
            self._dial(end)
            return None
        assert isinstance(effect, Exclusive)
        with _held(self._exclusive_lock, end):
            return self.run(effect.steps(), _left(end))

    def _dial(self, end: float) -> None:
        self._backoff.check()
        with _held(self._call_lock, end):
            try:
                self._carrier.dial(_left(end))
            except UnreachableError as error:
                self._backoff.failed(error)
                raise
        self._backoff.succeeded()

    def notify(self, body: Message) -> None:
        """One-way, best effort: a dead connection has already given everything back."""
        with self._call_lock:
            if self._carrier.alive:
                try:
                    self._carrier.notify(body)
                except UnreachableError:
                    self._carrier.close()

    def close(self) -> None:
        with self._call_lock:
            self._carrier.close()

    def after_fork(self) -> None:
        """In the child: other threads are gone, and the socket is the parent's."""
        self._renew_locks()
        self._carrier.forget()


class _held:
    """A lock with a deadline."""

    __slots__ = ("_end", "_lock")

    def __init__(self, lock: threading.Lock, end: float) -> None:
        self._lock, self._end = lock, end

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(
            timeout=max(0.0, self._end - time.monotonic())
        ):
            raise DeadlineError("another thread's request did not end before the deadline")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise DeadlineError("the deadline passed before the request was sent")
    return left


def raise_error(message: Message) -> Message:
    """`message`, unless it is an Error: then it is raised."""
    if isinstance(message, wire.Error):
        raise from_code(message.code, message.text)
    return message


_links: weakref.WeakSet[BlockingLink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
