"""Loading: chunks of a match that are on the store's SSD come into its memory."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.client.effects import Pause, Steps
from kvpool.client.results import EXTENT_BYTES, Grant, Match
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import ProtocolError
from kvpool.proto.outcomes import Outcome

WAIT_S_MIN, WAIT_S_MAX = 100e-6, 20e-3
"""Between two questions, whatever the store expects."""


class Progress(NamedTuple):
    """What the store says of the chunks that are still missing."""

    pending: bool
    outcome: Outcome
    wait_s: float


def advance(match: Match, grant: Grant, upto: int) -> Steps[Progress]:
    """Has the first `upto` chunks of `match` loaded; what is there by now, `grant` knows then.

    Answers at once. Raises `KvpoolError` if the store cannot be asked.
    """
    packed, have = grant.packed, grant.chunks
    request = wire.Load(lease=grant.lease, parts=grant.mask, upto=upto, have=have)
    loaded = yield from grant.membership.ask(request, wire.Loaded)
    more = max(0, loaded.chunks - have)
    wanted = EXTENT_BYTES * more * grant.mask.bit_count()
    if loaded.chunks > match.chunks or len(loaded.extents) != wanted:
        grant.membership.connection.retire()
        raise ProtocolError(
            f"{loaded.chunks} of {match.chunks} chunks in {len(loaded.extents)} bytes were loaded"
        )
    if have + more > grant.chunks:  # another thread may have asked, too
        grant.packed = packed + loaded.extents
    wait_s = min(max(loaded.wait_us * 1e-6, WAIT_S_MIN), WAIT_S_MAX)
    return Progress(loaded.pending, Outcome(loaded.outcome), wait_s)


def load(match: Match, grant: Grant, upto: int) -> Steps[Outcome]:
    """Waits until the first `upto` chunks of `match` are loaded: HIT, or why they are not."""
    while grant.chunks < upto:
        progress = yield from advance(match, grant, upto)
        if grant.chunks < upto:
            if not progress.pending:
                return progress.outcome
            yield Pause(progress.wait_s)
    return Outcome.HIT


def prefetch(match: Match, *, wait: bool) -> Steps[int]:
    """See `Session.prefetch`. Ends the match."""
    grant = match.grant
    if grant is None:
        return 0
    try:
        if match.ssd_chunks:
            if wait:
                yield from load(match, grant, match.chunks)
                return grant.chunks
            grant.membership.connection.notify(wire.Load(lease=grant.lease))
        return match.chunks
    finally:
        match.release()
