"""One place under test, whatever carries it: an embedded store, or a daemon over its sockets."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

from kvpool.client import (
    AsyncClient,
    AsyncPublication,
    AsyncSession,
    Client,
    LocalStore,
    connect,
    connect_async,
)
from kvpool.transfer.copying import Bytes
from tests.store.daemons import RunningDaemon, eventually

CARRIERS = ("embedded", "unix async", "tcp")
"""Every way for bytes and both APIs, though not in every combination."""
EVERY_CARRIER = ("embedded", "embedded async", "unix", "unix async", "tcp", "tcp async")


class Place:
    """A store that clients of one carrier connect to."""

    def __init__(self, carrier: str, daemon: RunningDaemon | None = None) -> None:
        self.carrier = carrier
        self.mapped = not carrier.startswith("tcp")
        """Clients map the store's memory."""
        self._local = LocalStore(32 << 20, chunks=4096) if daemon is None else None
        self._daemon = daemon
        self._loop = asyncio.new_event_loop() if carrier.endswith("async") else None
        self._closing: list[Callable[[], object]] = []

    def connect(self, **options: Any) -> Client:
        """A client; one for asyncio looks like a blocking one."""
        if self._loop is None:
            client = connect(self._address(), **options)
        else:
            made = connect_async(self._address(), **options)
            client = cast(Client, Blocking(made, self._loop))
        self._closing.append(client.close)
        return client

    def connect_mapped(self) -> Client:
        """A blocking client that maps the memory, whatever the carrier."""
        client = connect(self._mapped_address())
        self._closing.append(client.close)
        return client

    def _mapped_address(self) -> LocalStore | str:
        if self._local is not None:
            return self._local
        assert self._daemon is not None
        return self._daemon.address

    def _address(self) -> LocalStore | str:
        if self.mapped:
            return self._mapped_address()
        assert self._daemon is not None
        return str(self._daemon.ready["tcp"])

    def close(self) -> None:
        """Closes all clients, and looks whether anything is left behind."""
        for close in self._closing:
            close()
        with connect(self._mapped_address()) as client:
            eventually(lambda: _leases(client) == 0, "all leases are given back")
        if self._local is not None:
            self._local.close()
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


def _leases(client: Client) -> int:
    return sum(domain["leases"] for domain in client.status()["domains"].values())


class Blocking:
    """Runs what is awaitable on `loop`, so that one test suits both APIs."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            result = value(*args, **options)
            if inspect.isasyncgen(result):
                return self._loop.run_until_complete(_collected(result))
            if inspect.iscoroutine(result):
                result = self._loop.run_until_complete(result)
            if isinstance(result, AsyncClient | AsyncSession | AsyncPublication):
                return Blocking(result, self._loop)
            return result

        return call

    def __enter__(self) -> Any:
        enter = getattr(self._target, "__enter__", None)
        if enter is not None:
            enter()
        return self

    def __exit__(self, *error: Any) -> None:
        if hasattr(self._target, "__exit__"):
            self._target.__exit__(*error)
        else:
            self.close()


async def _collected(items: Any) -> list[Any]:
    return [item async for item in items]


def extent(client: Client, match: Any, chunk: int, part: int = 0) -> Bytes:
    """The stored bytes of a matched chunk, writable: prologue and payload.

    `client` is any that maps the memory of the store in which `match` was made.
    """
    address = int(match.grant.extents[chunk, part, 0])
    connection = client.run(client.core.connected(), None)
    regions = client.run(connection.regions(address, writable=True), None)
    form = match.grant.membership.identity.formats[match.grant.parts[part]]
    return regions.view(address, form.extent_bytes)
