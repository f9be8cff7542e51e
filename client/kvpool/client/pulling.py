"""Pulling: matched KV into the caller's buffers, out of shared memory or over a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvpool.client.connection import Connection
from kvpool.client.effects import Pause, Steps
from kvpool.client.extents import PartFormat
from kvpool.client.loading import advance
from kvpool.client.regions import Regions
from kvpool.client.results import HIT, Grant, Match, Outcomes, Pull, outcome_of
from kvpool.client.selection import Destination, Selection, destinations, select_chunks
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, StaleError
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

PENDING = 255
"""No outcome yet."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a match is wanted: one part, some layers (None: all), tokens [first, last)."""

    part: str | None = None
    layers: Sequence[str] | None = None
    tokens: tuple[int, int] | None = None
    verify: bool = True


@dataclass(slots=True)
class Pulling:
    """One pull in progress: chunks `first`, `first` + 1, … of a match, each with its selection,
    its destination, its extent (address, generation) and, in the end, its outcome."""

    match: Match
    deadline: float
    """Of the lease, on the monotonic clock."""
    form: PartFormat
    first: int
    selections: Sequence[Selection]
    targets: Sequence[Destination]
    extents: Sequence[tuple[int, int]]
    outcomes: Outcomes
    verify: bool
    verified: Any
    """One bool per chunk: its bytes were compared with their checksums."""

    def piece(self, start: int, end: int, extents: Sequence[tuple[int, int]]) -> Pulling:
        """Its chunks [start, end), which have these extents; the outcomes are shared."""
        return replace(
            self,
            first=self.first + start,
            selections=self.selections[start:end],
            targets=self.targets[start:end],
            extents=extents,
            outcomes=self.outcomes[start:end],
            verified=self.verified[start:end],
        )

    @property
    def nbytes(self) -> int:
        """Payload bytes that are wanted."""
        return sum(selection.nbytes for selection in self.selections)

    def copy(self, regions: Regions, end: float) -> None:
        """Copies chunk by chunk out of mapped memory; stops at `end` (monotonic clock)."""
        for i, (address, generation) in enumerate(self.extents):
            now = time.monotonic()
            if now >= self.deadline or now >= end:
                late = now >= self.deadline
                self.outcomes[i:] = Outcome.EXPIRED if late else Outcome.UNREACHABLE
                return
            if address < 0:
                self.outcomes[i] = Outcome.MISS
                continue
            self.outcomes[i], self.verified[i] = self.form.deliver(
                regions.view(address, self.form.extent_bytes),
                self.match.key(self.first + i),
                generation,
                self.selections[i],
                self.targets[i],
                self.verify,
            )
            # A copy that ended after its lease is refused, although nobody has reused the extent.
            if time.monotonic() >= self.deadline:
                self.outcomes[i] = Outcome.EXPIRED

    def landed(self, i: int, head: Bytes, outcome: int) -> None:
        """Chunk `i` has come over a stream, with `head` as its prologue; the sender says
        `outcome`."""
        self.outcomes[i] = outcome
        if outcome == HIT:
            self.outcomes[i], self.verified[i] = self.form.verify_landed(
                head,
                self.match.key(self.first + i),
                self.selections[i],
                self.targets[i],
                self.verify,
            )


