"""Promotion: chunks come from the SSD into the memory, for a lease that names them.

It is a publication of the store's own: room is reserved below what is there already, the bytes are
read into it and compared with their sums, and what is right becomes visible in chain order. So
everything that holds for writers holds for it, and two readers of one chain share its reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.proto.errors import BusyError
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.index import LINKED, NO_ROW, Rows
from kvpool.store.leases import Lease
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import StoreSession
from kvpool.store.ssd.demotion import Memory
from kvpool.store.ssd.shelf import Shelf
from kvpool.store.ssd.tier import Read
from kvpool.store.store import Store

WINDOW_BYTES = 64 << 20
"""On their way for one chain: enough to keep a device busy."""
WINDOW_CHUNKS = 8
"""At least so many, however large they are."""

_OUTCOMES = {
    Read.OK: Outcome.OK,
    Read.DAMAGED: Outcome.CORRUPT,
    Read.FAILED: Outcome.UNREACHABLE,
}


@dataclass(slots=True, eq=False)
class Cold:
    """The end of a match that is on the SSD: keys in chain order, and their rows there."""

    known: KnownNamespace
    parent: bytes
    """Key of the chunk before the first; empty if there is none."""
    keys: list[bytes]
    rows: Rows
    shelf: Shelf
    taken: int = 0
    """Chunks that are in memory now, and under the lease."""
    climb: _Climb | None = None
    outcome: Outcome = Outcome.HIT
    """Why the last try ended early; HIT while there is no reason."""

    def end(self) -> None:
        """The lease has ended."""
        self.shelf.unprotect(self.rows[self.taken :])

    @property
    def left(self) -> int:
        return len(self.keys) - self.taken


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of a climb: `numbers` are its open items in the write lease."""

    key: bytes
    row: Rows
    lease: bytes
    numbers: list[int]
    verdict: Read | None = None


@dataclass(slots=True, eq=False)
class _Climb:
    """One chain on its way up: chunks are reserved and read ahead, and committed in order."""

    known: KnownNamespace
    parent: bytes
    keys: list[bytes]
    upto: int
    asked: int = 0
    """Chunks that were reserved, found in memory, or given up."""
    chunks: list[_Chunk] = field(default_factory=list)
    """Reserved, in order, and not committed yet."""
    obstacle: Outcome = Outcome.HIT
    """Why no more chunks are asked for; HIT while there is no reason."""
    broken: bool = False
    """A chunk could not be read: nothing after it can be committed."""


