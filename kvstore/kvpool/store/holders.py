"""Who holds what: sessions, their leases, and what becomes of a lease when it is let go.

A TTL ends a right, never a mapping. What a session that maps the pool holds past its leases is
*quarantined*: out of reach for others, counted, and bounded per session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvpool.proto.errors import StaleError
from kvpool.proto.outcomes import Outcome
from kvpool.store.index import Rows
from kvpool.store.leases import Lease, Leases
from kvpool.store.records import StoreSession
from kvpool.store.room import Room
from kvpool.store.writes import Writes


class Holders:
    """The open sessions of a store."""

    def __init__(self, room: Room, leases: Leases, writes: Writes) -> None:
        self._room = room
        self._leases = leases
        self._writes = writes
        self._sessions: dict[int, StoreSession] = {}
        self._next_id = 1

    def __iter__(self) -> Iterator[StoreSession]:
        return iter(self._sessions.values())

    def open(self, tenant: str, *, mapped: bool) -> StoreSession:
        session = StoreSession(self._next_id, tenant, mapped)
        self._next_id += 1
        self._sessions[session.id] = session
        return session

    def close(self, session: StoreSession) -> None:
        """The client is gone and so are its mappings: everything it held comes back."""
        self._sessions.pop(session.id, None)
        self._end_all(self._leases.close_session(session.id))

    def check_open(self, session: StoreSession) -> None:
        """Raises `StaleError` if the session is closed."""
        if session.id not in self._sessions:
            raise StaleError("the session is closed; open a new one")

    def over_quarantine(self, session: StoreSession) -> bool:
        """Whether the session holds more past its leases than it may."""
        if not session.quarantined_bytes:
            return False
        return session.quarantined_bytes > self.quarantine_bound

    @property
    def quarantine_bound(self) -> int:
        """Bytes that one session may hold past its leases."""
        return int(self._room.options.quarantine_share * self._room.capacity_bytes)

    def release(self, session: StoreSession, lease_id: bytes) -> Outcome:
        """See `Store.release`."""
        lease = self._leases.get(lease_id, session.tenant)
        ended = self._leases.release(session.id, lease) if lease is not None else None
        if lease is None or ended is None:
            return Outcome.STALE_EPOCH
        if lease.expired and session.id not in lease.holders:
            session.quarantined_bytes -= lease.nbytes
        if ended:
            self._end(lease)
        return Outcome.OK

    def give_back(self, session: StoreSession, lease: Lease, number: int) -> None:
        """The session closes an open item of its write lease, overdue or not."""
        nbytes = self._writes.close(lease, number).nbytes
        lease.nbytes -= nbytes
        if lease.expired:
            session.quarantined_bytes -= nbytes

    def expire(self, now: float) -> int:
        """Ends the rights, and where nobody maps the pool also the leases; returns how many."""
        expired = self._leases.expire(now)
        if not expired:
            return 0
        ended: list[Lease] = []
        for lease in expired:
            if lease.items is not None:
                known = self._room.namespaces.by_id[lease.namespace]
                lease.nbytes = self._writes.overdue(known, lease)
            for holder in list(lease.holders):
                session = self._sessions[holder]
                if session.mapped:
                    session.quarantined_bytes += lease.nbytes
                elif self._leases.drop(holder, lease):
                    ended.append(lease)
        self._end_all(ended)
        return len(expired)

    def _end(self, lease: Lease) -> None:
        """Its last holder is gone."""
        known = self._room.namespaces.by_id[lease.namespace]
        if lease.items is not None:
            self._writes.end(known, lease)
        else:
            self._room.unprotect(known, lease.rows)
        if lease.cold is not None:
            lease.cold.end()

    def _end_all(self, leases: Sequence[Lease]) -> None:
        """As `_end`, faster for many."""
        read: dict[int, list[Rows]] = {}
        for lease in leases:
            if lease.items is not None or lease.cold is not None:
                self._end(lease)
            else:
                read.setdefault(lease.namespace, []).append(lease.rows)
        for namespace, rows in read.items():
            known = self._room.namespaces.by_id[namespace]
            distinct, counts = np.unique(np.concatenate(rows), return_counts=True)
            self._room.unprotect_by(known, distinct, counts)
