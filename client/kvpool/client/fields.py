"""Fields of messages: durations, and columns of outcomes."""

from __future__ import annotations

import math

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, ProtocolError
from kvpool.proto.outcomes import Outcome

SECONDS_MAX = ((1 << 32) - 1) // 1000
"""Longest duration that fits its field: 49 days."""


def milliseconds(seconds: float) -> int:
    """A duration as it travels, rounded up: 0 stays "the default". Raises `InvalidError`."""
    if not seconds:
        return 0
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidError(f"a duration of {seconds} s; 0 to {SECONDS_MAX} s are possible")
    return math.ceil(seconds * 1000)


def outcomes_of(verdict: wire.Verdict, count: int) -> list[Outcome]:
    """One outcome per item asked for; one alone stands for all.

    Raises `ProtocolError` for another number of them.
    """
    names = {one: Outcome(one) for one in set(verdict.outcomes)}
    outcomes = [names[one] for one in verdict.outcomes]
    if len(outcomes) == 1:
        return outcomes * count
    if len(outcomes) != count:
        raise ProtocolError(f"{len(outcomes)} outcomes for {count} items")
    return outcomes
