"""What an engine would have told the store at each request of a trace.

- `oracle`: whether the session goes on, taken from the future: the request's last block is used
  again.
- `stop`: what an engine knows, why the answer ended. Taken from the trace if it says so; else a
  seeded coin plays the engine: of the requests that go on within a minute 9 of 10 called a tool, of
  those that end 3 of 100 did.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.bench.traces import NEVER, Trace
from kvpool.store.eviction.base import Hint
from kvpool.store.hints import TOOL, TURN

KINDS = ("none", "oracle", "stop")

_TOOL = Hint(will_continue=TOOL)
_TURN = Hint(will_continue=TURN)
_GOES_ON = Hint(will_continue=1.0)
_ENDS = Hint(will_continue=0.0)
_TOOL_GAP_S = 60.0


def hints_of(trace: Trace, next_uses: Sequence[NDArray[np.int64]], kind: str) -> list[Hint | None]:
    """One per request. `next_uses`: see `Trace.next_uses`."""
    if kind == "none":
        return [None] * len(trace.requests)
    # A request without a full block has no last one.
    upcoming = [int(uses[-1]) if len(uses) else NEVER for uses in next_uses]
    if kind == "oracle":
        return [_ENDS if use == NEVER else _GOES_ON for use in upcoming]
    if any(request.stop for request in trace.requests):
        return [_reason(request.stop) for request in trace.requests]
    return _coins(trace, upcoming)


def _reason(stop: str | None) -> Hint | None:
    if stop is None:
        return None
    return _TOOL if "tool" in stop else _TURN


def _coins(trace: Trace, upcoming: Sequence[int]) -> list[Hint | None]:
    coin = random.Random(1)
    ends = np.cumsum([len(request.blocks) for request in trace.requests])
    out: list[Hint | None] = []
    for request, use in zip(trace.requests, upcoming, strict=True):
        chance = 0.03
        if use != NEVER:
            following = trace.requests[int(ends.searchsorted(use, "right"))]
            chance = 0.9 if following.time_s - request.time_s <= _TOOL_GAP_S else 0.03
        out.append(_TOOL if coin.random() < chance else _TURN)
    return out