class Promotion:
    """Moves chunks of `shelf` into `store`."""

    def __init__(self, store: Store, shelf: Shelf, memory: Memory) -> None:
        self._store = store
        self._shelf = shelf
        self._memory = memory
        self._sessions: dict[str, StoreSession] = {}
        self._climbs: dict[bytes, _Climb] = {}
        self.promoted_chunks = 0
        self.failed_chunks = 0

    @property
    def chunks(self) -> int:
        """On their way."""
        return len(self._climbs)

    def advance(self, lease: Lease, cold: Cold, upto: int) -> bool:
        """Takes what has arrived under `lease`, and brings the first `upto` chunks of `cold` on
        their way. True while more is to come; if not, and some are left, `cold.outcome` says why.
        """
        upto = min(upto, len(cold.keys))
        self._take(lease, cold)
        if cold.taken >= upto:
            return False
        climb = self._climbs.get(cold.keys[cold.taken])
        if climb is None:
            if cold.climb is not None and cold.climb.obstacle is not Outcome.HIT:
                cold.outcome, cold.climb = cold.climb.obstacle, None
                return False
            if self._shelf.tier.down:
                cold.outcome = Outcome.UNREACHABLE
                return False
            climb = _Climb(cold.known, cold.parent, cold.keys, upto, asked=cold.taken)
            cold.climb = climb
        if climb is cold.climb:  # others may go another way from some chunk on
            climb.upto = max(climb.upto, upto)
            self._fill(climb)
        self._take(lease, cold)
        if cold.taken >= upto or cold.keys[cold.taken] in self._climbs:
            return cold.taken < upto
        cold.outcome, cold.climb = climb.obstacle, None
        return False

    def start(self, known: KnownNamespace, parent: bytes, keys: list[bytes]) -> bool:
        """Brings `keys`, which follow `parent` (empty: none) in memory, on their way for whoever
        comes for them. False if they cannot be had."""
        if keys[0] in self._climbs:
            return True
        climb = _Climb(known, parent, keys, len(keys))
        self._fill(climb)
        return climb.obstacle in (Outcome.HIT, Outcome.BUSY)

    def wait_s(self, cold: Cold) -> float:
        """When it is worth to ask again, in seconds."""
        return self._shelf.tier.estimate_s(sum(cold.known.extent_bytes))

    def _take(self, lease: Lease, cold: Cold) -> None:
        """What is in memory now is held there, and not on the SSD any more."""
        store, known = self._store, cold.known
        need, found = known.prefix_mask, []
        for key in cold.keys[cold.taken :]:
            row = store.index.find_one(known.id, key)
            if row == NO_ROW or store.index.state_at[row] != LINKED:
                break
            resident = store.index.resident_at[row]
            if not resident or resident & need != need:
                break
            found.append(row)
        if found:
            rows = np.array(found, np.intp)
            store.extend(lease, rows)
            self._shelf.unprotect(cold.rows[cold.taken : cold.taken + len(found)])
            cold.taken += len(found)

    # ---- one chain

    def _fill(self, climb: _Climb) -> None:
        """Reserves and reads on, as far as the window has room."""
        size = sum(climb.known.extent_bytes)
        while climb.asked < climb.upto and climb.obstacle is Outcome.HIT:
            room = max(WINDOW_CHUNKS, WINDOW_BYTES // size) - len(climb.chunks)
            count = min(room, climb.upto - climb.asked, self._store.options.reserve_max)
            if count <= 0:
                break
            self._reserve(climb, climb.keys[climb.asked : climb.asked + count])

    def _reserve(self, climb: _Climb, keys: Sequence[bytes]) -> None:
        store, known = self._store, climb.known
        session = self._session(known.tenant)
        parent = climb.keys[climb.asked - 1] if climb.asked else climb.parent
        try:
            reservation = store.reserve(session, known.id, parent, b"".join(keys))
        except BusyError:
            climb.obstacle = Outcome.BUSY
            return
        outcomes = reservation.outcomes
        parts = outcomes.shape[1]
        extents = np.frombuffer(reservation.extents, np.int64).reshape(-1, 2)
        for i, key in enumerate(keys):
            open_parts = [j for j in range(parts) if outcomes[i, j] == Outcome.OK]
            if climb.obstacle is Outcome.HIT:
                climb.obstacle = _obstacle(outcomes[i].tolist())
            shelf_row = self._shelf.find(known, key)
            if climb.obstacle is Outcome.HIT and shelf_row == NO_ROW and open_parts:
                climb.obstacle = Outcome.MISS
            numbers = [i * parts + j for j in open_parts]
            if climb.obstacle is not Outcome.HIT:
                if numbers:
                    store.abort(session, reservation.lease, numbers)
                continue
            climb.asked += 1
            if numbers:
                addresses = [int(extents[number, 0]) for number in numbers]
                self._read(climb, key, shelf_row, reservation.lease, numbers, addresses)

    def _read(
        self,
        climb: _Climb,
        key: bytes,
        shelf_row: int,
        lease_id: bytes,
        numbers: list[int],
        addresses: list[int],
    ) -> None:
        shelf, known = self._shelf, climb.known
        parts = len(known.extent_bytes)
        wanted = [number % parts for number in numbers]
        extents = shelf.extents(shelf_row, wanted)
        found = {extent.part: extent for extent in extents}
        session = self._session(known.tenant)
        absent = [number for number in numbers if number % parts not in found]
        if absent:
            self._store.abort(session, lease_id, absent)
        kept = [(n, a) for n, a in zip(numbers, addresses, strict=True) if n not in absent]
        if not kept:
            return
        lease = self._store.leases.get(lease_id, known.tenant)
        assert lease is not None and lease.items is not None
        for number, _ in kept:  # the bytes say which write they are: that stays
            generation = found[number % parts].generation
            lease.items[number] = lease.items[number]._replace(generation=generation)
        row = np.array([shelf_row], np.intp)
        chunk = _Chunk(key, row, lease_id, [number for number, _ in kept])
        climb.chunks.append(chunk)
        self._climbs[key] = climb
        shelf.protect(row)
        targets = [self._memory(a, known.extent_bytes[n % parts]) for n, a in kept]
        forms = shelf.forms(known)

        def done(verdict: Read, why: str) -> None:
            shelf.unprotect(row)
            chunk.verdict = verdict
            if verdict is Read.DAMAGED:
                shelf.remove(known, key, Reason.QUARANTINED, damaged=True)
            self._settle(climb)

        shelf.tier.read(key, extents, targets, [forms[one.part] for one in extents], done)

    def _settle(self, climb: _Climb) -> None:
        """Commits what has arrived in order; gives back what came after a failure."""
        store, known = self._store, climb.known
        session = self._session(known.tenant)
        while climb.chunks and not climb.broken:
            chunk = climb.chunks[0]
            if chunk.verdict is None:
                break
            outcome = _OUTCOMES[chunk.verdict]
            if chunk.verdict is Read.OK:
                outcomes = store.commit(session, chunk.lease, chunk.numbers, promoted=True)
                outcome = next((one for one in outcomes if one is not Outcome.OK), Outcome.OK)
            if outcome is not Outcome.OK:
                climb.broken, climb.obstacle = True, outcome
                break
            self.promoted_chunks += 1
            self._forget(climb, chunk)
        if climb.broken:
            for chunk in [one for one in climb.chunks if one.verdict is not None]:
                store.abort(session, chunk.lease, chunk.numbers)
                self.failed_chunks += 1
                self._forget(climb, chunk)
        self._fill(climb)

    def _forget(self, climb: _Climb, chunk: _Chunk) -> None:
        climb.chunks.remove(chunk)
        del self._climbs[chunk.key]

    def _session(self, tenant: str) -> StoreSession:
        session = self._sessions.get(tenant)
        if session is None:
            session = self._sessions[tenant] = self._store.open_session(tenant, mapped=True)
        return session


def _obstacle(outcomes: Sequence[int]) -> Outcome:
    """Why a chunk cannot be brought up now; HIT if it can, or need not be."""
    for outcome in outcomes:
        if outcome not in (Outcome.OK, Outcome.EXISTS):
            return Outcome(outcome)
    return Outcome.HIT
