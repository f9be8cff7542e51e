"""Key chains of growing conversations: a session hashes only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.proto.keys import (
    KEY_BYTES,
    Extra,
    TokenArray,
    Tokens,
    as_tokens,
    chain_keys,
    shareable_chunks,
)

REMEMBERED = 64
"""Conversations whose chains are kept; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class _Chain:
    tokens: TokenArray
    extras: tuple[Extra, ...]
    keys: bytes

    @property
    def name(self) -> bytes:
        return self.keys[-KEY_BYTES:]


class ChainMemo:
    """Keys by prompt. Thread-safe: chains are immutable, and each step replaces whole ones."""

    def __init__(self, digest: bytes, chunk_tokens: int) -> None:
        self._digest = digest
        self._chunk_tokens = chunk_tokens
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()
        self.hashed_chunks = 0
        """Chunks hashed so far; grows only by what no remembered chain had."""

    def keys(self, tokens: Tokens, extras: Sequence[Extra] | None = None) -> bytes:
        """Keys (n x 32 bytes) of the shareable full chunks of `tokens`. Raises `InvalidError`."""
        array = as_tokens(tokens)
        chunks = shareable_chunks(len(array), self._chunk_tokens, extras)
        if not chunks:
            return b""
        # Beyond the last chunk there is nothing to remember.
        array = array[: chunks * self._chunk_tokens]
        wanted = _sorted(extras, len(array))
        best, known = self._longest_common(array, wanted)
        if known == chunks:
            assert best is not None
            self._touch(best)
            return best.keys[: known * KEY_BYTES]
        keys = best.keys[: known * KEY_BYTES] if best is not None else b""
        start = known * self._chunk_tokens
        previous = keys[-KEY_BYTES:] or self._digest
        keys += chain_keys(previous, array[start:], self._chunk_tokens, wanted, first_token=start)
        self.hashed_chunks += chunks - known
        self._remember(_Chain(array.copy(), wanted, keys))
        return keys

    def _longest_common(
        self, tokens: TokenArray, extras: tuple[Extra, ...]
    ) -> tuple[_Chain | None, int]:
        """The remembered chain that shares most chunks with this prompt, and how many."""
        best, most = None, 0
        step = self._chunk_tokens
        for chain in reversed(list(self._chains.values())):
            chunks = min(len(chain.keys) // KEY_BYTES, len(tokens) // step)
            following = slice(most * step, (most + 1) * step)
            # To be better a chain must at least share the first chunk that the best does not.
            if chunks <= most or not np.array_equal(chain.tokens[following], tokens[following]):
                continue
            differs = np.flatnonzero(chain.tokens[: chunks * step] != tokens[: chunks * step])
            if differs.size:
                chunks = int(differs[0]) // step
            chunks = min(chunks, _extras_agree(chain.extras, extras, chunks * step) // step)
            if chunks > most:
                best, most = chain, chunks
        return best, most

    def _touch(self, chain: _Chain) -> None:
        if self._chains.pop(chain.name, None) is not None:
            self._remember(chain)

    def _remember(self, chain: _Chain) -> None:
        # A conversation that grew replaces its shorter self.
        for name, old in list(self._chains.items()):
            if chain.keys.startswith(old.keys):
                self._chains.pop(name, None)
        self._chains[chain.name] = chain
        while len(self._chains) > REMEMBERED:
            self._chains.popitem(last=False)


def _sorted(extras: Sequence[Extra] | None, tokens: int) -> tuple[Extra, ...]:
    """Those that start before `tokens`; all of them have a digest, or the chain would end there."""
    named = [(e.start, e.digest) for e in extras or () if e.digest is not None and e.start < tokens]
    return tuple(Extra(start, digest) for start, digest in sorted(named))


def _extras_agree(mine: tuple[Extra, ...], theirs: tuple[Extra, ...], tokens: int) -> int:
    """Tokens up to which both lists of extras are the same, at most `tokens`."""
    one = [extra for extra in mine if extra.start < tokens]
    two = [extra for extra in theirs if extra.start < tokens]
    for a, b in zip(one, two, strict=False):
        if a != b:
            return min(a.start, b.start)
    longer = one[len(two) :] or two[len(one) :]
    return longer[0].start if longer else tokens
