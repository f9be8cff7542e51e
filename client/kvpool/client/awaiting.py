"""The asyncio driver: operations run as part of a task, over frames on the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvpool.client.effects import Await, Call, Channel, Dial, Effect, Pause, Post, Steps, Work
from kvpool.client.keepalive import keep_alive
from kvpool.client.local import LocalChannel, LocalStore
from kvpool.client.pacing import PATIENCE_S, left, raise_error
from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto.errors import DeadlineError, InvalidError, KvpoolError, UnreachableError
from kvpool.transfer.sockets import UnixAddress, parse

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""A smaller copy (about 25 µs) is done on the loop: a thread hop costs as much."""
BUFFER_MAX = 1 << 20
"""Bytes that wait for a daemon that does not read; then what is not vital is dropped."""


class AsyncSocketChannel(asyncio.Protocol):
    """Frames on one loop; any number of requests at a time. `notify` may come from any thread."""

    def __init__(self, address: str) -> None:
        self.silent = False
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._session = protocol.ClientSession()
        self._decoder = frames.FrameDecoder()
        self._waiting: dict[int, asyncio.Future[Message | None]] = {}
        self._posted: dict[int, asyncio.Future[Message | None]] = {}
        self._pings: deque[asyncio.Future[Message | None]] = deque()
        self._transport: asyncio.Transport | None = None
        self._lost: KvpoolError | None = None

    @classmethod
    async def dial(cls, address: str, end: float) -> AsyncSocketChannel:
        """Raises `UnreachableError`."""
        target = parse(address)
        loop = asyncio.get_running_loop()

        def protocol_factory() -> AsyncSocketChannel:
            return cls(address)

        try:
            async with asyncio.timeout(left(end)):
                if isinstance(target, UnixAddress):
                    made = await loop.create_unix_connection(protocol_factory, target.path)
                else:
                    made = await loop.create_connection(protocol_factory, target.host, target.port)
        except TimeoutError:
            raise DeadlineError(f"{address} did not answer before the deadline") from None
        except OSError as error:
            raise UnreachableError(f"cannot connect to {address}: {error}") from error
        return made[1]

    # ---- the loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.silent = False
        try:
            for body in self._decoder.feed(data):
                self._accept(body)
        except KvpoolError as error:
            self._lose(error)  # not closed, because somebody may be copying

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(UnreachableError(f"the connection was lost: {exc or 'closed by the daemon'}"))

    def _accept(self, body: bytes) -> None:
        if not body:
            if self._pings:
                _resolve(self._pings.popleft(), None)
            return
        request_id, message, _ = self._session.receive(body)
        future = self._waiting.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(message)
        else:
            self._release_orphan(message)

    def _release_orphan(self, message: Message | None) -> None:
        if message is not None and (orphan := protocol.orphan_release(message)):
            self.notify(orphan)

    def _lose(self, error: KvpoolError) -> None:
        self._lost = self._lost or error
        waiting, self._waiting = [*self._waiting.values(), *self._pings], {}
        self._pings.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    # ---- the client's side

    @property
    def alive(self) -> bool:
        return self._lost is None

    async def call(self, body: Message | None, end: float) -> Message | None:
        if body is not None:
            return await self.wait(self.post(body, end), end)
        self._check_connected()
        future: asyncio.Future[Message | None] = self._loop.create_future()
        self._pings.append(future)
        self._write(frames.PING)
        return await self._awaited(future, end)

    def post(self, body: Message, end: float) -> int:
        left(end)
        self._check_connected()
        request_id, frame = self._session.request(body)
        self._waiting[request_id] = self._posted[request_id] = self._loop.create_future()
        self._write(frame)
        return request_id

    async def wait(self, ticket: int, end: float) -> Message | None:
        future = self._posted.pop(ticket)
        try:
            return await self._awaited(future, end)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self._release_orphan(future.result())  # it came in the very same moment
            raise
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._session.abandon(ticket)

    async def _awaited(self, future: asyncio.Future[Message | None], end: float) -> Message | None:
        if future.done():
            return future.result()
        if self.silent:
            end = min(end, time.monotonic() + PATIENCE_S)
        timer = self._loop.call_later(left(end), self._late, future)
        try:
            return await future
        finally:
            timer.cancel()

    def _check_connected(self) -> None:
        if self._lost is not None or self._transport is None:
            raise UnreachableError(f"not connected to {self._address}")

    def drop(self, ticket: int) -> None:
        self._in_loop(lambda: self._forgo(ticket))

    def _forgo(self, ticket: int) -> None:
        future = self._posted.pop(ticket, None)
        self._waiting.pop(ticket, None)
        self._session.abandon(ticket)
        if future is not None and not future.cancel() and not future.exception():
            self._release_orphan(future.result())

    def _late(self, future: asyncio.Future[Message | None]) -> None:
        if not future.done():
            self.silent = True
            text = f"{self._address} did not answer before the deadline"
            future.set_exception(DeadlineError(text))

    def notify(self, body: Message, *, vital: bool = True) -> bool:
        transport = self._transport
        if self._lost is not None or transport is None:
            return False
        if not vital and transport.get_write_buffer_size() > BUFFER_MAX:
            return False
        frame = protocol.request_frame(0, body)
        self._in_loop(lambda: self._write(frame))
        return True

    def _write(self, frame: bytes) -> None:
        if self._lost is None and self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        self._lost = self._lost or UnreachableError("the connection is closed")
        self._in_loop(self._abort)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _in_loop(self, function: Callable[[], None]) -> None:
        """A finaliser may call in any thread, and after the loop has ended."""
        if asyncio._get_running_loop() is self._loop:
            function()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def forget(self) -> None:
        self._lost = UnreachableError("it was opened before fork()")
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is not None and sock.fileno() >= 0:
            # The loop's selector is shared with the parent, so it must not hear of this.
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(null, sock.fileno(), inheritable=False)
            os.close(null)


