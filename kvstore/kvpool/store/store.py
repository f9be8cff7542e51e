"""The store's decisions: match, reserve, commit, release, evict. Pure: no byte of KV, no socket,
thread, file or clock of its own passes here; clock and entropy are injected.

    publish   reserve ──► (the writer fills the extents) ──► commit        abort, expiry: undone
    pull      match ────► (the reader copies) ──► release                  adopt adds a holder

Every public method is one transaction: it leaves the structures consistent (`check_integrity`).
Per-key answers are outcomes; errors are raised only for requests that contradict themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.proto.chunk import extent_bytes
from kvpool.proto.errors import BusyError, DeniedError, InvalidError, TooLargeError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.allocator import SlabAllocator, segment_size
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Policy
from kvpool.store.ghosts import Ghosts
from kvpool.store.index import LINKED, NO_ROW, ORPHAN, ROOT, UNLINKED, Index, Rows
from kvpool.store.leases import Lease, Leases, WriteItem

NO_EXTENT = (-1, 0)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What one store is told at birth.

    `chunks` bounds the index (rows), `segment_bytes` 0 lets the first namespace decide:
    max(64 MiB, 8 chunks), at most an eighth of the first regions so that classes can coexist.
    """

    region_bytes: int
    chunks: int
    segment_bytes: int = 0
    policy: str = "lru"
    lease_s: float = 30.0
    lease_s_max: float = 3600.0
    reserve_max: int = 128
    quarantine_share: float = 0.25
    """Share of the capacity that one session may hold past its leases before it gets BUSY."""


@dataclass(slots=True)
class KnownNamespace:
    """A namespace that somebody opened, with what follows from it."""

    id: int
    tenant: str
    namespace: Namespace
    digest: bytes
    extent_bytes: tuple[int, ...]
    shape: tuple[int, ...]
    prefix_mask: int
    windows: tuple[tuple[int, int], ...]
    """(part, chunks): parts that a hit needs only for its last chunks."""
    published: int = 0
    hit_chunks: int = 0
    missed: int = 0


