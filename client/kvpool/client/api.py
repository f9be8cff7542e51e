"""The blocking API: `connect()` → `Client` → `open(namespace)` → `Session`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeVar

from kvpool.client.blocking import BlockingLink, dialler
from kvpool.client.connection import Route
from kvpool.client.core import DEADLINE_S, ClientCore
from kvpool.client.effects import Steps
from kvpool.client.local import LocalStore
from kvpool.client.pacing import end_after
from kvpool.client.sessions import Session
from kvpool.proto.errors import InvalidError
from kvpool.proto.namespace import Namespace
from kvpool.transfer.sockets import parse

T = TypeVar("T")

GIB = 1 << 30


def connect(
    address: str | LocalStore | None = None,
    *,
    token: str = "",
    name: str = "",
    deadline_s: float = DEADLINE_S,
    capacity: int = GIB,
) -> Client:
    """A client of the store at `address`: ``unix:PATH``, ``tcp://HOST:PORT``, or None.

    None starts a store of `capacity` bytes inside this process, which ends with the client; pass a
    `LocalStore` to share one. `token` is the credential, `name` is shown in the store's status.
    Connecting is lazy and repeats itself: an engine may start before its daemon. `deadline_s`
    bounds every call that does not give its own, copies included. Raises `InvalidError` for an
    address that cannot be parsed and `ConfigError` for an impossible capacity.
    """
    own = LocalStore(capacity) if address is None else None
    where = own or check_address(address)
    core = ClientCore(
        token=token, name=name, store=where if isinstance(where, LocalStore) else None
    )
    return Client(core, BlockingLink(dialler(where)), deadline_s, own)


def check_address(address: object) -> str | LocalStore:
    """`address` if it can be dialled. Raises `InvalidError`."""
    if isinstance(address, LocalStore):
        return address
    if not isinstance(address, str):
        raise InvalidError(f"address {address!r} is neither unix:PATH nor tcp://HOST:PORT nor None")
    parse(address)
    return address


class Client:
    """A connection to one store. Thread-safe. Use it as a context manager or `close` it.

    After fork() the child connects anew by itself; matches of the parent are STALE_EPOCH there.
    """

    def __init__(
        self, core: ClientCore, link: BlockingLink, deadline_s: float, own: LocalStore | None
    ) -> None:
        self.core = core
        self.deadline_s = deadline_s
        self._link = link
        self._own = own

    def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        """Runs one operation within `deadline_s` seconds (default: the client's).

        Raises `InvalidError` once the client is closed.
        """
        if self.core.closed:
            steps.close()
            raise InvalidError("the client is closed")
        end = end_after(self.deadline_s if deadline_s is None else deadline_s)
        return self._link.run(steps, end)

    def open(self, namespace: Namespace, *, deadline_s: float | None = None) -> Session:
        """A session in `namespace`. If the store is away, the session joins it later by itself.

        Raises `NamespaceError`, `DeniedError` or `TooLargeError` if the store refuses it, and
        `VersionError` or `ProtocolError` if what listens there is no store of ours.
        """
        return Session(self, namespace, deadline_s)

    def ping(self, *, deadline_s: float | None = None) -> float:
        """Seconds of one empty round trip. Raises `UnreachableError`."""
        return self.run(self.core.ping(), deadline_s)

    def route(self, *, deadline_s: float | None = None) -> Route:
        """How bytes travel to and from the store (in-process, shm, stream), and why.

        Memory that may be mapped but cannot be is noticed at the first pull or publish: from then
        on bytes are streamed. Raises `UnreachableError`.
        """
        return self.run(self.core.route(), deadline_s)

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """The daemon's figures. Raises `UnreachableError`."""
        return self.run(self.core.status(), deadline_s)

    def keys(self, *, page: int = 1000, deadline_s: float | None = None) -> Iterator[bytes]:
        """Every key of this tenant, 32 bytes each, fetched `page` at a time.

        Raises `UnreachableError`.
        """
        cursor = 0
        while True:
            keys, cursor = self.run(self.core.keys(page, cursor), deadline_s)
            yield from keys
            if not cursor:
                return

    def clear(self, *, deadline_s: float | None = None) -> int:
        """Deletes every chunk of this tenant in this domain; how many there were.

        Raises `UnreachableError`.
        """
        return self.run(self.core.clear(), deadline_s)

    def close(self, *, deadline_s: float | None = None) -> None:
        """Ends the session: leases and unfinished publications go back to the store, and views
        that were borrowed are dead. Idempotent.

        Waits for copies that other threads are in; raises `BusyError`, and stays open for them, if
        they do not end within the deadline.
        """
        self.core.close(end_after(self.deadline_s if deadline_s is None else deadline_s))
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
