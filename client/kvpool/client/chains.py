"""Key chains of growing conversations: a session hashes only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.proto.keys import KEY_BYTES, Extra, TokenArray, Tokens, as_tokens, chain_keys

REMEMBERED = 64
"""Conversations whose chains are kept; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class _Chain:
    tokens: TokenArray
    extras: tuple[Extra, ...]
    keys: bytes


class ChainMemo:
    """Keys by prompt. Not thread-safe by itself: each step replaces whole immutable chains."""

    def __init__(self, digest: bytes, chunk_tokens: int) -> None:
        self._digest = digest
        self._chunk_tokens = chunk_tokens
        self._chains: OrderedDict[bytes, _Chain] = OrderedDict()
        self.hashed_chunks = 0
        """Chunks hashed so far; grows only by what no remembered chain had."""

    def keys(self, tokens: Tokens, extras: Sequence[Extra] | None = None) -> bytes:
        """Keys (n x 32 bytes) of the shareable full chunks of `tokens`."""
        array = as_tokens(tokens)
        wanted = tuple(sorted(extras)) if extras else ()
        known = self._longest_common(array, wanted)
        start = len(known) // KEY_BYTES * self._chunk_tokens
        previous = known[-KEY_BYTES:] or self._digest
        fresh = chain_keys(previous, array[start:], self._chunk_tokens, wanted, first_token=start)
        self.hashed_chunks += len(fresh) // KEY_BYTES
        keys = known + fresh
        if keys:
            self._remember(_Chain(array.copy(), wanted, keys))
        return keys

    def _longest_common(self, tokens: TokenArray, extras: tuple[Extra, ...]) -> bytes:
        """The keys that the best remembered chain shares with this prompt."""
        best = b""
        step = self._chunk_tokens
        for chain in list(self._chains.values()):
            chunks = min(len(chain.keys) // KEY_BYTES, len(tokens) // step)
            # A shared last chunk almost always means a shared chain: look there first.
            if chunks * KEY_BYTES <= len(best):
                continue
            differs = np.flatnonzero(chain.tokens[: chunks * step] != tokens[: chunks * step])
            if differs.size:
                chunks = int(differs[0]) // step
            chunks = min(chunks, _extras_agree(chain.extras, extras, chunks * step) // step)
            if chunks * KEY_BYTES > len(best):
                best = chain.keys[: chunks * KEY_BYTES]
        return best

    def _remember(self, chain: _Chain) -> None:
        # A conversation that grew replaces its shorter self; its name is where it began to differ.
        for name, old in list(self._chains.items()):
            if chain.keys.startswith(old.keys):
                self._chains.pop(name, None)
        self._chains[chain.keys[-KEY_BYTES:]] = chain
        while len(self._chains) > REMEMBERED:
            self._chains.popitem(last=False)


def _extras_agree(mine: tuple[Extra, ...], theirs: tuple[Extra, ...], tokens: int) -> int:
    """Tokens up to which both lists of extras are the same, at most `tokens`."""
    one = [extra for extra in mine if extra.start < tokens]
    two = [extra for extra in theirs if extra.start < tokens]
    for a, b in zip(one, two, strict=False):
        if a != b:
            return min(a.start, b.start)
    longer = one[len(two) :] or two[len(one) :]
    return longer[0].start if longer else tokens