class AsyncLocalChannel(LocalChannel):
    """The embedded store under asyncio: its answers are immediate."""

    async def call(self, body: Message | None, end: float) -> Message | None:
        return self._answer(body, end)

    async def wait(self, ticket: int, end: float) -> Message | None:
        return self._kept.pop(ticket)


class AwaitingLink:
    """Runs operations in tasks of one loop."""

    def __init__(self, dial: Callable[[float], Awaitable[Channel]]) -> None:
        """`dial(end)` opens a channel before `end` on the monotonic clock."""
        self._dial = dial
        self._exclusive = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, steps: Steps[T], end: float) -> T:
        """Runs `steps`; a cancellation reaches them only when no copy is running any more.

        Raises `InvalidError` in another loop than the first.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            steps.close()
            raise InvalidError("this client belongs to another event loop; connect anew in this")
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

    async def _perform(self, effect: Effect, end: float) -> Any:
        if isinstance(effect, Call):
            return raise_error(await effect.channel.call(effect.body, end))
        if isinstance(effect, Post):
            return effect.channel.post(effect.body, end)
        if isinstance(effect, Await):
            return raise_error(await effect.channel.wait(effect.ticket, end))
        if isinstance(effect, Work):
            return await work(effect, end)
        if isinstance(effect, Dial):
            return await self._dial(end)
        if isinstance(effect, Pause):
            return await asyncio.sleep(min(effect.seconds, left(end)))
        end = min(end, time.monotonic() + effect.seconds)
        try:
            async with asyncio.timeout(left(end)):
                await self._exclusive.acquire()
        except TimeoutError:
            raise DeadlineError("another task did not connect before the deadline") from None
        try:
            return await self.run(effect.steps(), end)
        finally:
            self._exclusive.release()


async def work(effect: Work, end: float) -> Any:
    """Runs a blocking function; if cancelled, waits for it to end first: it may hold extents."""
    if 0 < effect.nbytes < INLINE_BYTES:
        return effect.function(end)
    task = asyncio.ensure_future(asyncio.to_thread(effect.function, end))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody else will ask for it
        raise


def _resolve(future: asyncio.Future[Message | None], message: Message | None) -> None:
    if not future.done():
        future.set_result(message)


def dialler(address: str | LocalStore) -> Callable[[float], Awaitable[Channel]]:
    """What opens channels to `address`."""

    async def dial(end: float) -> Channel:
        if isinstance(address, LocalStore):
            return address.open_channel(AsyncLocalChannel)
        return await AsyncSocketChannel.dial(address, end)

    return dial
