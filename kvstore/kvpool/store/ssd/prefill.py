"""How fast the engines of a namespace compute, learned from what they publish after a miss.

A match says where the stored prefix ends; the chunks from there on are published once they are
computed. So the tokens published by then, over the time since the match, are a bound of the speed
from below: waiting, batching and copying only make it smaller. The best bound of each miss counts,
and of the latest misses the lower quartile: one prompt whose KV the engine had elsewhere changes
nothing, and an estimate that is too low loads what is stored, as without one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

OBSERVATIONS_MIN = 8
"""Fewer tell nothing."""
_OBSERVATIONS_MAX = 32
_OPEN_MAX = 1024
"""Misses that wait for their chunks; the oldest are forgotten."""


@dataclass(slots=True)
class _Miss:
    at: float
    tokens: int = 0
    tokens_s: float = 0.0


class Prefill:
    """One namespace's. Times in seconds of the caller's clock."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._open: OrderedDict[bytes, _Miss] = OrderedDict()
        """By the first chunk that is not stored; then by the last that was published."""
        self._seen: deque[_Miss] = deque(maxlen=_OBSERVATIONS_MAX)

    @property
    def tokens_s(self) -> float:
        """Tokens in a second; 0 while there are too few observations."""
        if len(self._seen) < OBSERVATIONS_MIN:
            return 0.0
        return sorted(miss.tokens_s for miss in self._seen)[len(self._seen) // 4]

    def missed(self, key: bytes, now: float) -> None:
        """A match ended before the chunk `key`. Of several that wait for it the first counts."""
        self._open.setdefault(key, _Miss(now))
        if len(self._open) > _OPEN_MAX:
            self._open.popitem(last=False)

    def published(self, parent: bytes, first: bytes, last: bytes, chunks: int, now: float) -> None:
        """`chunks` chunks from `first` to `last`, which follow `parent` (empty: none)."""
        miss = self._open.pop(first, None) or self._open.pop(parent, None)
        if miss is None or now <= miss.at:
            return
        if not miss.tokens:
            self._seen.append(miss)
        miss.tokens += chunks * self._chunk_tokens
        miss.tokens_s = max(miss.tokens_s, miss.tokens / (now - miss.at))
        self._open[last] = miss
