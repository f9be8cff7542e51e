"""The blocking API: `connect()` → `Client` → `open(namespace)` → `Session`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from kvpool.client.core import DEADLINE_S, ClientCore, Prompt, SessionCore
from kvpool.client.effects import Steps
from kvpool.client.link import BlockingLink, SocketCarrier
from kvpool.client.local import LocalCarrier, LocalStore
from kvpool.client.publication import Publishing, open_publication, publish
from kvpool.client.results import Borrow, Explanation, Match, Outcomes, Publish, Pull
from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import Extra
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome

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

    None starts a store of `capacity` bytes inside this process; pass a `LocalStore` to share one.
    Connecting is lazy and repeats itself: an engine may start before its daemon. `deadline_s`
    bounds every call that does not give its own.
    """
    if address is None:
        address = LocalStore(capacity)
    if isinstance(address, LocalStore):
        link = BlockingLink(LocalCarrier(address))
        core = ClientCore(link, token=token, name=name, local_regions=address.regions)
    elif isinstance(address, str) and address.startswith(("unix:", "tcp://")):
        link = BlockingLink(SocketCarrier(address))
        core = ClientCore(link, token=token, name=name)
    else:
        raise InvalidError(f"address {address!r} is neither unix:PATH nor tcp://HOST:PORT nor None")
    return Client(core, link, deadline_s)


