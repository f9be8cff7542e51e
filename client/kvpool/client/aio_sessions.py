"""The asyncio API's session; the docstrings of `kvpool.client.sessions` hold here too."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvpool.client import borrowing, loading, matching, pulling, verbs
from kvpool.client.borrowing import Borrow
from kvpool.client.effects import Steps
from kvpool.client.publication import Publishing, Scope
from kvpool.client.publishing import open_publication, publish
from kvpool.client.results import Explanation, Match, Outcomes, Publish, Pull
from kvpool.client.session import Prompt, SessionCore
from kvpool.proto.keys import Extra
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

if TYPE_CHECKING:
    from kvpool.client.aio import AsyncClient

T = TypeVar("T")


class AsyncSession:
    """See `kvpool.client.Session`."""

    def __init__(self, client: AsyncClient, namespace: Namespace) -> None:
        self.core = SessionCore(client.core, namespace)
        self._client = client

    @property
    def namespace(self) -> Namespace:
        return self.core.namespace

    @property
    def warning(self) -> str:
        return self.core.warning

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
        prefill_tokens_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> Match:
        """The match is a plain context manager: releasing it needs no await."""
        steps = matching.match(self.core, prompt, extras, parts, lease_s, peek, prefill_tokens_s)
        return await self._client.run(steps, deadline_s)

    async def prefetch(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        wait: bool = False,
        deadline_s: float | None = None,
    ) -> int:
        match = await self.match(prompt, extras=extras, deadline_s=deadline_s)
        steps = loading.prefetch(match, wait=wait)
        return await self._client.run(steps, deadline_s)

    async def adopt(
        self,
        lease: bytes,
        keys: bytes,
        *,
        parts: tuple[str, ...] | None = None,
        deadline_s: float | None = None,
    ) -> Match:
        return await self._client.run(matching.adopt(self.core, lease, keys, parts), deadline_s)

    async def renew(
        self, match: Match, *, lease_s: float = 30.0, deadline_s: float | None = None
    ) -> Outcome:
        return await self._client.run(matching.renew(match, lease_s), deadline_s)

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
        wanted = pulling.Wanted(part, layers, tokens, verify)
        steps = pulling.pull(match, self.namespace, into, wanted)
        return await self._client.run(steps, deadline_s)

    async def borrow(
        self, match: Match, *, part: str | None = None, deadline_s: float | None = None
    ) -> Borrow:
        return await self._client.run(borrowing.borrow(match, self.namespace, part), deadline_s)

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
        scope = Scope(prompt, first, len(payloads), extras, part, checksum)
        return await self._client.run(publish(self.core, payloads, scope), deadline_s)

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
        scope = Scope(prompt, first, count, extras, part, checksum, lease_s)
        state = await self._client.run(open_publication(self.core, scope), deadline_s)
        return AsyncPublication(self, state, deadline_s)

    async def hint(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
        **future: Any,
    ) -> bool:
        """`future` as the keywords of `Session.hint`."""
        steps = verbs.hint(self.core, prompt, extras, verbs.future_of(**future))
        return await self._client.run(steps, deadline_s)

    async def pin(
        self,
        prompt: Prompt,
        *,
        ttl_s: float = 0.0,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        return await self._client.run(verbs.pin(self.core, prompt, extras, ttl_s), deadline_s)

    async def unpin(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        return await self._client.run(verbs.unpin(self.core, prompt, extras), deadline_s)

    async def delete(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        return await self._client.run(verbs.delete(self.core, prompt, extras), deadline_s)

    async def clear(self, *, deadline_s: float | None = None) -> int:
        return await self._client.run(verbs.clear(self.core), deadline_s)

    async def explain(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Explanation]:
        return await self._client.run(verbs.explain(self.core, prompt, extras), deadline_s)

    def payload(self, chunks: int, part: str | None = None) -> Bytes:
        return self.core.payload(chunks, part)

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
        await self._session.run(self.state.write(chunk, payload), self._deadline_s)

    async def write_layer(self, chunk: int, layer: str, buffer: object) -> None:
        steps = self.state.write_layer(chunk, layer, buffer)
        await self._session.run(steps, self._deadline_s)

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
