"""Leases: capabilities to read or write extents, held by sessions.

A lease is named by 128 random bits and belongs to one tenant. `adopt` adds a holder (a scheduler
matches, its workers pull); the lease ends with its last holder. A TTL ends the *right*, never the
mapping: an expired lease keeps its extents until every holder has released it or is gone, because
a holder may still be copying. Pure bookkeeping: what a lease protects is counted by the store.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvpool.store.index import Rows

if TYPE_CHECKING:
    from kvpool.store.ssd.promotion import Cold

_NAMES = 64
"""Names drawn at once."""


class WriteItem(NamedTuple):
    """One extent being written: part `part` of `row`."""

    row: int
    part: int
    address: int
    nbytes: int
    generation: int


@dataclass(slots=True, eq=False)
class Lease:
    """`rows` are protected while the lease lives. Of a write lease they are the chain that it
    extends, parent first, and `items` what is still open, by number in the reservation."""

    id: bytes
    tenant: str
    namespace: int
    rows: Rows
    deadline: float
    nbytes: int
    items: dict[int, WriteItem] | None = None
    holders: dict[int, int] = field(default_factory=dict)
    expired: bool = False
    cold: Cold | None = None
    """What it protects in a slower tier."""


class Leases:
    """All live leases of a store. `entropy(n)` gives n unpredictable bytes."""

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self._entropy = entropy
        self._names: list[bytes] = []
        self._live: dict[bytes, Lease] = {}
        self._held: defaultdict[int, dict[bytes, Lease]] = defaultdict(dict)
        self._deadlines: list[tuple[float, bytes]] = []
        self.opened = 0
        self.ended = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def get(self, lease_id: bytes, tenant: str) -> Lease | None:
        """The live lease of that name, if it is this tenant's."""
        lease = self._live.get(lease_id)
        return lease if lease is not None and lease.tenant == tenant else None

    def grant(
        self,
        session: int,
        tenant: str,
        namespace: int,
        rows: Rows,
        deadline: float,
        nbytes: int,
        items: dict[int, WriteItem] | None = None,
    ) -> Lease:
        """A new lease held once by `session` until `deadline` (store clock, seconds)."""
        name = self._name()
        lease = Lease(name, tenant, namespace, rows, deadline, nbytes, items, {session: 1})
        self._live[name] = self._held[session][name] = lease
        self.opened += 1
        heapq.heappush(self._deadlines, (deadline, name))
        return lease

    def _name(self) -> bytes:
        """128 fresh random bits, drawn in blocks because a system call costs a microsecond."""
        if not self._names:
            drawn = self._entropy(16 * _NAMES)
            self._names = [drawn[at : at + 16] for at in range(0, len(drawn), 16)]
        return self._names.pop()

    def adopt(self, session: int, lease: Lease) -> None:
        """Adds a holder; a session may hold a lease several times."""
        lease.holders[session] = lease.holders.get(session, 0) + 1
        self._held[session][lease.id] = lease

    def renew(self, lease: Lease, deadline: float) -> None:
        """Moves the deadline out, never in. REQUIRES: not expired."""
        if deadline > lease.deadline:
            lease.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, lease.id))

    def release(self, session: int, lease: Lease) -> bool | None:
        """Takes one holding of `session` back; True if the lease ended, None if it held none."""
        holdings = lease.holders.get(session, 0)
        if not holdings:
            return None
        if holdings > 1:
            lease.holders[session] = holdings - 1
            return False
        return self.drop(session, lease)

    def drop(self, session: int, lease: Lease) -> bool:
        """Takes all holdings of `session` back; True if the lease ended. REQUIRES: it holds it."""
        del lease.holders[session]
        held = self._held[session]
        del held[lease.id]
        if not held:
            del self._held[session]
        if lease.holders:
            return False
        del self._live[lease.id]
        self.ended += 1
        return True

    def close_session(self, session: int) -> list[Lease]:
        """Drops every holding of `session`; returns the leases that ended."""
        return [lease for lease in self.held_by(session) if self.drop(session, lease)]

    def held_by(self, session: int) -> list[Lease]:
        return list(self._held.get(session, {}).values())

    def expire(self, now: float) -> list[Lease]:
        """Marks and returns the leases whose time is over. O(expired log n)."""
        out = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._live.get(heapq.heappop(self._deadlines)[1])
            if lease is not None and not lease.expired and lease.deadline <= now:
                lease.expired = True
                out.append(lease)
        # Releases and renewals leave entries behind; keep them a bounded share of the heap.
        if len(self._deadlines) > 64 + 2 * len(self._live):
            self._deadlines = [
                (lease.deadline, lease.id) for lease in self._live.values() if not lease.expired
            ]
            heapq.heapify(self._deadlines)
        return out

    def check_integrity(self) -> None:
        """Asserts that holders and sessions mirror each other, and that each lease can expire."""
        assert self.opened - self.ended == len(self._live)
        due = set(self._deadlines)
        for lease in self._live.values():
            assert lease.holders, "a live lease without holder"
            assert lease.expired or (lease.deadline, lease.id) in due, "a lease that never expires"
            for session, count in lease.holders.items():
                assert count > 0 and self._held[session][lease.id] is lease
        for session, held in self._held.items():
            assert held, "a session that holds nothing is kept"
            for lease in held.values():
                assert self._live[lease.id] is lease and session in lease.holders
