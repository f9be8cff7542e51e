"""The same client for asyncio: `connect_async()` → `AsyncClient` → `AsyncSession`.

Operations and results are those of the blocking API (`kvpool.client.api`), whose docstrings hold
here too. There is no hidden loop or thread: calls are frames on the running loop, and copies above
`INLINE_BYTES` run in the loop's default executor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from kvpool.client.api import GIB, hint_fields
from kvpool.client.core import DEADLINE_S, ClientCore, Prompt, SessionCore
from kvpool.client.effects import Call, Dial, Exclusive, Steps, Work
from kvpool.client.link import Backoff, raise_error
from kvpool.client.local import LocalCarrier, LocalStore
from kvpool.client.publication import Publishing, open_publication, publish
from kvpool.client.results import Borrow, Explanation, Match, Outcomes, Publish, Pull
from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto.errors import DeadlineError, KvpoolError, UnreachableError
from kvpool.proto.keys import Extra
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.sockets import UnixAddress, parse

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""A smaller copy (about 25 µs) is done on the loop: a thread hop costs as much."""


class _Wire(asyncio.Protocol):
    """Frames on a loop; responses wake whoever waits for their id."""

    def __init__(self) -> None:
        self.session = protocol.ClientSession()
        self.waiting: dict[int, asyncio.Future[Message]] = {}
        self.transport: asyncio.Transport | None = None
        self._decoder = frames.FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._decoder.feed(data):
                self._accept(body)
        except KvpoolError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(UnreachableError(f"the connection was lost: {exc or 'closed by the daemon'}"))

    def _accept(self, body: bytes) -> None:
        if not body:
            return
        request_id, message, wanted = self.session.receive(body)
        future = self.waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(message)
        elif not wanted and (orphan := protocol.orphan_release(message)):
            self.send(protocol.request_frame(0, orphan))

    def _fail(self, error: KvpoolError) -> None:
        transport, self.transport = self.transport, None
        waiting, self.waiting = self.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)
        if transport is not None:
            transport.close()

    def send(self, frame: bytes) -> None:
        if self.transport is None:
            raise UnreachableError("not connected")
        self.transport.write(frame)

    def close(self) -> None:
        self._fail(UnreachableError("closed"))


class AsyncCarrier(Protocol):
    """As `kvpool.client.link.Carrier`, awaiting; `end` is on the monotonic clock."""

    @property
    def alive(self) -> bool: ...
    async def dial(self, end: float) -> None: ...
    async def call(self, body: Message, end: float) -> Message: ...
    def notify(self, body: Message) -> None: ...
    def close(self) -> None: ...


