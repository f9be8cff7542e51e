"""The store inside this process, for `connect()` without an address.

The one place of the client that knows the store, and only when it is asked for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InternalError, StaleError
from kvpool.transfer.copying import Bytes

if TYPE_CHECKING:
    from kvpool.store.service import Connection, Service


class LocalStore:
    """A store that lives as long as this object; several clients may share it."""

    def __init__(self, capacity: int, *, chunks: int = 0, policy: str = "lru") -> None:
        """`capacity` in bytes, taken page by page as it is written."""
        from kvpool.store.embedded import embedded_service

        self.service: Service = embedded_service(capacity, chunks=chunks, policy=policy)
        self.lock = threading.Lock()

    def regions(self, token: bytes) -> list[Bytes]:
        """The memory that an attach token stands for."""
        return [region.array for region in self.service.redeem(token).domain.pool.regions]

    def close(self) -> None:
        for domain in self.service.domains.values():
            domain.pool.close()


class LocalCarrier:
    """Calls the service directly; the same messages as over a socket."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._connection: Connection | None = None
        self._forked = False

    @property
    def alive(self) -> bool:
        return self._connection is not None

    def dial(self, deadline: float) -> None:
        if self._forked:
            raise StaleError(
                "an embedded store does not cross fork(); connect() anew here, or use a daemon"
            )
        self.close()
        self._connection = self._store.service.connect(local=True)

    def call(self, body: Message, deadline: float) -> Message:
        answer = self._handle(body, 1)
        if answer is None:
            raise InternalError("the embedded store gave no answer")
        return answer

    def notify(self, body: Message) -> None:
        self._handle(body, 0)

    def close(self) -> None:
        if self._connection is not None:
            with self._store.lock:
                self._connection.close()
            self._connection = None

    def forget(self) -> None:
        """A fork child has a copy of the index but not the memory: it must not use either."""
        self._store.lock = threading.Lock()
        self._connection = None
        self._forked = True

    def _handle(self, body: Message, request_id: int) -> Message | None:
        assert self._connection is not None
        name = body.DESCRIPTOR.name.lower()
        request = wire.Request(id=request_id)
        getattr(request, name).CopyFrom(body)
        with self._store.lock:
            self._store.service.reap()
            return self._connection.handle(request)
