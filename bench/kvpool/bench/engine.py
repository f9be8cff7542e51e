"""How an engine embeds the store: the reference engine as a user of `kvpool.client`.

For every prompt an engine asks the store first (match), takes what is there (pull), computes the
rest and gives it away chunk by chunk while it goes on (publish), and says what it knows about the
future (hint). The store can only save time: whatever fails there, the engine computes.

The KV that this engine publishes is always computed in whole, aligned blocks. Hence who reuses it
gets the bits of a prefill of the whole prompt (see `kvpool.bench.llama`), and the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.bench.llama import Array, KvCache
from kvpool.bench.model import Model
from kvpool.client import Match, Namespace, Outcome, Session, portable
from kvpool.proto.errors import InvalidError

CHUNK_TOKENS = 64
"""The demo's chunks: small, because its conversation is short."""
_LANDING_CHUNKS = 4
"""Chunks that are pulled at once: enough to hide the calls, little enough for the CPU's cache."""


def namespace_for(model: Model, chunk_tokens: int = CHUNK_TOKENS) -> Namespace:
    """The identity of `model`'s KV: one part, float32, portable layout, one plane per layer."""
    config = model.llama.config
    part = portable(
        "all",
        layers=[f"layer.{number}" for number in range(config.layers)],
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        itemsize=np.dtype(np.float32).itemsize,
        tokens=chunk_tokens,
    )
    return Namespace(
        model=model.name,
        revision=model.revision,
        kv_dtype="float32",
        kv_scales="none",
        layout="portable",
        chunk_tokens=chunk_tokens,
        parts=(part,),
        key_scheme="tokens",
        adapter="none",
        rope=f"base={config.rope_base:g}",
        salt="none",
    )


def portable_view(cache: KvCache, chunk_tokens: int) -> Array:
    """`cache` with its axes in the portable order, without a copy: writing here writes there.

    (chunks, layers, kv_heads, 2, chunk_tokens, head_dim), so that `view[i]` is the payload of
    chunk i. REQUIRES: chunk_tokens divides `cache.max_tokens`.
    """
    layers, _, kv_heads, _, head_dim = cache.planes.shape
    cut = cache.planes.reshape(layers, 2, kv_heads, -1, chunk_tokens, head_dim)
    return cut.transpose(3, 0, 2, 1, 4, 5)


@dataclass(slots=True)
class Usage:
    """What the store did for one prompt."""

    matched: int = 0  # tokens whose KV was in the store
    pulled: int = 0  # tokens whose KV came from there into the engine's cache
    pulled_bytes: int = 0
    pull_s: float = 0.0  # checksums included
    published: int = 0  # chunks
    trouble: str = ""  # why the engine went on without the store; empty: it did not have to


