"""Matching: the stored prefix of a prompt under a lease; joining and renewing leases.

Nothing here raises because of the store: an unreachable or full one is an outcome, so that an
engine simply goes on without it. Errors of the caller are raised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvpool.client.effects import Steps
from kvpool.client.fields import milliseconds, outcomes_of
from kvpool.client.results import EXTENT_BYTES, HIT, UNKNOWN, Grant, Match, outcome_of
from kvpool.client.session import Membership, Prompt, SessionCore
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, ProtocolError
from kvpool.proto.keys import KEY_BYTES, Extra
from kvpool.proto.outcomes import Outcome, Reason

LEARNED = -1.0
"""As a prefill speed: what the store has learned from the publishes of this namespace."""


class Query(NamedTuple):
    """What a match asks for; see `Session.match`."""

    prompt: Prompt
    extras: Sequence[Extra] | None = None
    parts: tuple[str, ...] | None = None
    lease_s: float = 0.0
    peek: bool = False
    prefill_tokens_s: float = 0.0


def match(session: SessionCore, query: Query) -> Steps[Match]:
    """See `Session.match`."""
    mask = session.namespace.part_mask(query.parts)
    lease_ms = milliseconds(query.lease_s)
    try:
        membership = session.present or (yield from session.joined())
    except KvpoolError as error:
        known = session.membership is not None
        keys = session.keys(query.prompt, query.extras) if known else b""
        return _no_match(session, keys, error)
    keys = membership.identity.keys(query.prompt, query.extras)
    keys = keys[: _most(membership, mask.bit_count()) * KEY_BYTES]
    if not keys:
        return Match(keys, session.namespace.chunk_tokens)
    request = wire.Match(
        namespace=membership.number, keys=keys, parts=mask, lease_ms=lease_ms, peek=query.peek
    )
    if query.prefill_tokens_s:
        request.prefill_tokens_s = query.prefill_tokens_s
    started = time.monotonic()
    try:
        matched = yield from membership.connection.ask(request, wire.Matched)
        return _matched(membership, keys, matched, mask, started)
    except KvpoolError as error:
        return _no_match(session, keys, error)


def adopt(
    session: SessionCore, lease: bytes, keys: bytes, parts: tuple[str, ...] | None
) -> Steps[Match]:
    """See `Session.adopt`."""
    mask = session.namespace.part_mask(parts)
    started = time.monotonic()
    try:
        membership = yield from session.joined()
        request = wire.Adopt(lease=lease, parts=mask)
        matched = yield from membership.ask(request, wire.Matched)
    except KvpoolError as error:
        return _no_match(session, keys, error)
    held = matched.hits + matched.ssd_chunks
    if held > len(keys) // KEY_BYTES:
        membership.connection.notify(wire.Release(leases=matched.lease))
        raise InvalidError(
            f"the lease is of {held} chunks, but {len(keys) // KEY_BYTES} keys were given"
        )
    try:
        return _matched(membership, keys, matched, mask, started)
    except ProtocolError as error:
        return _no_match(session, keys, error)


def renew(match: Match, lease_s: float) -> Steps[Outcome]:
    """See `Session.renew`."""
    request = wire.Touch(lease=match.lease, lease_ms=milliseconds(lease_s))
    grant = match.grant
    if grant is None or not grant.membership.connection.alive:
        return Outcome.STALE_EPOCH
    started = time.monotonic()
    try:
        verdict = yield from grant.membership.ask(request, wire.Verdict)
        (outcome,) = outcomes_of(verdict, 1)
    except KvpoolError as error:
        return outcome_of(error)
    if outcome == Outcome.OK:
        grant.deadline = started + verdict.lease_ms / 1000
    return outcome


def _most(membership: Membership, parts: int) -> int:
    """Keys in one request: what the daemon takes, and what its answer has room for."""
    connection = membership.connection
    return min(connection.keys_max, connection.frame_bytes_max // (2 * EXTENT_BYTES * parts))


def _matched(
    membership: Membership, keys: bytes, matched: wire.Matched, mask: int, started: float
) -> Match:
    """Raises `ProtocolError` for an answer that does not fit the question."""
    namespace, hits = membership.identity.namespace, matched.hits
    parts = namespace.part_indices(mask)
    lease = matched.lease
    extents = matched.extents if lease else b""
    wanted = EXTENT_BYTES * hits * len(parts) if lease else 0
    held, asked = hits + matched.ssd_chunks, len(keys) // KEY_BYTES
    if held > asked or len(extents) != wanted:
        membership.connection.retire()
        raise ProtocolError(f"{hits} chunks in {len(extents)} bytes of extents were matched")
    grant = None
    if lease:
        # Counted from before the request: the store's own deadline is never earlier.
        deadline = started + matched.lease_ms / 1000
        grant = Grant(membership, lease, deadline, extents, parts)
    missed = held < asked
    return Match(
        keys,
        namespace.chunk_tokens,
        chunks=held,
        outcome=Outcome(matched.miss_outcome) if missed else HIT,
        reason=Reason(matched.miss_reason) if missed else UNKNOWN,
        grant=grant,
        ssd_chunks=matched.ssd_chunks,
        load_s=matched.load_ms / 1000,
        skipped=matched.skipped,
    )


def _no_match(session: SessionCore, keys: bytes, error: KvpoolError) -> Match:
    size = session.namespace.chunk_tokens
    return Match(keys, size, outcome=outcome_of(error), error=str(error))