class AsyncSocketCarrier:
    """Frames over the running loop; any number of requests at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._wire: _Wire | None = None
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        wire = self._wire
        return wire is not None and wire.transport is not None and self._pid == os.getpid()

    async def dial(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        target = parse(self._address)
        self.close()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                if isinstance(target, UnixAddress):
                    _, self._wire = await loop.create_unix_connection(_Wire, target.path)
                else:
                    _, self._wire = await loop.create_connection(_Wire, target.host, target.port)
        except (OSError, TimeoutError) as error:
            raise UnreachableError(f"cannot connect to {self._address}: {error}") from error
        self._pid = os.getpid()

    async def call(self, body: Message, end: float) -> Message:
        wire = self._wire
        if wire is None or not self.alive:
            raise UnreachableError(f"not connected to {self._address}")
        request_id, frame = wire.session.request(body)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        wire.waiting[request_id] = future
        try:
            wire.send(frame)
            async with asyncio.timeout(end - time.monotonic()):
                return await future
        except TimeoutError:
            raise DeadlineError(f"{self._address} did not answer before the deadline") from None
        finally:
            if wire.waiting.pop(request_id, None) is not None:
                wire.session.abandon(request_id)

    def notify(self, body: Message) -> None:
        if self.alive and self._wire is not None:
            self._wire.send(protocol.request_frame(0, body))

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class AsyncLocalCarrier:
    """The embedded store under asyncio: its answers are immediate."""

    def __init__(self, store: LocalStore) -> None:
        self._carrier = LocalCarrier(store)

    @property
    def alive(self) -> bool:
        return self._carrier.alive

    async def dial(self, end: float) -> None:
        self._carrier.dial(end)

    async def call(self, body: Message, end: float) -> Message:
        return self._carrier.call(body, end)

    def notify(self, body: Message) -> None:
        self._carrier.notify(body)

    def close(self) -> None:
        self._carrier.close()


class AwaitingLink:
    """Runs operations on the running loop, for the tasks of that loop."""

    def __init__(self, carrier: AsyncCarrier) -> None:
        self._carrier = carrier
        self._backoff = Backoff()
        self._exclusive = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self._carrier.alive

    async def run(self, steps: Steps[T], deadline: float) -> T:
        """Runs `steps`; a cancellation reaches them only when no copy is running any more."""
        end = time.monotonic() + deadline
        try:
            effect = next(steps)
            while True:
                try:
                    result = await self._perform(effect, end)
                except BaseException as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _perform(self, effect: Any, end: float) -> Any:
        if isinstance(effect, Call):
            return raise_error(await self._carrier.call(effect.body, end))
        if isinstance(effect, Work):
            return await work(effect)
        if isinstance(effect, Dial):
            return await self._dial(end)
        assert isinstance(effect, Exclusive)
        async with self._exclusive:
            return await self.run(effect.steps(), end - time.monotonic())

    async def _dial(self, end: float) -> None:
        self._backoff.check()
        try:
            await self._carrier.dial(end)
        except UnreachableError as error:
            self._backoff.failed(error)
            raise
        self._backoff.succeeded()

    def notify(self, body: Message) -> None:
        """One-way, best effort."""
        if self._carrier.alive:
            self._carrier.notify(body)

    def close(self) -> None:
        self._carrier.close()


async def work(effect: Work) -> Any:
    """Runs a blocking function; if cancelled, waits for it to end first: it may hold extents."""
    if effect.nbytes and effect.nbytes < INLINE_BYTES:
        return effect.function()
    task = asyncio.ensure_future(asyncio.to_thread(effect.function))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        raise


def connect_async(
    address: str | LocalStore | None = None,
    *,
    token: str = "",
    name: str = "",
    deadline_s: float = DEADLINE_S,
    capacity: int = GIB,
) -> AsyncClient:
    """As `kvpool.client.connect`, for the running loop."""
    if address is None:
        address = LocalStore(capacity)
    if isinstance(address, LocalStore):
        link = AwaitingLink(AsyncLocalCarrier(address))
        core = ClientCore(link, token=token, name=name, local_regions=address.regions)
    else:
        parse(address)
        link = AwaitingLink(AsyncSocketCarrier(address))
        core = ClientCore(link, token=token, name=name)
    return AsyncClient(core, link, deadline_s)


class AsyncClient:
    """See `kvpool.client.Client`."""

    def __init__(self, core: ClientCore, link: AwaitingLink, deadline_s: float) -> None:
        self.core = core
        self.deadline_s = deadline_s
        self._link = link

    async def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        return await self._link.run(steps, self.deadline_s if deadline_s is None else deadline_s)

    async def open(self, namespace: Namespace, *, deadline_s: float | None = None) -> AsyncSession:
        session = AsyncSession(self, namespace)
        await self.run(session.core.join(), deadline_s)
        return session

    async def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        return await self.run(self.core.status(), deadline_s)

    async def keys(
        self, *, page: int = 1000, deadline_s: float | None = None
    ) -> AsyncIterator[bytes]:
        cursor = 0
        while True:
            keys, cursor = await self.run(self.core.keys(0, page, cursor), deadline_s)
            for key in keys:
                yield key
            if not cursor:
                return

    async def clear(self, *, deadline_s: float | None = None) -> int:
        return await self.run(self.core.clear(0), deadline_s)

    async def close(self) -> None:
        self.core.check_idle()
        self._link.close()
        if self.core.data is not None:
            self.core.data.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncSession:
    """See `kvpool.client.Session`."""

    def __init__(self, client: AsyncClient, namespace: Namespace) -> None:
        self.core = SessionCore(client.core, namespace)
        self._client = client

    @property
    def namespace(self) -> Namespace:
        return self.core.namespace

    def keys(self, tokens: Prompt, extras: Sequence[Extra] | None = None) -> bytes:
        return self.core.keys(tokens, extras)

    async def match(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        parts: tuple[str, ...] | None = None,
        lease_s: float = 0.0,
        peek: bool = False,
        deadline_s: float | None = None,
    ) -> Match:
        """The match is a plain context manager: releasing it needs no await."""
        steps = self.core.match(prompt, extras, parts, lease_s, peek)
        return await self._client.run(steps, deadline_s)

    async def adopt(
        self,
        lease: bytes,
        keys: bytes,
        *,
        parts: tuple[str, ...] | None = None,
        deadline_s: float | None = None,
    ) -> Match:
        return await self._client.run(self.core.adopt(lease, keys, parts), deadline_s)

    async def renew(
        self, match: Match, *, lease_s: float = 30.0, deadline_s: float | None = None
    ) -> Outcome:
        return await self._client.run(self.core.renew(match, lease_s), deadline_s)

    async def pull(
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
        steps = self.core.pull(match, into, part=part, layers=layers, tokens=tokens, verify=verify)
        return await self._client.run(steps, deadline_s)

    async def borrow(
        self, match: Match, *, part: str | None = None, deadline_s: float | None = None
    ) -> Borrow:
        return await self._client.run(self.core.borrow(match, part), deadline_s)

    async def publish(
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
        """Payloads must not change before this returns."""
        steps = publish(
            self.core, prompt, payloads, first=first, extras=extras, part=part, checksum=checksum
        )
        return await self._client.run(steps, deadline_s)

    async def publication(
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
    ) -> AsyncPublication:
        steps = open_publication(self.core, prompt, first, count, extras, part, checksum, lease_s)
        return AsyncPublication(self, await self._client.run(steps, deadline_s), deadline_s)

    async def hint(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
        **future: Any,
    ) -> bool:
        """`future` as the keywords of `Session.hint`."""
        steps = self.core.hint(prompt, extras, hint_fields(**future))
        return await self._client.run(steps, deadline_s)

    async def pin(
        self,
        prompt: Prompt,
        *,
        ttl_s: float = 0.0,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        return await self._client.run(self.core.pin(prompt, extras, ttl_s, False), deadline_s)

    async def unpin(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        return (await self._client.run(self.core.pin(prompt, extras, 0.0, True), deadline_s))[0]

    async def delete(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        return await self._client.run(self.core.delete(prompt, extras), deadline_s)

    async def clear(self, *, deadline_s: float | None = None) -> int:
        return await self._client.run(self._client.core.clear(self.core.id), deadline_s)

    async def explain(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Explanation]:
        return await self._client.run(self.core.explain(prompt, extras), deadline_s)

    async def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        return await self._client.run(steps, deadline_s)


class AsyncPublication:
    """See `kvpool.client.Publication`. Leaving ``with`` (plain) aborts what is not committed."""

    def __init__(self, session: AsyncSession, state: Publishing, deadline_s: float | None) -> None:
        self.state = state
        self._session = session
        self._deadline_s = deadline_s

    @property
    def outcomes(self) -> Outcomes:
        return self.state.outcomes

    def wants(self, chunk: int) -> bool:
        return self.state.wants(chunk)

    async def write(self, chunk: int, payload: object) -> None:
        fill = partial(self.state.fill, chunk, payload)
        await self._session.run(self.state.bulk(fill), self._deadline_s)

    async def write_layer(self, chunk: int, layer: str, buffer: object) -> None:
        fill = partial(self.state.fill_layer, chunk, layer, buffer)
        await self._session.run(self.state.bulk(fill), self._deadline_s)

    async def commit(self) -> Outcomes:
        return await self._session.run(self.state.commit(), self._deadline_s)

    def abort(self) -> None:
        self.state.abort()

    def __enter__(self) -> AsyncPublication:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()