class Engine:
    """A model with room for one sequence, and a session in the namespace of `namespace_for`.

    Keeps nothing from one prompt to the next: what it reuses, it reuses through the store. Not
    thread-safe.
    """

    def __init__(
        self,
        model: Model,
        session: Session | None = None,
        *,
        max_tokens: int = 4096,
        deadline_s: float = 1.0,
    ) -> None:
        """`session` None: everything is computed. `max_tokens`: of a prompt with its answer; pages
        are taken when they are written. `deadline_s`: how long a call waits for the store; after a
        first failure the engine leaves it alone until the next prompt.
        """
        self.model = model
        self.chunk_tokens = session.namespace.chunk_tokens if session else CHUNK_TOKENS
        if self.chunk_tokens % model.llama.block_tokens:
            raise InvalidError(
                f"block_tokens={model.llama.block_tokens} does not divide the "
                f"{self.chunk_tokens} tokens of a chunk"
            )
        self.usage = Usage()
        """Of the current prompt."""
        chunks = -(-max_tokens // self.chunk_tokens)
        self._cache = KvCache(model.llama.config, chunks * self.chunk_tokens)
        self._payloads = portable_view(self._cache, self.chunk_tokens)
        landing = (_LANDING_CHUNKS, *self._payloads.shape[1:])
        self._landing = np.full(landing, 0, np.float32)  # written, so that its pages are there
        self._session = session
        self._deadline_s = deadline_s
        self._tokens: list[int] = []  # the prompt and its answer
        self._stored = 0  # leading chunks that need not be published

    def prefill(self, tokens: Sequence[int]) -> Array:
        """Begin a new sequence; float32 logits (vocab,) of what comes after `tokens`.

        Takes what the store has and publishes the full chunks that it lacks, each as soon as it is
        computed.
        """
        self._begin(tokens)
        if self._session is None:
            return self._compute(len(tokens))
        with self._session.match(tokens, deadline_s=self._deadline_s) as match:
            # Under the lease nothing of the prefix is evicted, so that new chunks have a parent.
            self._pull(self._session, match, match.usable_prefix(len(tokens), self.chunk_tokens))
            return self._compute(len(tokens))

    def publish(self, tokens: Sequence[int]) -> None:
        """Bring all full chunks of `tokens` into the store, so that another engine may answer."""
        self._begin(tokens)
        whole = len(tokens) // self.chunk_tokens * self.chunk_tokens
        if self._session is None:
            return
        with self._session.match(tokens, deadline_s=self._deadline_s) as match:
            missing = match.tokens < whole
            self._pull(self._session, match, match.tokens if missing else 0)
            while missing and not self.usage.trouble:
                self._compute(self._cache.length + self.chunk_tokens)
                missing = self._cache.length < whole

    def generate(self, logits: Array, limit: int, stop: Collection[int] = ()) -> Iterator[int]:
        """Choose up to `limit` tokens greedily after the prefill that gave `logits`.

        Ends after a token of `stop`, which is yielded too.
        """
        for number in range(limit):
            if number:
                logits = self.model.llama.prefill(self._tokens[-1:], self._cache)
            token = int(logits.argmax())
            self._tokens.append(token)
            yield token
            if token in stop:
                return

    def end_turn(self, *, will_continue: bool) -> None:
        """Publish the chunks that the answer has completed, and hint at what comes next.

        The answer is out by now: this costs nobody time. Its KV was computed row by row, which
        equals a block only up to rounding, so its chunks are computed anew as blocks. An engine
        that can do without equal bits would publish what it has.
        """
        whole = len(self._tokens) // self.chunk_tokens
        if self._session is None or self.usage.trouble:
            return
        if self._stored < whole:
            self._cache.length = self._stored * self.chunk_tokens
            self._compute(whole * self.chunk_tokens)
        self._session.hint(
            self._tokens,
            will_continue=will_continue,
            ended=not will_continue,
            deadline_s=self._deadline_s,
        )

    def _begin(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self._cache.max_tokens:
            raise InvalidError(f"{len(tokens)} tokens exceed the cache's {self._cache.max_tokens}")
        self._tokens = list(tokens)
        self._cache.length = 0
        self._stored = 0
        self.usage = Usage()

    def _pull(self, session: Session, match: Match, wanted: int) -> None:
        """Take the first `wanted` tokens of `match` into the cache, or as many as are intact.

        A pull fills buffers that are contiguous, as no chunk of the cache is: chunks land beside
        it, and one copy puts their axes in the cache's order.
        """
        self.usage.matched = match.tokens
        if match.outcome in (Outcome.UNREACHABLE, Outcome.BUSY):
            self.usage.trouble = match.error or match.outcome.name
        chunks = wanted // self.chunk_tokens
        for first in range(0, chunks, _LANDING_CHUNKS):
            landing = self._landing[: chunks - first]
            last = first + len(landing)
            tokens = first * self.chunk_tokens, last * self.chunk_tokens
            pull = session.pull(match, landing, tokens=tokens, deadline_s=self._deadline_s)
            self._payloads[first : first + pull.chunks] = landing[: pull.chunks]
            self._stored = first + pull.chunks
            self.usage.pulled_bytes += pull.nbytes
            self.usage.pull_s += pull.seconds
            if not pull.ok:
                break
        self._cache.length = self.usage.pulled = self._stored * self.chunk_tokens

    def _compute(self, end: int) -> Array:
        """Compute the KV up to token `end`, chunk by chunk; logits (vocab,) of the last one.

        REQUIRES: the cache ends before.
        """
        size = self.chunk_tokens
        while True:
            start = self._cache.length
            stop = min(end, start - start % size + size)
            logits = self.model.llama.prefill(self._tokens[start:stop], self._cache)
            if stop % size == 0:
                self._publish(stop // size - 1)
            if stop == end:
                return logits

    def _publish(self, chunk: int) -> None:
        """Publish chunk number `chunk`, which is in the cache; never fails."""
        if self._session is None or self.usage.trouble or chunk < self._stored:
            return
        payload = np.ascontiguousarray(self._payloads[chunk])
        done = self._session.publish(
            self._tokens, [payload], first=chunk, deadline_s=self._deadline_s
        )
        outcome = Outcome(done.outcomes[0])
        if outcome not in (Outcome.OK, Outcome.EXISTS, Outcome.WRITING):
            self.usage.trouble = done.text or outcome.name
            return
        self._stored = chunk + 1
        self.usage.published += outcome is Outcome.OK
