"""Borrowing: views of matched KV in the store's own memory, without a copy."""

from __future__ import annotations

import time

import numpy as np

from kvpool.client.effects import Steps
from kvpool.client.extents import PartFormat
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

    __slots__ = ("_column", "_form", "_match", "_regions", "outcomes")

    def __init__(
        self, match: Match, outcomes: Outcomes, form: PartFormat | None, regions: Regions | None
    ) -> None:
        self._match = match
        self._form = form
        self._regions = regions
        self.outcomes = outcomes

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def ok(self) -> bool:
        """All chunks have their view."""
        return bool((self.outcomes == Outcome.HIT).all())

    def __getitem__(self, chunk: int) -> Bytes:
        """The payload of one chunk."""
        grant, form = self._match.grant, self._form
        if self.outcomes[chunk] != Outcome.HIT or not grant or not form or not self._regions:
            return np.empty(0, np.uint8)
        address = int(grant.extents[chunk, grant.parts.index(form.number), 0])
        view = self._regions.view(address, form.extent_bytes)[form.prologue :]
        return np.asarray(_Lent(view, self._match))

    @property
    def views(self) -> list[Bytes]:
        """The payloads of all chunks."""
        return [self[chunk] for chunk in range(len(self))]


class _Lent:
    """Memory as a read-only array interface that keeps the match alive."""

    def __init__(self, view: Bytes, match: Match) -> None:
        self._keep = view, match
        self.__array_interface__ = {
            **view.__array_interface__,
            "data": (view.__array_interface__["data"][0], True),
        }


def borrow(match: Match, namespace: Namespace, part: str | None) -> Steps[Borrow]:
    """See `Session.borrow`."""
    number = part_number(namespace, match, part)
    grant = match.grant
    outcomes: Outcomes = np.full(match.chunks, Outcome.STALE_EPOCH, np.uint8)
    if grant is None:
        return Borrow(match, outcomes, None, None)
    if time.monotonic() >= grant.deadline:
        outcomes[:] = Outcome.EXPIRED
        return Borrow(match, outcomes, None, None)
    connection = grant.membership.connection
    if not connection.mapped:
        raise InvalidError("this session may not map the store's memory: pull instead")
    addresses = grant.extents[:, grant.parts.index(number), 0]
    form = grant.membership.identity.formats[number]
    try:
        match.keep_connection()
        regions = yield from connection.regions(int(addresses.max()), writable=False)
    except KvpoolError as error:
        outcomes[:] = outcome_of(error)
        return Borrow(match, outcomes, None, None)
    outcomes[:] = np.where(addresses >= 0, Outcome.HIT, Outcome.MISS)
    return Borrow(match, outcomes, form, regions)
