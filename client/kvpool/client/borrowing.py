"""Borrowing: views of matched KV in the store's own memory, without a copy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvpool.client.effects import Steps
from kvpool.client.extents import PartFormat
from kvpool.client.loading import load
from kvpool.client.pulling import part_number
from kvpool.client.regions import Regions
from kvpool.client.results import Match, Outcomes, outcome_of
from kvpool.proto.errors import InvalidError, KvpoolError
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes


class Borrow:
    """Read-only views of payloads in the store's own memory, one per chunk of a match.

    A view keeps the match, and so its lease, alive; after `Match.release` all are dead. A chunk
    that is not HIT has an empty view.
    """

    def __init__(self, outcomes: Outcomes, lent: _Lent | None = None) -> None:
        self.outcomes = outcomes
        self._lent = lent

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """All chunks have their view."""
        return bool((self.outcomes == Outcome.HIT).all())

    def __getitem__(self, chunk: int) -> Bytes:
        """The payload of one chunk."""
        if self._lent is None:
            return np.empty(0, np.uint8)
        return self._lent.payload(chunk)

    @property
    def views(self) -> list[Bytes]:
        """The payloads of all chunks."""
        return [self[chunk] for chunk in range(len(self))]


class _Lent:
    """The payloads of a borrowed match."""

    def __init__(
        self, match: Match, form: PartFormat, regions: Regions, addresses: Sequence[int]
    ) -> None:
        self._match = match
        self._form = form
        self._regions = regions
        self._addresses = addresses
        self._arrays: dict[int, Bytes] = {}

    def payload(self, chunk: int) -> Bytes:
        form, address = self._form, self._addresses[chunk]
        if address < 0:
            return np.empty(0, np.uint8)
        region, offset = divmod(address, self._regions.region_bytes)
        if region not in self._arrays:
            array = self._regions.array(region)
            self._arrays[region] = np.asarray(_Keeping(array, self._match))
        start = offset + form.prologue
        return self._arrays[region][start : start + form.payload_bytes]


class _Keeping:
    """Memory as a read-only array interface that keeps the match alive with every view of it."""

    def __init__(self, array: Bytes, match: Match) -> None:
        self._keep = array, match
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], True)}


def borrow(match: Match, namespace: Namespace, part: str | None) -> Steps[Borrow]:
    """See `Session.borrow`."""
    number = part_number(namespace, match, part)
    grant = match.grant
    outcomes: Outcomes = np.full(match.chunks, Outcome.STALE_EPOCH, np.uint8)
    if grant is None:
        return Borrow(outcomes)
    if time.monotonic() >= grant.deadline:
        outcomes[:] = Outcome.EXPIRED
        return Borrow(outcomes)
    connection = grant.membership.connection
    if not connection.mapped:
        raise InvalidError("this session may not map the store's memory: pull instead")
    outcome = Outcome.HIT
    try:
        match.keep_connection()
        outcome = yield from load(match, grant, match.chunks)
        addresses = np.full(match.chunks, -1, np.int64)
        addresses[: grant.chunks] = grant.extents[:, grant.parts.index(number), 0]
        regions = yield from connection.regions(int(addresses.max()), writable=False)
    except KvpoolError as error:
        outcomes[:] = outcome_of(error)
        return Borrow(outcomes)
    outcomes[:] = np.where(addresses >= 0, Outcome.HIT, Outcome.MISS)
    if outcome is not Outcome.HIT:
        outcomes[grant.chunks :] = outcome
    form = grant.membership.identity.formats[number]
    return Borrow(outcomes, _Lent(match, form, regions, addresses.tolist()))
