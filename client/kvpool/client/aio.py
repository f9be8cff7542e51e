"""The same client for asyncio: `connect_async()` → `AsyncClient` → `AsyncSession`.

Operations and results are those of the blocking API (`kvpool.client.api`), whose docstrings hold
here too. There is no hidden loop or thread: calls are frames on the running loop, and copies of
`INLINE_BYTES` or more run in the loop's default executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, TypeVar

from kvpool.client.aio_sessions import AsyncSession
from kvpool.client.api import GIB, check_address
from kvpool.client.awaiting import AwaitingLink, dialler
from kvpool.client.connection import Route
from kvpool.client.core import DEADLINE_S, ClientCore
from kvpool.client.effects import Steps
from kvpool.client.local import LocalStore
from kvpool.client.pacing import end_after
from kvpool.proto.errors import InvalidError
from kvpool.proto.namespace import Namespace

T = TypeVar("T")

LOOK_S = 0.001
"""Between two looks whether copies have ended."""


def connect_async(
    address: str | LocalStore | None = None,
    *,
    token: str = "",
    name: str = "",
    deadline_s: float = DEADLINE_S,
    capacity: int = GIB,
) -> AsyncClient:
    """As `kvpool.client.connect`, for the loop in which it is first used."""
    own = LocalStore(capacity) if address is None else None
    where = own or check_address(address)
    core = ClientCore(
        token=token, name=name, store=where if isinstance(where, LocalStore) else None
    )
    return AsyncClient(core, AwaitingLink(dialler(where)), deadline_s, own)


class AsyncClient:
    """See `kvpool.client.Client`. For the tasks of one event loop."""

    def __init__(
        self, core: ClientCore, link: AwaitingLink, deadline_s: float, own: LocalStore | None
    ) -> None:
        self.core = core
        self.deadline_s = deadline_s
        self._link = link
        self._own = own

    async def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        if self.core.closed:
            steps.close()
            raise InvalidError("the client is closed")
        end = end_after(self.deadline_s if deadline_s is None else deadline_s)
        return await self._link.run(steps, end)

    async def open(self, namespace: Namespace, *, deadline_s: float | None = None) -> AsyncSession:
        session = AsyncSession(self, namespace)
        await self.run(session.core.join(), deadline_s)
        return session

    async def ping(self, *, deadline_s: float | None = None) -> float:
        return await self.run(self.core.ping(), deadline_s)

    async def route(self, *, deadline_s: float | None = None) -> Route:
        return await self.run(self.core.route(), deadline_s)

    async def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        return await self.run(self.core.status(), deadline_s)

    async def keys(
        self, *, page: int = 1000, deadline_s: float | None = None
    ) -> AsyncIterator[bytes]:
        cursor = 0
        while True:
            keys, cursor = await self.run(self.core.keys(page, cursor), deadline_s)
            for key in keys:
                yield key
            if not cursor:
                return

    async def clear(self, *, deadline_s: float | None = None) -> int:
        return await self.run(self.core.clear(), deadline_s)

    async def close(self, *, deadline_s: float | None = None) -> None:
        end = end_after(self.deadline_s if deadline_s is None else deadline_s)
        while self.core.copies and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        self.core.close(time.monotonic())
        if self._own is not None:
            self._own.close()
        await asyncio.sleep(0)  # lets the loop close the socket

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
