"""A client: one connection at a time, made when it is needed and made anew when it is lost."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from google.protobuf.message import Message

from kvpool.client.connection import Connection, Route
from kvpool.client.effects import Call, Channel, Dial, Exclusive, Steps
from kvpool.client.local import LocalStore
from kvpool.client.pacing import Backoff
from kvpool.client.streaming import DataLink
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import KvpoolError, ProtocolError, UnreachableError
from kvpool.proto.keys import KEY_BYTES

DEADLINE_S = 5.0


class ClientCore:
    """The connection state of one client, shared by its sessions."""

    def __init__(self, *, token: str, name: str, store: LocalStore | None = None) -> None:
        """`store` is the one in this process, if it is that."""
        self.connection: Connection | None = None
        self._token = token
        self._name = name
        self._local_regions = store.regions if store is not None else None
        self._backoff = Backoff()
        self.closed = False

    @property
    def ready(self) -> Connection | None:
        """The connection, if there is one to be used without further ado."""
        connection = self.connection
        if connection is None or not connection.alive or connection.channel.silent:
            return None
        return connection

    def connected(self) -> Steps[Connection]:
        """The connection, made anew if need be. Raises what keeps it from being made."""
        connection = self.connection
        if connection is not None and connection.alive:
            if connection.channel.silent:
                self._backoff.check()
            return connection
        yield Exclusive(self._connect, self._backoff.patience)
        assert self.connection is not None
        return self.connection

    def _connect(self) -> Steps[None]:
        if self.closed:
            raise UnreachableError("the client is closed")
        old = self.connection
        if old is not None:
            if old.alive:  # somebody else has connected while we waited
                return
            old.retire()
        self._backoff.check()
        try:
            self.connection = yield from self._greet()
        except KvpoolError as error:
            self._backoff.failed(error)
            raise
        self._backoff.succeeded()
        if self.closed:
            self.connection.retire()
            raise UnreachableError("the client was closed")

    def _greet(self) -> Steps[Connection]:
        hello = wire.Hello(
            version_min=protocol.VERSION_MIN,
            version_max=protocol.VERSION_MAX,
            features=sorted(protocol.FEATURES),
            token=self._token,
            client=self._name,
            pid=os.getpid(),
        )
        channel: Channel = yield Dial()
        try:
            welcome: wire.Welcome = yield Call(channel, hello)
            _check_welcome(welcome)
        except BaseException:
            channel.close()
            raise
        data = DataLink(welcome.data_address, hello) if welcome.data_address else None
        return Connection(channel, welcome, data, self._local_regions, self._backoff)

    def call(self, body: Message | None, kind: type[Any] = Message) -> Steps[Any]:
        """One request on a connection that is made if need be, and its response."""
        connection = yield from self.connected()
        return (yield from connection.ask(body, kind))

    def status(self) -> Steps[dict[str, Any]]:
        report = yield from self.call(wire.Status(), wire.StatusReport)
        answer: dict[str, Any] = json.loads(report.json)
        return answer

    def keys(self, limit: int, cursor: int) -> Steps[tuple[list[bytes], int]]:
        page = yield from self.call(wire.Keys(cursor=cursor, limit=limit), wire.KeyPage)
        keys = [page.keys[i : i + KEY_BYTES] for i in range(0, len(page.keys), KEY_BYTES)]
        return keys, page.cursor

    def clear(self) -> Steps[int]:
        count: wire.Count = yield from self.call(wire.Clear(), wire.Count)
        return count.count

    def route(self) -> Steps[Route]:
        """How bytes travel on the present connection."""
        connection = yield from self.connected()
        return connection.route

    def ping(self) -> Steps[float]:
        """Seconds of one empty frame and its answer."""
        connection = yield from self.connected()
        start = time.perf_counter()
        yield from connection.ask(None, type(None))
        return time.perf_counter() - start

    @property
    def copies(self) -> int:
        """Copies that are running."""
        return self.connection.copies if self.connection is not None else 0

    def close(self, end: float) -> None:
        """Raises `BusyError` if copies are running beyond `end` on the monotonic clock."""
        self.closed = True
        if self.connection is not None:
            self.connection.close(end)


def _check_welcome(welcome: Message) -> None:
    if not isinstance(welcome, wire.Welcome) or not welcome.reserve_max or not welcome.keys_max:
        raise ProtocolError("Hello was not answered by a Welcome with limits")