class Client:
    """A connection to one store. Thread-safe. Use as a context manager or `close` it."""

    def __init__(self, core: ClientCore, link: BlockingLink, deadline_s: float) -> None:
        self.core = core
        self.deadline_s = deadline_s
        self._link = link

    def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        """Runs one operation within `deadline_s` seconds (default: the client's)."""
        return self._link.run(steps, self.deadline_s if deadline_s is None else deadline_s)

    def open(self, namespace: Namespace, *, deadline_s: float | None = None) -> Session:
        """A session in `namespace`. If the store is down, the session joins it later by itself.

        Raises `NamespaceError`, `DeniedError` or `TooLargeError` if the store refuses it.
        """
        return Session(self, namespace, deadline_s)

    def ping(self, *, deadline_s: float | None = None) -> float:
        """Seconds of one round trip through the daemon's request handling."""
        self.run(self.core.ensure(), deadline_s)
        start = time.perf_counter()
        self.run(self.core.keys(0, 1, 0), deadline_s)
        return time.perf_counter() - start

    def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """The daemon's figures. Raises `UnreachableError`."""
        return self.run(self.core.status(), deadline_s)

    def keys(self, *, page: int = 1000, deadline_s: float | None = None) -> Iterator[bytes]:
        """Every key of this tenant, page by page."""
        cursor = 0
        while True:
            keys, cursor = self.run(self.core.keys(0, page, cursor), deadline_s)
            yield from keys
            if not cursor:
                return

    def clear(self, *, deadline_s: float | None = None) -> int:
        """Deletes every chunk of this tenant in this domain; how many there were."""
        return self.run(self.core.clear(0), deadline_s)

    def close(self) -> None:
        """Ends the session: leases and unfinished publications go back to the store.

        Waits for copies that other threads are in; raises `BusyError` if they do not end.
        """
        end = time.monotonic() + self.deadline_s
        while self.core.copies and time.monotonic() < end:
            time.sleep(0.001)
        self.core.check_idle()
        self._link.close()
        if self.core.data is not None:
            self.core.data.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Session:
    """Match, pull and publish in one namespace. Thread-safe."""

    def __init__(self, client: Client, namespace: Namespace, deadline_s: float | None) -> None:
        self.core = SessionCore(client.core, namespace)
        self._client = client
        client.run(self.core.join(), deadline_s)

    @property
    def namespace(self) -> Namespace:
        return self.core.namespace

    @property
    def warning(self) -> str:
        """Said by the daemon if another namespace of this model can never meet this one."""
        return self.core.warning

    def keys(self, tokens: Prompt, extras: Sequence[Extra] | None = None) -> bytes:
        """Packed keys (n x 32 bytes) of the full chunks of `tokens`; hashes only what is new."""
        return self.core.keys(tokens, extras)

    def match(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        parts: tuple[str, ...] | None = None,
        lease_s: float = 0.0,
        peek: bool = False,
        deadline_s: float | None = None,
    ) -> Match:
        """The longest stored prefix of `prompt` (tokens, or packed keys), under a lease.

        `parts` are those that must be there (None: all). `peek` only looks: no lease, not a use.
        Never raises because of the store.
        """
        steps = self.core.match(prompt, extras, parts, lease_s, peek)
        return self._client.run(steps, deadline_s)

    def adopt(
        self,
        lease: bytes,
        keys: bytes,
        *,
        parts: tuple[str, ...] | None = None,
        deadline_s: float | None = None,
    ) -> Match:
        """Joins the holders of another session's lease: `match.lease` and `match.keys` of there."""
        return self._client.run(self.core.adopt(lease, keys, parts), deadline_s)

    def renew(
        self, match: Match, *, lease_s: float = 30.0, deadline_s: float | None = None
    ) -> Outcome:
        """Extends a match's lease to `lease_s` from now: OK, EXPIRED, STALE_EPOCH, UNREACHABLE."""
        return self._client.run(self.core.renew(match, lease_s), deadline_s)

    def pull(
        self,
        match: Match,
        into: object,
        *,
        part: str | None = None,
        layers: Sequence[str] | None = None,
        tokens: tuple[int, int] | None = None,
        verify: bool = True,
        deadline_s: float | None = None,
    ) -> Pull:
        """Copies matched KV into `into`: one buffer for all chunks, or a list with one buffer, or
        one list of plane buffers, per chunk.

        `layers` picks planes by name, `tokens` a range of the prompt (it may begin and end inside
        chunks; the pieces of a plane are packed run by run). Outcomes say chunk by chunk what was
        delivered; a chunk that is not HIT has undefined bytes. Raises `InvalidError` only.
        """
        steps = self.core.pull(match, into, part=part, layers=layers, tokens=tokens, verify=verify)
        return self._client.run(steps, deadline_s)

    def borrow(
        self, match: Match, *, part: str | None = None, deadline_s: float | None = None
    ) -> Borrow:
        """Read-only views of the payloads in the store's memory, valid until `match.release()`.

        Not verified, not copied, and not usable in a fork child.
        """
        return self._client.run(self.core.borrow(match, part), deadline_s)

    def publish(
        self,
        prompt: Prompt,
        payloads: Sequence[object],
        *,
        first: int = 0,
        extras: Sequence[Extra] | None = None,
        part: str | None = None,
        checksum: bool = True,
        deadline_s: float | None = None,
    ) -> Publish:
        """Stores `payloads` as chunks first, first + 1, … of `prompt`; visible when it returns.

        A payload is one buffer of a chunk's planes, or a list of plane buffers; it may be reused
        afterwards. Never raises because of the store.
        """
        steps = publish(
            self.core,
            prompt,
            payloads,
            first=first,
            extras=extras,
            part=part,
            checksum=checksum,
        )
        return self._client.run(steps, deadline_s)

    def publication(
        self,
        prompt: Prompt,
        *,
        first: int = 0,
        count: int | None = None,
        extras: Sequence[Extra] | None = None,
        part: str | None = None,
        checksum: bool = True,
        lease_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Publication:
        """Room for chunks [first, first + count) (None: all full chunks), to be filled while
        prefill goes on. Raises `UnreachableError` if the store is away, `InvalidError`.
        """
        return Publication(self, prompt, first, count, extras, part, checksum, lease_s, deadline_s)

    def hint(
        self,
        prompt: Prompt,
        *,
        will_continue: float | bool | None = None,
        gap_s: float | None = None,
        ttl_s: float = 0.0,
        ended: bool = False,
        stop_reason: str = "",
        priority: int = 0,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> bool:
        """Tells the future of a chain, one-way; False if the store is away."""
        fields = hint_fields(will_continue, gap_s, ttl_s, ended, stop_reason, priority)
        return self._client.run(self.core.hint(prompt, extras, fields), deadline_s)

    def pin(
        self,
        prompt: Prompt,
        *,
        ttl_s: float = 0.0,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        """Keeps the stored prefix from eviction (0: until unpinned). HIT per pinned chunk."""
        return self._client.run(self.core.pin(prompt, extras, ttl_s, False), deadline_s)

    def unpin(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        """Ends the pin of this very chain: OK or MISS."""
        return self._client.run(self.core.pin(prompt, extras, 0.0, True), deadline_s)[0]

    def delete(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        """Deletes the chunks of `prompt` (pass keys for some of them): OK or MISS each."""
        return self._client.run(self.core.delete(prompt, extras), deadline_s)

    def clear(self, *, deadline_s: float | None = None) -> int:
        """Deletes every chunk of this namespace; how many there were."""
        return self._client.run(self._client.core.clear(self.core.id), deadline_s)

    def explain(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Explanation]:
        """Chunk by chunk: where it is and what holds it, or why it is missing."""
        return self._client.run(self.core.explain(prompt, extras), deadline_s)

    def payload(self, chunks: int, part: str | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """An uninitialised (chunks, payload bytes) array that fits `pull` and `publish`."""
        number = self.namespace.part_mask((part,)).bit_length() - 1 if part else 0
        return np.empty((chunks, self.namespace.parts[number].nbytes), np.uint8)

    def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        return self._client.run(steps, deadline_s)


class Publication:
    """Chunks being published while they are computed. Leaving `with` aborts what is not committed.

    ``outcomes`` has one entry per chunk: 255 while it is open, else as in `Publish`.
    """

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        first: int,
        count: int | None,
        extras: Sequence[Extra] | None,
        part: str | None,
        checksum: bool,
        lease_s: float,
        deadline_s: float | None,
    ) -> None:
        self._session = session
        self._deadline_s = deadline_s
        steps = open_publication(
            session.core, prompt, first, count, extras, part, checksum, lease_s
        )
        self.state: Publishing = session.run(steps, deadline_s)

    @property
    def outcomes(self) -> Outcomes:
        return self.state.outcomes

    def wants(self, chunk: int) -> bool:
        """Whether chunk `chunk` (0 is `first`) still needs bytes from us."""
        return self.state.wants(chunk)

    def write(self, chunk: int, payload: object) -> None:
        """A whole chunk: one buffer, or a list of plane buffers."""
        fill = partial(self.state.fill, chunk, payload)
        self._session.run(self.state.bulk(fill), self._deadline_s)

    def write_layer(self, chunk: int, layer: str, buffer: object) -> None:
        """One plane of a chunk, by name; the last one completes the chunk."""
        fill = partial(self.state.fill_layer, chunk, layer, buffer)
        self._session.run(self.state.bulk(fill), self._deadline_s)

    def commit(self) -> Outcomes:
        """Makes all complete chunks visible; outcomes of all chunks."""
        return self._session.run(self.state.commit(), self._deadline_s)

    def abort(self) -> None:
        """Gives back what is not committed."""
        self.state.abort()

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def hint_fields(
    will_continue: float | bool | None = None,
    gap_s: float | None = None,
    ttl_s: float = 0.0,
    ended: bool = False,
    stop_reason: str = "",
    priority: int = 0,
) -> dict[str, Any]:
    """The members of a Hint message; what is unknown is negative, zero or empty there."""
    return {
        "will_continue": -1.0 if will_continue is None else float(will_continue),
        "gap_s": -1.0 if gap_s is None else gap_s,
        "ttl_ms": int(ttl_s * 1000),
        "ended": ended,
        "stop_reason": stop_reason,
        "priority": priority,
    }