def pull(match: Match, namespace: Namespace, into: object, wanted: Wanted) -> Steps[Pull]:
    """See `Session.pull`."""
    started = time.monotonic()
    number = part_number(namespace, match, wanted.part)
    start, end = wanted.tokens if wanted.tokens is not None else (0, match.tokens)
    if not 0 <= start <= end <= match.tokens:
        raise InvalidError(
            f"token range [{start}, {end}) is not inside the {match.tokens} matched tokens"
        )
    size = namespace.chunk_tokens
    selections = select_chunks(namespace.parts[number], size, wanted.layers, start, end)
    targets = destinations(into, selections)
    outcomes: Outcomes = np.full(len(selections), PENDING, np.uint8)
    verified = np.zeros(len(selections), np.bool_)
    grant = match.grant
    error = "" if grant is not None or not selections else "the match holds no lease"
    if selections and grant is not None:
        job = Pulling(
            match,
            grant.deadline,
            grant.membership.identity.formats[number],
            start // size,
            selections,
            targets,
            [],
            outcomes,
            wanted.verify,
            verified,
        )
        try:
            yield from _pull(job, grant, grant.parts.index(number))
        except KvpoolError as failure:
            error = str(failure)
            outcomes[outcomes == PENDING] = outcome_of(failure)
        _report_corrupt(job, grant)
    outcomes[outcomes == PENDING] = Outcome.STALE_EPOCH
    hit = outcomes == Outcome.HIT
    return Pull(
        outcomes,
        size,
        nbytes=sum(s.nbytes for s, good in zip(selections, hit.tolist(), strict=True) if good),
        seconds=time.monotonic() - started,
        unverified=int((hit & ~verified).sum()),
        error=error,
    )


def _pull(job: Pulling, grant: Grant, column: int) -> Steps[None]:
    """Delivers what is in the store's memory, and meanwhile has the rest brought there."""
    done, last = 0, job.first + len(job.selections)
    while done < len(job.selections):
        progress = None
        if grant.chunks < last:
            progress = yield from advance(job.match, grant, last)
        ready = max(0, min(grant.chunks, last) - job.first)
        if ready > done:
            extents = grant.extents[job.first + done : job.first + ready, column].tolist()
            yield from _deliver(job.piece(done, ready, extents), grant)
        elif progress is not None and progress.pending:
            yield Pause(progress.wait_s)
        done = max(done, ready)
        if progress is not None and not progress.pending:
            job.outcomes[done:] = progress.outcome
            return


def _deliver(job: Pulling, grant: Grant) -> Steps[None]:
    """Fills the outcomes of `job`, as many as can be had."""
    connection = grant.membership.connection
    if not connection.alive:
        raise StaleError("the connection was lost; match again")
    highest = max(address for address, _ in job.extents) if connection.mapped else 0
    if highest < 0:
        job.outcomes[:] = Outcome.MISS
        return
    if connection.mapped:
        try:
            regions = yield from connection.regions(highest, writable=False)
        except KvpoolError:
            if connection.mapped:
                raise
        else:
            yield from _copy(job, connection, regions)
            return
    yield from _fetch(job, grant)


def _copy(job: Pulling, connection: Connection, regions: Regions) -> Steps[None]:
    def copy(end: float) -> None:
        job.copy(regions, end)
        if not connection.channel.alive:  # closed by the store: extents may have been reused
            job.outcomes[job.outcomes == Outcome.HIT] = Outcome.STALE_EPOCH

    yield from connection.bulk(copy, job.nbytes)


def _fetch(job: Pulling, grant: Grant) -> Steps[None]:
    connection = grant.membership.connection
    data = connection.stream()
    request = wire.Fetch(
        namespace=grant.membership.number, lease=grant.lease, parts=1 << job.form.number
    )
    yield from connection.bulk(lambda end: data.fetch(request, job, end), job.nbytes)


def _report_corrupt(job: Pulling, grant: Grant) -> None:
    bad = np.flatnonzero(job.outcomes == Outcome.CORRUPT).tolist()
    if bad:
        keys = b"".join(job.match.key(job.first + i) for i in bad)
        delete = wire.Delete(namespace=grant.membership.number, keys=keys, quarantine=True)
        grant.membership.connection.notify(delete)


def part_number(namespace: Namespace, match: Match, part: str | None) -> int:
    """The number of the part to read from `match`. Raises `InvalidError`, `NamespaceError`."""
    held = match.grant.parts if match.grant is not None else range(len(namespace.parts))
    if part is None:
        if len(held) > 1:
            names = ", ".join(namespace.parts[i].name for i in held)
            raise InvalidError(f"the match has parts {names}: say part=…")
        return held[0]
    number = namespace.part_mask((part,)).bit_length() - 1
    if number not in held:
        raise InvalidError(f"part {part!r} was not asked for in this match")
    return number
