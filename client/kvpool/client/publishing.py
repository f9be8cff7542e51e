"""Publishing: whole chunks, with round trips behind copies; or a publication filled bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, zip_longest

import numpy as np

from kvpool.client.effects import Steps
from kvpool.client.publication import Publishing, Scope
from kvpool.client.results import Outcomes, Publish, outcome_of
from kvpool.client.session import SessionCore
from kvpool.client.slots import OPEN
from kvpool.proto.errors import KvpoolError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

FIRST = 8
"""Chunks of the first batch: copying starts when it has room."""

_GOES_ON = frozenset(map(int, (OPEN, Outcome.OK, Outcome.EXISTS, Outcome.WRITING)))
"""What a chunk may be if those that follow can be stored."""


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
        if sources:
            yield from (_copy_all if membership.connection.mapped else _send_all)(state, sources)
    except KvpoolError as error:
        text = str(error)
        state.outcomes[state.outcomes == OPEN] = outcome_of(error)
    finally:
        state.abort()
    seconds = time.monotonic() - started
    return Publish(state.outcomes, state.nbytes, seconds, text or state.text)


def _copy_all(state: Publishing, sources: Sequence[list[Bytes]]) -> Steps[None]:
    """Through shared memory. While a batch is copied, the store makes room for the next one and
    commits the one before."""
    batches = _batches(len(sources), state.batch)
    behind = _nothing()
    try:
        ahead = yield from state.reserving(*batches[0])
        for (start, stop), following in zip_longest(batches, batches[1:]):
            yield from ahead
            ends = _cut(state, stop)
            if following and not ends:
                ahead = yield from state.reserving(*following)
            yield from _copy(state, {c: sources[c] for c in range(start, stop) if state.wants(c)})
            yield from behind
            if _cut(state, start):
                return
            behind = yield from state.committing()
            if ends:
                break
    except KvpoolError:
        yield from behind  # it was asked for before, so it counts
        raise
    yield from behind


def _batches(count: int, most: int) -> list[tuple[int, int]]:
    """Bounds of batches of at most `most` chunks. The first is small: nothing is copied while its
    room is made."""
    bounds = [0, *range(min(FIRST, most), count, most), count]
    return list(pairwise(bounds))


def _nothing() -> Steps[None]:
    yield from ()


def _cut(state: Publishing, stop: int) -> bool:
    """Whether the chain ends before chunk `stop`. What follows cannot be stored either, and gets
    the same outcome."""
    if not stop or int(state.outcomes[stop - 1]) in _GOES_ON:
        return False
    state.outcomes[stop:] = state.outcomes[stop - 1]
    return True


def _copy(state: Publishing, sources: dict[int, list[Bytes]]) -> Steps[None]:
    """Those chunks of one batch that have room."""
    if sources:
        nbytes = len(sources) * state.form.payload_bytes
        yield from state.membership.connection.bulk(partial(state.fill, sources), nbytes)


def _send_all(state: Publishing, sources: Sequence[list[Bytes]]) -> Steps[None]:
    """Over the data connection, straight from the caller's buffers, batch by batch."""
    form = state.form
    for start in range(0, len(sources), state.batch):
        stop = min(start + state.batch, len(sources))
        yield from state.look(start, stop)
        chunks = [c for c in range(start, stop) if state.outcomes[c] == OPEN]
        extents = {
            c: [form.head(state.key(c), sources[c], state.checksum), *sources[c]] for c in chunks
        }
        yield from state.stream(chunks, extents)
        if _cut(state, stop):
            return


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
