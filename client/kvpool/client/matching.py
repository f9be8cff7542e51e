"""Matching: the stored prefix of a prompt under a lease; joining and renewing leases.

Nothing here raises because of the store: an unreachable or full one is an outcome, so that an
engine simply goes on without it. Errors of the caller are raised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.client.effects import Steps
from kvpool.client.fields import milliseconds, outcomes_of
from kvpool.client.results import EXTENT_BYTES, HIT, Grant, Match, outcome_of
from kvpool.client.session import Membership, Prompt, SessionCore
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, ProtocolError
from kvpool.proto.keys import KEY_BYTES, Extra
from kvpool.proto.outcomes import Outcome, Reason

LEARNED = -1.0
"""As a prefill speed: what the store has learned from the publishes of this namespace."""


def match(
    session: SessionCore,
    prompt: Prompt,
    extras: Sequence[Extra] | None,
    parts: tuple[str, ...] | None,
    lease_s: float,
    peek: bool,
    prefill_tokens_s: float,
) -> Steps[Match]:
    """See `Session.match`."""
    mask = session.namespace.part_mask(parts)
    lease_ms = milliseconds(lease_s)
    try:
        membership = session.present or (yield from session.joined())
    except KvpoolError as error:
        known = session.membership is not None
        keys = session.keys(prompt, extras) if known else b""
        return _no_match(session, keys, error)
    keys = membership.identity.keys(prompt, extras)
    keys = keys[: _most(membership, mask.bit_count()) * KEY_BYTES]
    if not keys:
        return Match(keys, session.namespace.chunk_tokens)
    request = wire.Match(
        namespace=membership.number, keys=keys, parts=mask, lease_ms=lease_ms, peek=peek
    )
    if prefill_tokens_s:
        request.prefill_tokens_s = prefill_tokens_s
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
    hits, ssd_chunks, lease = matched.hits, matched.ssd_chunks, matched.lease
    held, asked = hits + ssd_chunks, len(keys) // KEY_BYTES
    grant, fits = None, held <= asked
    if lease:
        extents = matched.extents
        fits &= len(extents) == EXTENT_BYTES * hits * mask.bit_count()
        # Counted from before the request: the store's own deadline is never earlier.
        deadline = started + matched.lease_ms / 1000
        grant = Grant(membership, lease, deadline, extents, mask)
    if not fits:
        membership.connection.retire()
        raise ProtocolError(
            f"{hits} of {asked} chunks in {len(matched.extents)} bytes of extents were matched"
        )
    match = Match(keys, membership.identity.namespace.chunk_tokens, held, grant=grant)
    if held < asked:
        match.outcome, match.reason = Outcome(matched.miss_outcome), Reason(matched.miss_reason)
        match.skipped = matched.skipped
    else:
        match.outcome = HIT
    if ssd_chunks:
        match.ssd_chunks, match.load_s = ssd_chunks, matched.load_ms / 1000
    return match


def _no_match(session: SessionCore, keys: bytes, error: KvpoolError) -> Match:
    match = Match(keys, session.namespace.chunk_tokens)
    match.outcome, match.error = outcome_of(error), str(error)
    return match
