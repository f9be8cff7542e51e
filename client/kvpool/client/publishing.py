"""Publishing: whole chunks at once, batch by batch; or a publication that is filled bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvpool.client.effects import Steps
from kvpool.client.pacing import left
from kvpool.client.publication import Publishing, Scope
from kvpool.client.results import Outcomes, Publish, outcome_of
from kvpool.client.session import SessionCore
from kvpool.client.slots import OPEN
from kvpool.proto.errors import KvpoolError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes


def publish(session: SessionCore, payloads: Sequence[object], scope: Scope) -> Steps[Publish]:
    """See `Session.publish`. REQUIRES: `scope.count` is the number of payloads."""
    started = time.monotonic()
    try:
        membership = yield from session.joined()
    except KvpoolError as error:
        outcomes: Outcomes = np.full(len(payloads), outcome_of(error), np.uint8)
        return Publish(outcomes, 0, time.monotonic() - started, str(error))
    state = Publishing(membership, scope)
    sources = [state.form.sources(payload) for payload in payloads]
    text = ""
    try:
        yield from _all_batches(state, sources)
    except KvpoolError as error:
        text = str(error)
        state.outcomes[state.outcomes == OPEN] = outcome_of(error)
    finally:
        state.abort()
    seconds = time.monotonic() - started
    return Publish(state.outcomes, state.nbytes, seconds, text or state.text)


def _all_batches(state: Publishing, sources: Sequence[list[Bytes]]) -> Steps[None]:
    mapped = state.membership.connection.mapped
    for start in range(0, len(sources), state.batch):
        stop = min(start + state.batch, len(sources))
        yield from (_copy if mapped else _send)(state, start, sources[start:stop])
        last = state.outcomes[stop - 1]
        if last not in (Outcome.OK, Outcome.EXISTS, Outcome.WRITING):
            state.outcomes[stop:] = last  # the chain is cut: what follows cannot be stored either
            return


def _copy(state: Publishing, start: int, sources: Sequence[list[Bytes]]) -> Steps[None]:
    """One batch through shared memory."""
    yield from state.reserve(start, start + len(sources))

    def fill(end: float) -> None:
        for chunk, planes in enumerate(sources, start):
            left(end)
            state.fill(chunk, planes)

    wanted = sum(state.wants(start + i) for i in range(len(sources)))
    if wanted:
        yield from state.membership.connection.bulk(fill, wanted * state.form.payload_bytes)
        yield from state.commit()


def _send(state: Publishing, start: int, sources: Sequence[list[Bytes]]) -> Steps[None]:
    """One batch over the data connection, straight from the caller's buffers."""
    form, stop = state.form, start + len(sources)
    yield from state.look(start, stop)
    chunks = [c for c in range(start, stop) if state.outcomes[c] == OPEN]
    extents = {
        c: [form.head(state.key(c), sources[c - start], state.checksum), *sources[c - start]]
        for c in chunks
    }
    yield from state.stream(chunks, extents)


def open_publication(session: SessionCore, scope: Scope) -> Steps[Publishing]:
    """Reserves all chunks of a publication, in batches."""
    membership = yield from session.joined()
    state = Publishing(membership, scope)
    count = len(state.outcomes)
    try:
        for start in range(0, count, state.batch):
            yield from state.reserve(start, min(start + state.batch, count))
    except BaseException:
        state.abort()
        raise
    return state
