"""The verbs beside match, pull and publish: hint, pin, delete, clear, explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.client.effects import Steps
from kvpool.client.fields import milliseconds, outcomes_of
from kvpool.client.results import TIERS, Explanation
from kvpool.client.session import Prompt, SessionCore
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, ProtocolError
from kvpool.proto.keys import KEY_BYTES, Extra
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome, Reason


def future_of(
    will_continue: float | bool | None = None,
    gap_s: float | None = None,
    ttl_s: float = 0.0,
    ended: bool = False,
    stop_reason: str = "",
    priority: int = 0,
) -> wire.Hint:
    """A Hint without its keys; what is unknown is negative, zero or empty. See `Session.hint`."""
    if will_continue is not None and not 0 <= will_continue <= 1:
        raise InvalidError(f"will_continue {will_continue} is no probability")
    if gap_s is not None and not gap_s >= 0:
        raise InvalidError(f"a gap of {gap_s} s")
    return wire.Hint(
        will_continue=-1.0 if will_continue is None else float(will_continue),
        gap_s=-1.0 if gap_s is None else gap_s,
        ttl_ms=milliseconds(ttl_s),
        ended=ended,
        stop_reason=stop_reason,
        priority=priority,
    )


def hint(
    session: SessionCore, prompt: Prompt, extras: Sequence[Extra] | None, future: wire.Hint
) -> Steps[bool]:
    """See `Session.hint`."""
    try:
        membership = yield from session.joined()
    except KvpoolError:
        return False
    future.namespace = membership.number
    future.keys = membership.identity.keys(prompt, extras)
    return not future.keys or membership.connection.notify(future, vital=False)


def pin(
    session: SessionCore, prompt: Prompt, extras: Sequence[Extra] | None, ttl_s: float
) -> Steps[list[Outcome]]:
    """See `Session.pin`."""
    request = wire.Pin(ttl_ms=milliseconds(ttl_s))
    return (yield from _per_chunk(session, prompt, extras, request))


def unpin(session: SessionCore, prompt: Prompt, extras: Sequence[Extra] | None) -> Steps[Outcome]:
    """See `Session.unpin`."""
    outcomes = yield from _per_chunk(session, prompt, extras, wire.Pin(unpin=True))
    return outcomes[0] if outcomes else Outcome.MISS


def delete(
    session: SessionCore, prompt: Prompt, extras: Sequence[Extra] | None
) -> Steps[list[Outcome]]:
    """See `Session.delete`."""
    return (yield from _per_chunk(session, prompt, extras, wire.Delete()))


def _per_chunk(
    session: SessionCore,
    prompt: Prompt,
    extras: Sequence[Extra] | None,
    request: wire.Pin | wire.Delete,
) -> Steps[list[Outcome]]:
    """`request` for the chunks of `prompt`; one outcome each."""
    membership = yield from session.joined()
    request.namespace = membership.number
    request.keys = membership.identity.keys(prompt, extras)
    if not request.keys:
        return []
    verdict = yield from membership.ask(request, wire.Verdict)
    return outcomes_of(verdict, len(request.keys) // KEY_BYTES)


def clear(session: SessionCore) -> Steps[int]:
    """See `Session.clear`."""
    membership = yield from session.joined()
    request = wire.Clear(namespace=membership.number)
    return (yield from membership.ask(request, wire.Count)).count


def explain(
    session: SessionCore, prompt: Prompt, extras: Sequence[Extra] | None
) -> Steps[list[Explanation]]:
    """See `Session.explain`."""
    membership = yield from session.joined()
    keys = membership.identity.keys(prompt, extras)
    if not keys:
        return []
    request = wire.Explain(namespace=membership.number, keys=keys)
    told = yield from membership.ask(request, wire.Explained)
    if len(told.outcomes) != len(keys) // KEY_BYTES:
        raise ProtocolError(f"{len(told.outcomes)} of {len(keys) // KEY_BYTES} chunks explained")
    return _explanations(session.namespace, keys, told)


def _explanations(namespace: Namespace, keys: bytes, told: wire.Explained) -> list[Explanation]:
    def column(packed: bytes, dtype: str) -> list[Any]:
        values: list[Any] = np.frombuffer(packed, dtype).tolist()
        return values

    rows = zip(
        told.outcomes,
        told.reasons,
        told.tiers,
        column(told.nbytes, "<u8"),
        column(told.parts, "<u8"),
        column(told.leases, "<u4"),
        column(told.pins, "<u4"),
        column(told.age_ms, "<u8"),
        column(told.children, "<u4"),
        told.durable or bytes(len(told.outcomes)),  # an older daemon does not say
        strict=True,
    )
    return [
        Explanation(
            key=keys[i * KEY_BYTES : (i + 1) * KEY_BYTES],
            outcome=Outcome(outcome),
            reason=Reason(reason),
            tier=TIERS[tier] if tier < len(TIERS) else "unknown",
            nbytes=nbytes,
            parts=tuple(part.name for j, part in enumerate(namespace.parts) if parts >> j & 1),
            leases=leases,
            pins=pins,
            age_s=age_ms / 1000,
            children=children,
            durable=bool(durable),
        )
        for i, (
            outcome,
            reason,
            tier,
            nbytes,
            parts,
            leases,
            pins,
            age_ms,
            children,
            durable,
        ) in enumerate(rows)
    ]
