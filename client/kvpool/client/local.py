"""The store inside this process, for `connect()` without an address.

The one place of the client that knows the store, and only when it is asked for.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from kvpool.client.pacing import left
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import StaleError, UnreachableError
from kvpool.transfer.copying import Bytes

if TYPE_CHECKING:
    from kvpool.store.service import Connection, Service

C = TypeVar("C", bound="LocalChannel")


class LocalStore:
    """A store in this process; several clients may share it. `close` it when all have closed."""

    def __init__(self, capacity: int, *, chunks: int = 0, policy: str = "") -> None:
        """`capacity` in bytes, taken page by page as it is written. `chunks` bounds the index
        (0: in proportion to the capacity); `policy` evicts (empty: the daemon's default). Raises
        `ConfigError`."""
        from kvpool.store.embedded import embedded_service
        from kvpool.store.eviction import DEFAULT_POLICY

        self.service: Service = embedded_service(
            capacity, chunks=chunks, policy=policy or DEFAULT_POLICY
        )
        self._lock = threading.Lock()
        self._posted: deque[tuple[LocalChannel, wire.Request]] = deque()
        self._lost = ""
        _stores.add(self)

    def open_channel(self, kind: Callable[[LocalStore, Connection], C]) -> C:
        """Raises `StaleError` in a fork child, and `UnreachableError` once closed."""
        if self._lost:
            raise StaleError(self._lost)
        with self._lock:
            return kind(self, self.service.connect(local=True))

    def handle(self, channel: LocalChannel, request: wire.Request) -> Message | None:
        """The answer to a request; what was posted before it goes first."""
        try:
            with self._lock:
                self._handle_posted()
                self.service.reap()
                return channel.serve(request)
        finally:
            self._flush()

    def post(self, channel: LocalChannel, request: wire.Request) -> None:
        """Handles `request` soon. Never blocks: a finaliser may call amid another request."""
        self._posted.append((channel, request))
        self._flush()

    def _flush(self) -> None:
        while self._posted and self._lock.acquire(blocking=False):
            try:
                self._handle_posted()
            finally:
                self._lock.release()

    def _handle_posted(self) -> None:
        while self._posted:
            channel, request = self._posted.popleft()
            if channel.alive:
                channel.serve(request)

    def part(self, channel: LocalChannel) -> None:
        """Closes `channel`; what it holds comes back."""
        with self._lock:
            self._handle_posted()
            channel.end()

    def regions(self, token: bytes) -> list[Bytes]:
        """The memory that an attach token stands for."""
        with self._lock:
            return [region.array for region in self.service.redeem(token).domain.pool.regions]

    def close(self) -> None:
        """Gives the memory back; views of it stay valid until they are dropped. Idempotent."""
        self._lost = self._lost or "the embedded store is closed"
        for domain in self.service.domains.values():
            domain.pool.close()

    def after_fork(self) -> None:
        """A fork child has a copy of the index but not of the memory: it must use neither."""
        self._lock = threading.Lock()
        self._posted.clear()
        self._lost = "an embedded store does not cross fork(): connect anew here, or use a daemon"


class LocalChannel:
    """Calls the service directly; the same messages as over a socket. Thread-safe."""

    silent = False

    def __init__(self, store: LocalStore, connection: Connection) -> None:
        self._store = store
        self._connection: Connection | None = connection
        self._tickets = itertools.count(1)
        self._kept: dict[int, Message | None] = {}

    @property
    def alive(self) -> bool:
        return self._connection is not None

    def call(self, body: Message | None, end: float) -> Any:
        return self._answer(body, end)

    def _answer(self, body: Message | None, end: float) -> Message | None:
        left(end)
        if body is None:
            return None
        return self._store.handle(self, _request(1, body))

    def post(self, body: Message, end: float) -> int:
        ticket = next(self._tickets)
        self._kept[ticket] = self._answer(body, end)
        return ticket

    def wait(self, ticket: int, end: float) -> Any:
        return self._kept.pop(ticket)

    def drop(self, ticket: int) -> None:
        message = self._kept.pop(ticket, None)
        if message is not None and (orphan := protocol.orphan_release(message)):
            self.notify(orphan)

    def notify(self, body: Message, *, vital: bool = True) -> bool:
        if self.alive:
            self._store.post(self, _request(0, body))
        return self.alive

    def close(self) -> None:
        if self.alive:
            self._store.part(self)

    def forget(self) -> None:
        self._connection = None

    def serve(self, request: wire.Request) -> Message | None:
        """REQUIRES: the store's lock."""
        if self._connection is None:
            raise UnreachableError("the connection to the embedded store is closed")
        return self._connection.handle(request)

    def end(self) -> None:
        """REQUIRES: the store's lock."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _request(request_id: int, body: Message) -> wire.Request:
    return protocol.parse_request(protocol.request_body(request_id, body))


_stores: weakref.WeakSet[LocalStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