@dataclass(slots=True)
class StoreSession:
    """One connected client. `mapped` sessions copy by themselves, so their extents outlive TTLs."""

    id: int
    tenant: str
    mapped: bool
    quarantined_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """`hits` leading chunks are servable; `extents` is (hits, parts, 2) int64 as bytes."""

    hits: int
    outcome: Outcome
    reason: Reason
    lease: bytes = b""
    lease_s: float = 0.0
    extents: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """`outcomes` is (n, parts) uint8; `extents` like a match's, (-1, 0) where not OK."""

    outcomes: npt.NDArray[np.uint8]
    lease: bytes
    lease_s: float
    extents: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where one chunk is and what holds it, or why it is not there."""

    outcome: Outcome
    reason: Reason
    parts: int = 0
    nbytes: int = 0
    leases: int = 0
    pins: int = 0
    age_s: float = 0.0
    children: int = 0


@dataclass(slots=True)
class _Pin:
    rows: list[int]
    deadline: float


@dataclass(slots=True)
class Counters:
    """Events since the start; they only grow."""

    matches: int = 0
    hit_chunks: int = 0
    missed_matches: int = 0
    published_chunks: int = 0
    published_bytes: int = 0
    evicted_chunks: int = 0
    reassigned_segments: int = 0
    deleted_chunks: int = 0
    corrupt_chunks: int = 0
    busy: int = 0
    expired_leases: int = 0
    hints: int = 0


@dataclass(slots=True)
class _Plan:
    """One reserve in progress: a row per chunk (NO_ROW: none yet), an outcome per (chunk, part),
    an address per item that may be written, and the rows that are protected meanwhile."""

    rows: list[int]
    indices: tuple[int, ...]
    outcomes: npt.NDArray[np.uint8]
    protected: list[int]
    addresses: dict[tuple[int, int], int] = field(default_factory=dict)


class Store:
    """The index, allocator, leases and eviction of one trust domain's DRAM."""

    def __init__(
        self,
        options: StoreOptions,
        *,
        clock: Callable[[], float],
        entropy: Callable[[int], bytes],
    ) -> None:
        self.options = options
        self.clock = clock
        self.epoch = int.from_bytes(entropy(8), "little") >> 1 or 1
        self.index = Index(options.chunks, int.from_bytes(entropy(8), "little"))
        self.leases = Leases(entropy)
        self.counters = Counters()
        self.ghosts = Ghosts()
        self.regions = 0
        self.allocator: SlabAllocator | None = None
        self.namespaces: dict[int, KnownNamespace] = {}
        self.policies: dict[tuple[int, ...], Policy] = {}
        self._by_identity: dict[tuple[str, bytes], KnownNamespace] = {}
        self._sessions: dict[int, StoreSession] = {}
        self._pins: dict[tuple[int, bytes], _Pin] = {}
        self._next_session = 1
        self._next_generation = 1
        self._touched: list[tuple[KnownNamespace, Rows, float]] = []
        self._touched_rows = 0

    # ---- capacity, sessions, namespaces

    def add_region(self) -> None:
        """The pool has grown by one region of `options.region_bytes`."""
        self.regions += 1
        if self.allocator is not None:
            self.allocator.add_region()

    @property
    def capacity_bytes(self) -> int:
        return self.regions * self.options.region_bytes

    def open_session(self, tenant: str, *, mapped: bool) -> StoreSession:
        session = StoreSession(self._next_session, tenant, mapped)
        self._next_session += 1
        self._sessions[session.id] = session
        return session

    def close_session(self, session: StoreSession) -> None:
        """The client is gone and so are its mappings: everything it held comes back."""
        self._sessions.pop(session.id, None)
        for lease in self.leases.close_session(session.id):
            self._end(lease)

    def open_namespace(self, tenant: str, namespace: Namespace) -> tuple[KnownNamespace, str]:
        """The namespace of `tenant`, and a warning if it can never meet one that is known."""
        digest = namespace.digest(tenant)
        known = self._by_identity.get((tenant, digest))
        if known is not None:
            return known, ""
        sizes = tuple(extent_bytes(part) for part in namespace.parts)
        allocator = self._allocator_for(max(sizes))
        chunk = namespace.chunk_tokens
        known = KnownNamespace(
            id=len(self.namespaces) + 1,
            tenant=tenant,
            namespace=namespace,
            digest=digest,
            extent_bytes=sizes,
            shape=tuple(sorted(allocator.slot_bytes(size) for size in sizes)),
            prefix_mask=sum(1 << i for i, p in enumerate(namespace.parts) if p.window is None),
            windows=tuple(
                (i, -(-p.window // chunk)) for i, p in enumerate(namespace.parts) if p.window
            ),
        )
        warning = self._near_miss(known)
        self.namespaces[known.id] = known
        self._by_identity[tenant, digest] = known
        self.index.ensure_parts(len(namespace.parts))
        return known, warning

    def _near_miss(self, new: KnownNamespace) -> str:
        for other in self.namespaces.values():
            if (
                other.tenant == new.tenant
                and other.namespace.without_layout() == new.namespace.without_layout()
            ):
                difference = "; ".join(new.namespace.differences(other.namespace))
                return (
                    f"namespace {new.digest.hex()[:16]} can never share KV with "
                    f"{other.digest.hex()[:16]} of the same model (new / known): {difference}"
                )
        return ""

    def _allocator_for(self, nbytes: int) -> SlabAllocator:
        """The allocator; the first namespace decides the segment size. Raises `TooLargeError`."""
        region = self.options.region_bytes
        if nbytes > region:
            raise TooLargeError(
                f"a part of {nbytes} bytes exceeds the region of {region} bytes; raise --capacity"
            )
        if self.allocator is None:
            ideal = self.options.segment_bytes
            if not ideal:
                few = max(nbytes, self.capacity_bytes // 8)
                ideal = min(max(64 << 20, 8 * nbytes), few)
            self.allocator = SlabAllocator(region, segment_size(region, ideal))
            for _ in range(self.regions):
                self.allocator.add_region()
        self.allocator.slot_bytes(nbytes)
        return self.allocator

    def known(self, session: StoreSession, namespace: int) -> KnownNamespace:
        """The namespace that `session` opened under this id. Raises `DeniedError`."""
        known = self.namespaces.get(namespace)
        if known is None or known.tenant != session.tenant:
            raise DeniedError(f"namespace {namespace} was not opened by tenant {session.tenant!r}")
        return known

    # ---- reading

    def match(
        self,
        session: StoreSession,
        namespace: int,
        keys: bytes,
        parts: int = 0,
        lease_s: float = 0.0,
        peek: bool = False,
    ) -> Match:
        """The longest run of leading `keys` whose needed parts are servable, under a lease.

        Raises `InvalidError`, `DeniedError`, and `BusyError` when the session is over its
        quarantine bound.
        """
        known = self.known(session, namespace)
        count = _key_count(keys)
        mask = known.namespace.part_mask(None) if not parts else parts
        indices = known.namespace.part_indices(mask)
        rows, lines = self.index.find_lines(namespace, keys)
        hits = self._servable(known, mask, rows, lines)
        outcome, reason = Outcome.HIT, Reason.UNKNOWN
        if hits < count:
            outcome = Outcome.MISS
            reason = self._why(known, mask, keys, rows, lines, hits)
        if peek:
            return Match(hits, outcome, reason)
        self.counters.matches += 1
        self.counters.hit_chunks += hits
        known.hit_chunks += hits
        if hits < count:
            self.counters.missed_matches += 1
            known.missed += 1
        if not hits:
            return Match(0, outcome, reason)
        self._check_quarantine(session)
        rows = rows[:hits]
        now = self.clock()
        extents = self._extents(known, indices, rows, lines["resident"][:hits])
        self.index.leases[rows] += 1
        ttl = self._ttl(lease_s)
        nbytes = hits * sum(known.extent_bytes[i] for i in indices)
        lease = self.leases.grant(session.id, session.tenant, namespace, rows, now + ttl, nbytes)
        self._touch(known, rows, now)
        return Match(hits, outcome, reason, lease.id, ttl, extents)

    def _servable(
        self, known: KnownNamespace, mask: int, rows: Rows, lines: npt.NDArray[np.void]
    ) -> int:
        """Number of leading chunks that a reader of the parts `mask` can use."""
        need = np.uint64(mask & known.prefix_mask)
        good = (rows >= 0) & (lines["resident"] & need == need) & (lines["resident"] != 0)
        hits = len(rows) if good.all() else int(good.argmin())
        if hits and lines["parent"][0] == ORPHAN:
            return 0
        for part, chunks in known.windows:
            if hits and mask >> part & 1:
                hits = _last_window(lines["resident"][:hits] >> np.uint64(part) & 1, chunks)
        orphaned = np.flatnonzero(lines["parent"][1:hits] == ORPHAN)
        for i in orphaned.tolist():  # its parent has been published again: back into the chain
            self.index.adopt(int(rows[i + 1]), int(rows[i]))
        return hits

    def _why(
        self,
        known: KnownNamespace,
        mask: int,
        keys: bytes,
        rows: Rows,
        lines: npt.NDArray[np.void],
        at: int,
    ) -> Reason:
        row = int(rows[at])
        if row == NO_ROW:
            return self.ghosts.reason(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        if at == 0 and lines["parent"][0] == ORPHAN:
            return Reason.ORPHAN
        resident = int(lines["resident"][at])
        if int(self.index.writing[row]) & mask & ~resident:
            return Reason.BEING_WRITTEN
        return Reason.PART_MISSING if resident else Reason.NEVER_STORED

    def _extents(
        self,
        known: KnownNamespace,
        indices: Sequence[int],
        rows: Rows,
        resident: npt.NDArray[np.uint64],
    ) -> bytes:
        if len(indices) == 1 and not known.windows:
            return self.index.extents[indices[0]].take(rows, axis=0).tobytes()
        columns = [self.index.extents[part].take(rows, axis=0) for part in indices]
        for column, part in zip(columns, indices, strict=True):
            column[resident >> np.uint64(part) & 1 == 0] = NO_EXTENT
        return np.stack(columns, axis=1).tobytes()

    def adopt(self, session: StoreSession, lease_id: bytes, parts: int = 0) -> Match:
        """Adds `session` as a holder of a read lease and tells it the extents of `parts`.

        The answer's outcome is HIT, EXPIRED or STALE_EPOCH (no such lease in this life).
        """
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None:
            return Match(0, Outcome.STALE_EPOCH, Reason.UNKNOWN)
        if lease.writes:
            raise InvalidError("a write lease cannot be adopted; the writer publishes by itself")
        if lease.expired or lease.deadline <= self.clock():
            return Match(0, Outcome.EXPIRED, Reason.UNKNOWN)
        self._check_quarantine(session)
        known = self.namespaces[lease.namespace]
        indices = known.namespace.part_indices(parts)
        # Deleted rows stay readable for holders; their extents live until the last release.
        extents = self._extents(known, indices, lease.rows, self.index.resident[lease.rows])
        self.leases.adopt(session.id, lease)
        remaining = lease.deadline - self.clock()
        return Match(len(lease.rows), Outcome.HIT, Reason.UNKNOWN, lease.id, remaining, extents)

    def release(self, session: StoreSession, lease_id: bytes) -> Outcome:
        """Takes one holding back. OK, or STALE_EPOCH if the session does not hold it."""
        lease = self.leases.get(lease_id, session.tenant)
        ended = self.leases.release(session.id, lease) if lease is not None else None
        if lease is None or ended is None:
            return Outcome.STALE_EPOCH
        if lease.expired and session.id not in lease.holders:
            session.quarantined_bytes -= lease.nbytes
        if ended:
            self._end(lease)
        return Outcome.OK

    def renew(self, session: StoreSession, lease_id: bytes, lease_s: float = 0.0) -> Outcome:
        """Extends a lease that has not expired; its chunks count as used."""
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None or session.id not in lease.holders:
            return Outcome.STALE_EPOCH
        now = self.clock()
        if lease.expired or lease.deadline <= now:
            return Outcome.EXPIRED
        self.leases.renew(lease, now + self._ttl(lease_s))
        if not lease.writes:
            rows = lease.rows[self.index.state[lease.rows] == LINKED]
            self._touch(self.namespaces[lease.namespace], rows, now)
        return Outcome.OK

    # ---- writing

    def reserve(
        self,
        session: StoreSession,
        namespace: int,
        parent: bytes,
        keys: bytes,
        parts: int = 0,
        lease_s: float = 0.0,
    ) -> Reservation:
        """Room for `parts` of the chunks `keys`, which follow one another and `parent`.

        Per item: OK, EXISTS, WRITING, NO_PARENT or BUSY. Room is made in chain order, so what
        does not fit is a tail. Raises `InvalidError`, `DeniedError`, `BusyError` (quarantine).
        """
        known = self.known(session, namespace)
        count = _key_count(keys)
        names = [keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count)]
        self._check_reserve(names, parent)
        self._check_quarantine(session)
        self._flush_touches()
        indices = known.namespace.part_indices(parts)
        parent_row = self.index.find_one(namespace, parent) if parent else ROOT
        outcomes = np.full((count, len(indices)), Outcome.OK, np.uint8)
        if parent and (parent_row == NO_ROW or self.index.parent[parent_row] == ORPHAN):
            outcomes[:] = Outcome.NO_PARENT
            return Reservation(outcomes, b"", 0.0, _no_extents(outcomes).tobytes(), "")
        rows = [self.index.find_one(namespace, name) for name in names]
        plan = _Plan(rows, indices, outcomes, [row for row in (parent_row, *rows) if row >= 0])
        self.index.leases[plan.protected] += 1
        self._find_room(known, plan)
        self._insert_rows(known, names, parent_row, plan)
        return self._grant_write(session, known, plan, self._ttl(lease_s))

    def _check_reserve(self, names: Sequence[bytes], parent: bytes) -> None:
        limit = self.options.reserve_max
        if not 1 <= len(names) <= limit:
            raise InvalidError(f"{len(names)} chunks in one reserve; 1 to {limit} are allowed")
        if len({*names, parent}) != len(names) + 1:
            raise InvalidError("the chain holds the same key twice")

    def _find_room(self, known: KnownNamespace, plan: _Plan) -> None:
        """Decides each item: stored, being written, given an address, or BUSY."""
        resident = [int(self.index.resident[row]) if row >= 0 else 0 for row in plan.rows]
        writing = [int(self.index.writing[row]) if row >= 0 else 0 for row in plan.rows]
        for j, part in enumerate(plan.indices):
            wanted: list[int] = []
            for i in range(len(plan.rows)):
                if resident[i] >> part & 1:
                    plan.outcomes[i, j] = Outcome.EXISTS
                elif writing[i] >> part & 1:
                    plan.outcomes[i, j] = Outcome.WRITING
                else:
                    wanted.append(i)
            addresses = self._allocate(known.extent_bytes[part], len(wanted))
            plan.addresses.update(((i, j), a) for i, a in zip(wanted, addresses, strict=False))
            plan.outcomes[wanted[len(addresses) :], j] = Outcome.BUSY

    def _insert_rows(
        self, known: KnownNamespace, names: Sequence[bytes], parent_row: int, plan: _Plan
    ) -> None:
        """Gives every chunk with an address a row; the chain ends at the first without."""
        previous = parent_row
        for i, name in enumerate(names):
            row = plan.rows[i]
            if row >= 0:
                if previous >= 0 and self.index.parent[row] == ORPHAN:
                    self.index.adopt(row, previous)
            elif (plan.outcomes[i] == Outcome.OK).any() and self._make_row():
                plan.rows[i] = row = self.index.insert(known.id, name, previous)
                self.index.leases[row] = 1
                plan.protected.append(row)
            else:
                return self._cut(plan, i)
            previous = row
        return None

    def _cut(self, plan: _Plan, first: int) -> None:
        """No chunk from `first` on can be linked: what they were given goes back."""
        dropped = [item for item in plan.addresses if item[0] >= first]
        for item in dropped:
            plan.outcomes[item] = Outcome.BUSY
        self._free([plan.addresses.pop(item) for item in dropped])

    def _grant_write(
        self, session: StoreSession, known: KnownNamespace, plan: _Plan, ttl: float
    ) -> Reservation:
        extents = _no_extents(plan.outcomes)
        items: dict[int, WriteItem] = {}
        for (i, j), address in sorted(plan.addresses.items()):
            part, row = plan.indices[j], plan.rows[i]
            item = WriteItem(row, part, address, known.extent_bytes[part], self._next_generation)
            self._next_generation += 1
            items[i * len(plan.indices) + j] = item
            self.index.writing[row] |= np.uint64(1 << part)
            extents[i, j] = address, item.generation
        text = ""
        if (plan.outcomes == Outcome.BUSY).any():
            self.counters.busy += 1
            text = self.busy_text()
        rows = np.array(plan.protected, np.int32)
        if not items:
            self._unprotect(known, rows)
            return Reservation(plan.outcomes, b"", 0.0, extents.tobytes(), text)
        nbytes = sum(item.nbytes for item in items.values())
        lease = self.leases.grant(
            session.id, session.tenant, known.id, rows, self.clock() + ttl, nbytes, items
        )
        return Reservation(plan.outcomes, lease.id, ttl, extents.tobytes(), text)

    def commit(
        self, session: StoreSession, lease_id: bytes, items: Sequence[int] | None = None
    ) -> list[Outcome]:
        """Makes written extents visible, in chain order; None means all that are still open.

        Per item OK, NO_PARENT (nothing is kept), EXPIRED or INVALID (no such open item). The
        lease ends with its last open item.
        """
        lease = self._write_lease(session, lease_id)
        if lease is None:
            return [Outcome.STALE_EPOCH] * (len(items) if items is not None else 1)
        wanted = items if items is not None else [n for n, i in lease.items.items() if i.open]
        now = self.clock()
        if lease.expired or lease.deadline <= now:
            return [Outcome.EXPIRED] * len(wanted)
        known = self.namespaces[lease.namespace]
        admitted: list[int] = []
        outcomes = [self._commit_item(lease, number, admitted) for number in wanted]
        if admitted:
            rows = np.array(admitted, np.int32)
            self.index.used_at[rows] = now
            self._policy(known).admit(rows)
        known.published += len(admitted)
        self.counters.published_chunks += len(admitted)
        self._end_if_done(session, lease)
        return outcomes

    def _commit_item(self, lease: Lease, number: int, admitted: list[int]) -> Outcome:
        item = lease.items.get(number) if lease.items else None
        if item is None or not item.open:
            return Outcome.INVALID
        index, row = self.index, item.row
        if index.state[row] != LINKED:  # deleted while it was being written
            self._close_item(lease, item)
            return Outcome.EXPIRED
        parent = int(index.parent[row])
        if parent == ORPHAN or (parent >= 0 and not index.resident[parent]):
            self._close_item(lease, item)
            return Outcome.NO_PARENT
        item.open = False
        bit = np.uint64(1 << item.part)
        index.extents[item.part][row] = item.address, item.generation
        if not index.resident[row]:
            admitted.append(row)
        index.resident[row] |= bit
        index.writing[row] &= ~bit
        self.counters.published_bytes += item.nbytes
        return Outcome.OK

    def abort(
        self, session: StoreSession, lease_id: bytes, items: Sequence[int] | None = None
    ) -> Outcome:
        """Gives open items back: the writer promises that nothing writes there any more."""
        lease = self._write_lease(session, lease_id)
        if lease is None:
            return Outcome.STALE_EPOCH
        for number in items if items is not None else list(lease.items or ()):
            item = lease.items.get(number) if lease.items else None
            if item is not None and item.open:
                self._close_item(lease, item)
        self._end_if_done(session, lease)
        return Outcome.OK

    def _write_lease(self, session: StoreSession, lease_id: bytes) -> Lease | None:
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None or not lease.writes or session.id not in lease.holders:
            return None
        return lease

    def _close_item(self, lease: Lease, item: WriteItem) -> None:
        """Takes the extent back. After expiry another writer may hold the row's bit."""
        item.open = False
        self._free([item.address])
        if not lease.expired:
            self.index.writing[item.row] &= ~np.uint64(1 << item.part)

    def _end_if_done(self, session: StoreSession, lease: Lease) -> None:
        if not any(item.open for item in lease.items.values()) if lease.items else True:
            self.release(session, lease.id)

    def _end(self, lease: Lease) -> None:
        """The last holder is gone."""
        for item in (lease.items or {}).values():
            if item.open:
                self._close_item(lease, item)
        self._unprotect(self.namespaces[lease.namespace], lease.rows)

    def _unprotect(self, known: KnownNamespace, rows: Rows) -> None:
        """One lease less on each of `rows`; what nothing holds any more goes its way."""
        index = self.index
        index.leases[rows] -= 1
        idle = rows[index.leases[rows] == 0]
        stored = (index.state[idle] == LINKED) & (index.resident[idle] != 0)
        if stored.any():
            self._policy(known).unblock(idle[stored])
        # Rows were protected parents first, so emptied leaves go before their parents.
        for row in reversed(idle[~stored].tolist()):
            empty = not index.children[row] and not index.writing[row]
            if index.state[row] == LINKED and empty and not index.pins[row]:
                self._unlink(known, row)
            if index.state[row] == UNLINKED:
                self._reclaim(row)

    # ---- room

    def _allocate(self, nbytes: int, count: int) -> list[int]:
        """Up to `count` addresses; evicts one victim for each that is missing."""
        allocator = self._slabs
        if not count:
            return []
        slot = allocator.slot_bytes(nbytes)
        missing = count - allocator.free_slots(nbytes)
        while missing > 0:
            freed = self._evict_one(slot)
            if not freed:
                if not self._reassign_segment(slot):
                    break
                freed = missing - (count - allocator.free_slots(nbytes))
            missing -= freed
        return [int(address) for address in allocator.allocate(nbytes, count)]

    def _evict_one(self, slot: int | None) -> int:
        """Evicts the next victim (of those with extents of class `slot`).

        Returns the number of such extents freed; 0 if nothing can be evicted.
        """
        best: tuple[float, int, tuple[int, ...]] | None = None
        for shape, policy in self.policies.items():
            if slot is None or slot in shape:
                for row in policy.victims(1).tolist():
                    candidate = (float(self.index.used_at[row]), row, shape)
                    best = min(best, candidate) if best else candidate
        if best is None:
            return 0
        self._evict(best[1])
        return best[2].count(slot) if slot is not None else 1

    def _evict(self, row: int) -> None:
        """REQUIRES: no children, lease or pin."""
        known = self.namespaces[int(self.index.namespace[row])]
        self.ghosts.add(self.index.key_bytes(row), Reason.EVICTED)
        self.counters.evicted_chunks += 1
        self._unlink(known, row)
        self._reclaim(row)

    def _make_row(self) -> bool:
        """True if the index has a free row, evicting for it if need be."""
        return self.index.room > 0 or bool(self._evict_one(None) and self.index.room > 0)

    def _reassign_segment(self, slot: int) -> bool:
        """Empties the least recently used segment of another class, descendants first.

        The declared exception to "one publish evicts one victim". O(rows), and rare.
        """
        allocator, index = self._slabs, self.index
        segments = allocator.used_segments(slot)
        if not len(segments):
            return False
        rows = index.live_rows()
        free = index.state[rows] == LINKED
        free &= (index.leases[rows] == 0) & (index.pins[rows] == 0)
        last_use = np.full(int(segments.max()) + 1, -np.inf)
        holds: list[tuple[npt.NDArray[np.int64], Rows]] = []
        for part, extents in enumerate(index.extents):
            here = (index.resident[rows] >> np.uint64(part) & 1) != 0
            at = allocator.segments_of(extents[rows[here], 0])
            inside = at < len(last_use)
            use = np.where(free[here], index.used_at[rows[here]], np.inf)
            np.maximum.at(last_use, at[inside], use[inside])
            holds.append((at, rows[here]))
        for item in self._open_items():
            segment = int(allocator.segments_of(np.array([item.address]))[0])
            if segment < len(last_use):
                last_use[segment] = np.inf
        for segment in sorted(segments.tolist(), key=lambda s: float(last_use[s])):
            if last_use[segment] == np.inf:
                return False
            inside_rows = np.unique(np.concatenate([r[at == segment] for at, r in holds]))
            if self._evict_with_descendants(inside_rows.tolist()):
                self.counters.reassigned_segments += 1
                return True
        return False

    def _evict_with_descendants(self, rows: Sequence[int]) -> bool:
        """Evicts `rows` and all below them, or nothing if a lease or pin is among them."""
        doomed: dict[int, None] = {}
        for row in rows:
            if row not in doomed:
                for member in self.index.subtree(row):
                    doomed.pop(member, None)  # keep parents before children
                    doomed[member] = None
        order = np.array(list(doomed), np.int32)
        if (self.index.leases[order] != 0).any() or (self.index.pins[order] != 0).any():
            return False
        for row in reversed(order.tolist()):
            self._evict(row)
        return True

    def _open_items(self) -> Iterable[WriteItem]:
        for lease in self.leases:
            for item in (lease.items or {}).values():
                if item.open:
                    yield item

    def _unlink(self, known: KnownNamespace, row: int) -> None:
        """Takes a row out of index and policy; its children become orphans and first victims."""
        index, policy = self.index, self._policy(known)
        parent = int(index.parent[row])
        if index.resident[row]:
            policy.forget(np.array([row], np.int32))
        if index.pins[row]:
            self._drop_pins(row)
        orphans = index.unlink(row)
        for orphan in orphans:
            below = np.array(index.subtree(orphan), np.int32)
            policy.demote(below[index.resident[below] != 0])
        if parent >= 0 and self.evictable_one(parent):
            if index.resident[parent]:
                policy.unblock(np.array([parent], np.int32))
            elif not index.writing[parent]:  # an aborted chunk that only this child kept in place
                self._unlink(known, parent)
                self._reclaim(parent)

    def _reclaim(self, row: int) -> None:
        """Frees extents and row. REQUIRES: unlinked, no lease."""
        index = self.index
        resident = int(index.resident[row])
        if resident:
            parts = range(resident.bit_length())
            self._free([int(index.extents[p][row, 0]) for p in parts if resident >> p & 1])
            index.resident[row] = 0
        index.release(row)

    def _free(self, addresses: Sequence[int]) -> None:
        if addresses:
            self._slabs.free(np.array(addresses, np.int64))

    def evictable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """True where a row has no children, lease or pin: the policies' view of the store."""
        index = self.index
        return (index.children[rows] == 0) & (index.leases[rows] == 0) & (index.pins[rows] == 0)

    def evictable_one(self, row: int) -> bool:
        index = self.index
        return not (index.children[row] or index.leases[row] or index.pins[row])

    # ---- pins, delete, clear

    def pin(
        self, session: StoreSession, namespace: int, keys: bytes, ttl_s: float = 0.0
    ) -> list[Outcome]:
        """Keeps the stored leading run of `keys` from eviction until unpinned or `ttl_s` passed.

        HIT per pinned chunk, MISS for the rest. Pinning the same chain again replaces its pin.
        """
        known = self.known(session, namespace)
        count = _key_count(keys)
        self._flush_touches()
        self.unpin(session, namespace, keys)
        rows, lines = self.index.find_lines(namespace, keys)
        hits = self._servable(known, known.namespace.all_parts, rows, lines)
        pinned: list[int] = list(dict.fromkeys(rows[:hits].tolist()))
        if pinned:
            self.index.pins[pinned] += 1
            deadline = self.clock() + ttl_s if ttl_s else float("inf")
            self._pins[namespace, keys[-KEY_BYTES:]] = _Pin(pinned, deadline)
        return [Outcome.HIT] * hits + [Outcome.MISS] * (count - hits)

    def unpin(self, session: StoreSession, namespace: int, keys: bytes) -> Outcome:
        """Ends the pin of the chain that ends in the last of `keys`: OK or MISS."""
        known = self.known(session, namespace)
        _key_count(keys)
        pin = self._pins.pop((namespace, keys[-KEY_BYTES:]), None)
        if pin is None:
            return Outcome.MISS
        self._end_pin(known, pin)
        return Outcome.OK

    def _end_pin(self, known: KnownNamespace, pin: _Pin) -> None:
        rows = np.array(pin.rows, np.int32)
        self.index.pins[rows] -= 1
        if len(rows):
            self._policy(known).unblock(rows[self.index.pins[rows] == 0])

    def _drop_pins(self, row: int) -> None:
        for pin in self._pins.values():
            if row in pin.rows:
                pin.rows.remove(row)
        self.index.pins[row] = 0

    def delete(
        self, session: StoreSession, namespace: int, keys: bytes, *, corrupt: bool = False
    ) -> list[Outcome]:
        """Unlinks chunks at once: OK or MISS. Bytes under a lease are freed on last release.

        `corrupt` tells that a reader found bad bytes: counted, and said in later misses.
        """
        known = self.known(session, namespace)
        self._flush_touches()
        reason = Reason.QUARANTINED if corrupt else Reason.DELETED
        outcomes = []
        for at in range(0, _key_count(keys) * KEY_BYTES, KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            row = self.index.find_one(namespace, key)
            if row == NO_ROW:
                outcomes.append(Outcome.MISS)
                continue
            stored = bool(self.index.resident[row])
            self.ghosts.add(key, reason)
            self._unlink(known, row)
            if not self.index.leases[row]:
                self._reclaim(row)
            if corrupt:
                self.counters.corrupt_chunks += 1
            else:
                self.counters.deleted_chunks += stored
            outcomes.append(Outcome.OK if stored else Outcome.MISS)
        return outcomes

    def clear(self, session: StoreSession, namespace: int = 0) -> int:
        """Deletes every chunk of one namespace, or of all of the tenant's. Returns how many."""
        self._flush_touches()
        mine = [
            known
            for known in self.namespaces.values()
            if known.tenant == session.tenant and namespace in (0, known.id)
        ]
        if namespace and not mine:
            self.known(session, namespace)
        linked = self.index.linked_rows()
        total = 0
        for known in mine:
            rows = linked[self.index.namespace[linked] == known.id]
            stored = self.index.resident[rows] != 0
            self._policy(known).forget(rows[stored])
            for name in [name for name in self._pins if name[0] == known.id]:
                del self._pins[name]
            self.index.pins[rows] = 0
            self.index.unlink_all(rows)
            total += int(stored.sum())
            idle = self.index.leases[rows] == 0
            self._reclaim_all(rows[idle])
        self.counters.deleted_chunks += total
        return total

    def _reclaim_all(self, rows: Rows) -> None:
        for part, extents in enumerate(self.index.extents):
            here = rows[self.index.resident[rows] >> np.uint64(part) & 1 != 0]
            if len(here):
                self._slabs.free(extents[here, 0])
        self.index.resident[rows] = 0
        for row in rows.tolist():
            self.index.release(row)

    # ---- hints, time

    def hint(self, session: StoreSession, namespace: int, keys: bytes) -> list[Outcome]:
        """Counts a hint about a chain: HIT or MISS per key. Policies that listen get it too."""
        self.known(session, namespace)
        _key_count(keys)
        self.counters.hints += 1
        return [Outcome.HIT if r >= 0 else Outcome.MISS for r in self.index.find(namespace, keys)]

    def reap(self) -> None:
        """Ends what time has ended. Call it from a timer: space comes back without traffic."""
        now = self.clock()
        for lease in self.leases.expire(now):
            self.counters.expired_leases += 1
            for item in (lease.items or {}).values():
                if item.open:  # others may write the key again; the extent stays out of reach
                    self.index.writing[item.row] &= ~np.uint64(1 << item.part)
            for holder in list(lease.holders):
                session = self._sessions[holder]
                if session.mapped:
                    session.quarantined_bytes += lease.nbytes
                elif self.leases.drop(holder, lease):
                    self._end(lease)
        for name in [name for name, pin in self._pins.items() if pin.deadline <= now]:
            self._end_pin(self.namespaces[name[0]], self._pins.pop(name))
        self._flush_touches()

    def _ttl(self, lease_s: float) -> float:
        return min(lease_s or self.options.lease_s, self.options.lease_s_max)

    def _touch(self, known: KnownNamespace, rows: Rows, now: float) -> None:
        """Remembers a use; applied in one go before the next change, off the match's path."""
        self._touched.append((known, rows, now))
        self._touched_rows += len(rows)
        if self._touched_rows > 1 << 15:
            self._flush_touches()

    def _flush_touches(self) -> None:
        for known, rows, now in self._touched:
            self.index.used_at[rows] = now
            self._policy(known).touch(rows)
        self._touched.clear()
        self._touched_rows = 0

    def _policy(self, known: KnownNamespace) -> Policy:
        policy = self.policies.get(known.shape)
        if policy is None:
            policy = make_policy(self.options.policy, self.options.chunks, self.evictable)
            self.policies[known.shape] = policy
        return policy

    @property
    def _slabs(self) -> SlabAllocator:
        assert self.allocator is not None, "a namespace was opened, so there is an allocator"
        return self.allocator

    def _check_quarantine(self, session: StoreSession) -> None:
        bound = self.options.quarantine_share * self.capacity_bytes
        if session.quarantined_bytes > bound:
            self.counters.busy += 1
            raise BusyError(
                f"this session holds {session.quarantined_bytes} bytes past their leases "
                f"(bound {int(bound)}); release them, or reconnect. {self.busy_text()}"
            )

    # ---- looking in

    def explain(self, session: StoreSession, namespace: int, keys: bytes) -> list[Explanation]:
        """What is known about each of `keys`, in order."""
        known = self.known(session, namespace)
        self._flush_touches()
        now = self.clock()
        out = []
        for at in range(0, _key_count(keys) * KEY_BYTES, KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            row = self.index.find_one(namespace, key)
            if row == NO_ROW:
                out.append(Explanation(Outcome.MISS, self.ghosts.reason(key)))
                continue
            resident = int(self.index.resident[row])
            whole = resident & known.prefix_mask == known.prefix_mask
            orphan = self.index.parent[row] == ORPHAN
            reason = Reason.UNKNOWN
            if not resident:
                reason = Reason.BEING_WRITTEN
            elif orphan:
                reason = Reason.ORPHAN
            elif not whole:
                reason = Reason.PART_MISSING
            out.append(
                Explanation(
                    outcome=Outcome.HIT if whole and not orphan else Outcome.MISS,
                    reason=reason,
                    parts=resident,
                    nbytes=sum(n for i, n in enumerate(known.extent_bytes) if resident >> i & 1),
                    leases=int(self.index.leases[row]),
                    pins=int(self.index.pins[row]),
                    age_s=max(0.0, now - float(self.index.used_at[row])) if resident else 0.0,
                    children=int(self.index.children[row]),
                )
            )
        return out

    def keys(
        self, session: StoreSession, namespace: int = 0, cursor: int = 0, limit: int = 1000
    ) -> tuple[bytes, list[int], int]:
        """A page of stored keys: (keys, their namespaces, next cursor or 0 at the end).

        The cursor is a row position: chunks that come or go meanwhile may be missed or not, but
        none is listed twice unless it is stored anew.
        """
        mine = [k.id for k in self.namespaces.values() if k.tenant == session.tenant]
        wanted = [id_ for id_ in mine if namespace in (0, id_)]
        rows = self.index.linked_rows()
        rows = rows[(rows >= cursor) & (self.index.resident[rows] != 0)]
        rows = rows[np.isin(self.index.namespace[rows], wanted)]
        page = rows[:limit]
        following = int(page[-1]) + 1 if len(rows) > limit else 0
        return (
            b"".join(self.index.key_bytes(row) for row in page.tolist()),
            self.index.namespace[page].tolist(),
            following,
        )

    def figures(self) -> dict[str, int]:
        """Bytes by what holds them. O(rows)."""
        index = self.index
        rows = index.live_rows()
        sizes = np.zeros(len(rows), np.int64)
        by_namespace = index.namespace[rows]
        for known in self.namespaces.values():
            mine = by_namespace == known.id
            for part, nbytes in enumerate(known.extent_bytes):
                sizes[mine & (index.resident[rows] >> np.uint64(part) & 1 != 0)] += nbytes
        leased, pinned = index.leases[rows] > 0, index.pins[rows] > 0
        return {
            "total": self.capacity_bytes,
            "stored": int(sizes.sum()),
            "leased": int(sizes[leased].sum()),
            "pinned": int(sizes[pinned].sum()),
            "evictable": int(sizes[~leased & ~pinned].sum()),
            "writing": sum(item.nbytes for item in self._open_items()),
            "quarantined": sum(s.quarantined_bytes for s in self._sessions.values()),
        }

    def busy_text(self) -> str:
        """The figures that every BUSY carries."""
        return ", ".join(f"{name} {value}" for name, value in self.figures().items()) + " bytes"

    def check_integrity(self) -> None:
        """Asserts that index, allocator, leases, pins and policies agree. O(rows)."""
        self._flush_touches()
        self.index.check_integrity()
        self.leases.check_integrity()
        index = self.index
        rows = index.live_rows().tolist()
        leased: dict[int, int] = dict.fromkeys(rows, 0)
        for lease in self.leases:
            for row in np.unique(lease.rows).tolist():
                leased[row] += 1
        pinned: dict[int, int] = dict.fromkeys(rows, 0)
        for pin in self._pins.values():
            for row in pin.rows:
                pinned[row] += 1
        addresses: list[int] = [item.address for item in self._open_items()]
        used = 0
        for row in rows:
            assert index.leases[row] == leased[row], (row, index.leases[row], leased[row])
            assert index.pins[row] == pinned[row]
            assert index.state[row] == LINKED or leased[row], "an unlinked row that nothing holds"
            resident = int(index.resident[row])
            assert resident or leased[row] or index.writing[row] or index.children[row]
            for part in range(len(index.extents)):
                if resident >> part & 1:
                    addresses.append(int(index.extents[part][row, 0]))
        assert len(addresses) == len(set(addresses)), "two extents at one address"
        if self.allocator is not None:
            self.allocator.check_integrity()
            for known in self.namespaces.values():
                mine = [r for r in rows if index.namespace[r] == known.id]
                for part, nbytes in enumerate(known.extent_bytes):
                    slot = self.allocator.slot_bytes(nbytes)
                    used += slot * sum(int(index.resident[r]) >> part & 1 for r in mine)
            used += sum(self.allocator.slot_bytes(item.nbytes) for item in self._open_items())
            assert used == self.allocator.statistics().used_bytes, "sum of extents is not what is used"
        for policy in self.policies.values():
            policy.check_integrity()


def _key_count(keys: bytes) -> int:
    if not keys or len(keys) % KEY_BYTES:
        raise InvalidError(f"{len(keys)} bytes of keys are not a positive multiple of {KEY_BYTES}")
    return len(keys) // KEY_BYTES


def _no_extents(outcomes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return np.tile(np.array(NO_EXTENT, np.int64), (*outcomes.shape, 1))


def _last_window(have: npt.NDArray[np.uint64], chunks: int) -> int:
    """The largest n for which all of the last min(n, `chunks`) of the first n chunks are there."""
    position = np.arange(len(have))
    last_gap = np.maximum.accumulate(np.where(have != 0, -1, position))
    good = last_gap < np.maximum(position + 1 - chunks, 0)
    return int(np.flatnonzero(good)[-1]) + 1 if good.any() else 0
