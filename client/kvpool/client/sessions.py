"""The blocking API's session: match, pull and publish in one namespace."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

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
    from kvpool.client.api import Client

T = TypeVar("T")


class Session:
    """Match, pull and publish in one namespace. Thread-safe. Made by `Client.open`.

    A prompt is its token ids; where the key scheme is foreign, a list of page hashes, one per
    chunk; or packed keys (n x 32 bytes). Match, pull and publish never raise because of the store:
    what it could not do is an outcome, so that an engine simply goes on without it. The other verbs
    raise `UnreachableError`. Every `deadline_s` (None: the client's) bounds the whole call, in
    seconds.
    """

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

    def keys(self, prompt: Prompt, extras: Sequence[Extra] | None = None) -> bytes:
        """Packed keys (n x 32 bytes) of the full chunks of `prompt`; hashes only what is new.

        `extras` are what tokens do not show: images, prompt embeddings. Raises `UnreachableError`
        until the store was reached once: it says which tenant we are.
        """
        return self.core.keys(prompt, extras)

    def match(
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
        """The longest stored prefix of `prompt`, under a lease of `lease_s` (0: the store's).

        `parts` are those that must be there (None: all). `peek` only looks: no lease, not a use.
        `prefill_tokens_s` is what you compute in a second: chunks that would take longer to load
        from an SSD are no part of the match. 0: whatever is stored is; `LEARNED`: what the store
        has learned from publishes decides, if it has learned anything.
        Raises `InvalidError` and `NamespaceError` for what can never be right.
        """
        steps = matching.match(self.core, prompt, extras, parts, lease_s, peek, prefill_tokens_s)
        return self._client.run(steps, deadline_s)

    def prefetch(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        wait: bool = False,
        deadline_s: float | None = None,
    ) -> int:
        """Has the stored prefix of `prompt` brought from the store's SSD into its memory.

        One-way, unless `wait`: then it returns when it is there. Gives the chunks that are stored;
        after waiting, those in memory. Raises `UnreachableError` if that cannot be waited for.
        """
        match = self.match(prompt, extras=extras, deadline_s=deadline_s)
        steps = loading.prefetch(match, wait=wait)
        return self._client.run(steps, deadline_s)

    def adopt(
        self,
        lease: bytes,
        keys: bytes,
        *,
        parts: tuple[str, ...] | None = None,
        deadline_s: float | None = None,
    ) -> Match:
        """Joins the holders of another session's lease: `match.lease` and `match.keys` of there.

        Raises `InvalidError` if there are fewer keys than chunks.
        """
        return self._client.run(matching.adopt(self.core, lease, keys, parts), deadline_s)

    def renew(
        self, match: Match, *, lease_s: float = 30.0, deadline_s: float | None = None
    ) -> Outcome:
        """Extends a match's lease to `lease_s` from now: OK, EXPIRED, STALE_EPOCH, UNREACHABLE."""
        return self._client.run(matching.renew(match, lease_s), deadline_s)

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

        `layers` picks planes by name, in the order given; `tokens` is a range of the prompt, which
        may begin and end inside chunks (the pieces of a plane are packed run by run). Outcomes say
        chunk by chunk what was delivered; a chunk that is not HIT has undefined bytes. Without
        `verify` checksums are not compared. Raises `InvalidError` for buffers of a wrong size,
        before any byte moves, and `NamespaceError` for a layer or part that does not exist.
        """
        wanted = pulling.Wanted(part, layers, tokens, verify)
        return self._client.run(pulling.pull(match, self.namespace, into, wanted), deadline_s)

    def borrow(
        self, match: Match, *, part: str | None = None, deadline_s: float | None = None
    ) -> Borrow:
        """Read-only views of the payloads in the store's memory, valid until `match.release()`.

        Not verified, not copied, and not usable in a fork child. Raises `InvalidError` where the
        memory may not be mapped.
        """
        return self._client.run(borrowing.borrow(match, self.namespace, part), deadline_s)

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
        afterwards. Raises `InvalidError` for payloads of a wrong size or number, before anything
        is reserved.
        """
        scope = Scope(prompt, first, len(payloads), extras, part, checksum)
        return self._client.run(publish(self.core, payloads, scope), deadline_s)

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
        """Room for chunks [first, first + count) (None: all full chunks), to be filled within
        `lease_s` (0: the store's) while prefill goes on.

        Raises `UnreachableError` if the store is away, `BusyError` if it takes nobody, and
        `InvalidError`.
        """
        scope = Scope(prompt, first, count, extras, part, checksum, lease_s)
        state = self._client.run(open_publication(self.core, scope), deadline_s)
        return Publication(self, state, deadline_s)

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
        """Tells the future of a chain, one-way; False if the store is away.

        `will_continue` is the probability that the session goes on, or yes or no; `stop_reason`,
        the engine's word for why the answer ended, stands for one. `gap_s` are the expected seconds
        to the next use. After `ttl_s` the chain goes first, unless it was used in between. Wrong
        hints cost little: the store compares what they are worth with plain order of use.
        """
        future = verbs.future_of(will_continue, gap_s, ttl_s, ended, stop_reason, priority)
        return self._client.run(verbs.hint(self.core, prompt, extras, future), deadline_s)

    def pin(
        self,
        prompt: Prompt,
        *,
        ttl_s: float = 0.0,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        """Keeps the stored prefix from eviction for `ttl_s` seconds (0: until unpinned).

        HIT per pinned chunk, MISS for the rest. Each call is a claim of its own, to be unpinned
        once. Raises `BusyError` with figures if more would be pinned than may be.
        """
        return self._client.run(verbs.pin(self.core, prompt, extras, ttl_s), deadline_s)

    def unpin(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> Outcome:
        """Takes one claim on this very chain back, the one that ends first: OK or MISS."""
        return self._client.run(verbs.unpin(self.core, prompt, extras), deadline_s)

    def delete(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Outcome]:
        """Deletes the chunks of `prompt` (pass keys for some of them): OK or MISS each."""
        return self._client.run(verbs.delete(self.core, prompt, extras), deadline_s)

    def clear(self, *, deadline_s: float | None = None) -> int:
        """Deletes every chunk of this namespace; how many there were."""
        return self._client.run(verbs.clear(self.core), deadline_s)

    def explain(
        self,
        prompt: Prompt,
        *,
        extras: Sequence[Extra] | None = None,
        deadline_s: float | None = None,
    ) -> list[Explanation]:
        """Chunk by chunk: where it is and what holds it, or why it is missing."""
        return self._client.run(verbs.explain(self.core, prompt, extras), deadline_s)

    def payload(self, chunks: int, part: str | None = None) -> Bytes:
        """An uninitialised (chunks, payload bytes) array that fits `pull` and `publish`, and lies
        where copies are fast: see `kvpool.transfer.copying.empty`."""
        return self.core.payload(chunks, part)

    def run(self, steps: Steps[T], deadline_s: float | None) -> T:
        return self._client.run(steps, deadline_s)


class Publication:
    """Chunks being published while they are computed. Thread-safe. Made by `Session.publication`.

    ``outcomes`` has one entry per chunk: 255 while it is open, else as in `Publish`. Leaving
    ``with`` aborts what is not committed. If the connection is lost, what is open has become
    STALE_EPOCH and further writes are ignored.
    """

    def __init__(self, session: Session, state: Publishing, deadline_s: float | None) -> None:
        self.state = state
        self._session = session
        self._deadline_s = deadline_s

    @property
    def outcomes(self) -> Outcomes:
        return self.state.outcomes

    def wants(self, chunk: int) -> bool:
        """Whether chunk `chunk` (0 is `first`) still needs bytes from us."""
        return self.state.wants(chunk)

    def write(self, chunk: int, payload: object) -> None:
        """A whole chunk: one buffer, or a list of plane buffers. Raises `InvalidError`."""
        self._session.run(self.state.write(chunk, payload), self._deadline_s)

    def write_layer(self, chunk: int, layer: str, buffer: object) -> None:
        """One plane of a chunk, by name; the last one completes the chunk.

        Raises `InvalidError`, and `NamespaceError` for a layer that does not exist.
        """
        self._session.run(self.state.write_layer(chunk, layer, buffer), self._deadline_s)

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
