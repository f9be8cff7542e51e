"""The store's decisions: match, reserve, commit, release, evict. Pure: no byte of KV, no socket,
thread, file or clock of its own passes here; clock and entropy are injected.

    publish   reserve ──► (the writer fills the extents) ──► commit        abort, expiry: undone
    pull      match ────► (the reader copies) ──► release                  adopt adds a holder

Every public method is one transaction: it leaves the structures consistent (`check_integrity`).
Per-key answers are outcomes; errors are raised only for requests that contradict themselves, for
closed sessions, and for sessions that hold too much past their leases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvpool.proto.errors import BusyError, DeniedError, InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store import integrity, reports
from kvpool.store.allocator import SlabAllocator
from kvpool.store.eviction.base import Policy
from kvpool.store.hints import Hints, Told
from kvpool.store.holders import Holders
from kvpool.store.index import LINKED, NO_ROW, Index, Rows
from kvpool.store.learned import Learned
from kvpool.store.leases import Lease, Leases
from kvpool.store.namespaces import KnownNamespace, Namespaces, Shape
from kvpool.store.pins import Pins
from kvpool.store.reads import Reads
from kvpool.store.records import (
    Counters,
    Explanation,
    Loading,
    Match,
    Reservation,
    StoreOptions,
    StoreSession,
    check_keys,
    split_keys,
)
from kvpool.store.room import Room
from kvpool.store.writes import Writes

if TYPE_CHECKING:
    from kvpool.store.ssd.attached import Ssd

__all__ = [
    "Counters",
    "Explanation",
    "KnownNamespace",
    "Match",
    "Reservation",
    "Store",
    "StoreOptions",
    "StoreSession",
]


class Store:
    """The index, allocator, leases and eviction of one trust domain's DRAM."""

    def __init__(
        self,
        options: StoreOptions,
        *,
        clock: Callable[[], float],
        entropy: Callable[[int], bytes],
        learned: Learned | None = None,
    ) -> None:
        """`learned` is what the policies of an earlier life learned: see `learned`."""
        self.options = options
        self.clock = clock
        self.epoch = int.from_bytes(entropy(8), "little") >> 1 or 1
        self.counters = Counters()
        self.leases = Leases(entropy)
        seed = int.from_bytes(entropy(8), "little")
        self.room = Room(options, seed, Namespaces(), self.counters, learned or {})
        self.pins = Pins(self.room)
        self.hints = Hints(self.room)
        self._reads = Reads(self.room.index, self.room.ghosts)
        self._writes = Writes(self.room)
        self._holders = Holders(self.room, self.leases, self._writes)
        self._own = self._holders.open(".store", mapped=True)
        self.ssd: Ssd | None = None
        """The tier below, if there is one."""

    @property
    def index(self) -> Index:
        return self.room.index

    @property
    def allocator(self) -> SlabAllocator | None:
        """None until the first namespace is opened."""
        return self.room.allocator

    @property
    def policies(self) -> Mapping[tuple[Shape, str], Policy]:
        """By shape and owner: see `Account.owner`."""
        return self.room.policies

    def learned(self) -> Learned:
        """What the eviction policies learned, for a later life."""
        policies = self.room.named_policies()
        if self.ssd is not None:
            policies += self.ssd.shelf.named_policies()
        return self.room.lessons.learned(policies)

    @property
    def namespaces(self) -> Mapping[int, KnownNamespace]:
        return self.room.namespaces.by_id

    # ---- capacity, sessions, namespaces

    def add_region(self) -> None:
        """The pool has grown by one region of `options.region_bytes`."""
        self.room.add_region()

    @property
    def regions(self) -> int:
        return self.room.regions

    @property
    def capacity_bytes(self) -> int:
        return self.room.capacity_bytes

    def open_session(self, tenant: str, *, mapped: bool) -> StoreSession:
        """A new client. `mapped`: it copies by itself, so its extents outlive TTLs."""
        return self._holders.open(tenant, mapped=mapped)

    def close_session(self, session: StoreSession) -> None:
        """The client is gone and so are its mappings: everything it held comes back."""
        self._holders.close(session)

    def open_namespace(self, tenant: str, namespace: Namespace) -> tuple[KnownNamespace, str]:
        """The namespace of `tenant`, and a warning if it can never meet one that is known.

        Raises `TooLargeError` for parts that can never fit.
        """
        self.index.ensure_parts(len(namespace.parts))
        return self.room.namespaces.open(
            tenant,
            namespace,
            shape_of=self.room.shape_of,
            policy_of=self.room.policy_of,
            account=self.room.accounts.of(tenant),
        )

    def known(self, session: StoreSession, namespace: int) -> KnownNamespace:
        """The namespace of this id, if the session's tenant opened it.

        Raises `DeniedError`, and `StaleError` if the session is closed.
        """
        self._holders.check_open(session)
        known = self.room.namespaces.by_id.get(namespace)
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
        prefill_tokens_s: float = 0.0,
    ) -> Match:
        """The longest run of leading `keys` whose needed `parts` (0: all) are servable.

        Under a lease, unless it is only a `peek`. What follows on the SSD belongs to the match if
        loading it takes less time than computing it at `prefill_tokens_s` (0: in any case;
        negative: what publishes have shown).
        Raises `InvalidError` (keys, or one twice), `NamespaceError` (parts), `DeniedError`, and
        `BusyError` when the session is over its quarantine bound.
        """
        known = self.known(session, namespace)
        count = check_keys(keys)
        if not peek:
            self._check_quarantine(session)
        run = self._reads.run(known, keys, parts)
        hits, rows = run.hits, run.rows
        now, ttl = self.clock(), self._ttl(lease_s)
        outcome, reason = Outcome.HIT, Reason.UNKNOWN
        cold, skipped, further, load_s = None, 0, 0, 0.0
        if hits < count:
            if self.ssd is not None:
                cold, skipped = self.ssd.cold(known, keys, parts, hits, prefill_tokens_s)
                if cold is not None:
                    further = len(cold.keys)
                    load_s = self.ssd.load_s(known, further)
            at = (hits + further) * KEY_BYTES
            missed = keys[at : at + KEY_BYTES]
            if missed:
                outcome, reason = Outcome.MISS, self._reads.why(known, missed, run)
                if self.ssd is not None and cold is None and not peek:
                    learned = prefill_tokens_s < 0
                    self.ssd.missed(known, missed, now, skipped, learned=learned)
            if skipped:
                reason = Reason.SLOW_TIER
        if peek:
            return Match(hits, outcome, reason, cold=further, load_s=load_s, skipped=skipped)
        found = hits + further
        self.counters.matches += 1
        self.counters.hit_chunks += found
        known.hit_chunks += found
        if found < count:
            self.counters.missed_matches += 1
            known.missed += 1
        if not found:
            return Match(0, outcome, reason, skipped=skipped)
        if hits:
            self.room.protect(rows)
            self.room.use(known, rows, now)
        nbytes = hits * known.nbytes(run.mask)
        lease = self.leases.grant(session.id, session.tenant, known.id, rows, now + ttl, nbytes)
        if self.ssd is not None and cold is not None:
            self.ssd.hold(cold, lease)
        extents = self._reads.extents(known, run) if hits else b""
        return Match(hits, outcome, reason, lease.id, ttl, extents, further, load_s, skipped)

    def load(
        self, session: StoreSession, lease_id: bytes, upto: int = 0, parts: int = 0, have: int = 0
    ) -> Loading:
        """Brings the first `upto` chunks (0: all) of a match from the SSD into memory.

        At once; ask again until nothing is pending. Tells the extents of `parts` of the chunks from
        number `have` on that are in memory. The outcome is STALE_EPOCH or EXPIRED if the lease is
        none, or says why chunks that were matched cannot be had.
        """
        self._holders.check_open(session)
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None or lease.items is not None:
            return Loading(0, False, Outcome.STALE_EPOCH, 0.0)
        if lease.expired or lease.deadline <= self.clock():
            return Loading(0, False, Outcome.EXPIRED, 0.0)
        loading = Loading(len(lease.rows), False, Outcome.HIT, 0.0)
        if lease.cold is not None and self.ssd is not None:
            before = len(lease.rows) - lease.cold.taken
            wanted = upto - before if upto else len(lease.cold.keys)
            loading = self.ssd.load(lease, lease.cold, wanted)
        indices = self.namespaces[lease.namespace].namespace.part_indices(parts)
        extents = self._reads.extents_of(lease.rows[have:], indices)
        return replace(loading, extents=extents)

    def hold(self, known: KnownNamespace, rows: Rows) -> Lease:
        """A lease of the store's own: `rows` stay until `let_go`. It is no use of them."""
        self.room.protect(rows)
        return self.leases.grant(self._own.id, self._own.tenant, known.id, rows, math.inf, 0)

    def skip_generations(self, used: int) -> None:
        """Generations up to `used` are of an earlier life."""
        self._writes.next_generation = max(self._writes.next_generation, used + 1)

    def let_go(self, lease: Lease) -> None:
        """Ends what `hold` began."""
        self._holders.release(self._own, lease.id)

    def extend(self, lease: Lease, rows: Rows) -> None:
        """A read lease in its time names `rows`, too; they are stored, and follow its last."""
        known = self.namespaces[lease.namespace]
        self.room.protect(rows)
        self.room.use(known, rows, self.clock())
        lease.rows = np.concatenate([lease.rows, rows])
        lease.nbytes += len(rows) * sum(known.extent_bytes)

    def adopt(self, session: StoreSession, lease_id: bytes, parts: int = 0) -> Match:
        """Adds `session` as a holder of a read lease and tells it the extents of `parts`.

        The answer's outcome is HIT, EXPIRED or STALE_EPOCH (no such lease in this life). What was
        deleted meanwhile stays readable: its extents live until the last release.
        """
        self._holders.check_open(session)
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None:
            return Match(0, Outcome.STALE_EPOCH, Reason.UNKNOWN)
        if lease.items is not None:
            raise InvalidError("a write lease cannot be adopted; the writer publishes by itself")
        remaining = lease.deadline - self.clock()
        if lease.expired or remaining <= 0:
            return Match(0, Outcome.EXPIRED, Reason.UNKNOWN)
        self._check_quarantine(session)
        known = self.namespaces[lease.namespace]
        extents = self._reads.extents_of(lease.rows, known.namespace.part_indices(parts))
        self.leases.adopt(session.id, lease)
        hits, cold = len(lease.rows), lease.cold.left if lease.cold is not None else 0
        return Match(hits, Outcome.HIT, Reason.UNKNOWN, lease.id, remaining, extents, cold)

    def release(self, session: StoreSession, lease_id: bytes) -> Outcome:
        """Takes one holding back. OK, or STALE_EPOCH if the session does not hold it.

        Releasing a write lease aborts what is still open.
        """
        return self._holders.release(session, lease_id)

    def renew(self, session: StoreSession, lease_id: bytes, lease_s: float = 0.0) -> Outcome:
        """Extends a lease that has not expired; what it reads counts as used."""
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None or session.id not in lease.holders:
            return Outcome.STALE_EPOCH
        now = self.clock()
        if lease.expired or lease.deadline <= now:
            return Outcome.EXPIRED
        self.leases.renew(lease, now + self._ttl(lease_s))
        if lease.items is None:
            rows = lease.rows[self.index.state[lease.rows] == LINKED]
            self.room.use(self.namespaces[lease.namespace], rows, now)
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
        """Room for `parts` (0: all) of the chunks `keys`, which follow one another and `parent`.

        Per item OK, EXISTS, WRITING, NO_PARENT or BUSY. Room is made in chain order and for whole
        chunks, so what does not fit is a tail. A parent that is only on the SSD is loaded: BUSY
        until it is there. Raises `InvalidError`, `NamespaceError` (parts), `DeniedError`, and
        `BusyError` (quarantine).
        """
        known = self.known(session, namespace)
        self._check_quarantine(session)
        now, ttl = self.clock(), self._ttl(lease_s)
        plan = self._writes.reserve(known, parent, keys, parts, now)
        text, outcomes = "", plan.outcomes.tobytes()
        if Outcome.BUSY in outcomes:
            self.counters.busy += 1
            text = self.busy_text(known)
        lost = Outcome.NO_PARENT in outcomes
        if lost and self.ssd is not None and self.ssd.bring_up(known, parent):
            self.counters.busy += 1
            plan.outcomes[:] = Outcome.BUSY
            text = "the chunk above is on the SSD and is being loaded; publish again soon"
        if not plan.items:
            self.room.unprotect(known, plan.chain, empties=True)
            return Reservation(plan.outcomes, b"", 0.0, plan.extents(), text)
        nbytes = sum(item.nbytes for item in plan.items.values())
        extents = plan.extents()
        lease = self.leases.grant(
            session.id, session.tenant, known.id, plan.chain, now + ttl, nbytes, plan.items
        )
        return Reservation(plan.outcomes, lease.id, ttl, extents, text)

    def commit(
        self,
        session: StoreSession,
        lease_id: bytes,
        items: Sequence[int] | None = None,
        *,
        promoted: bool = False,
    ) -> list[Outcome]:
        """Makes written extents visible; None means all that are still open.

        Per item OK, NO_PARENT (nothing is kept), EXPIRED or INVALID (no such open item). The
        lease ends with its last open item.
        """
        lease = self._write_lease(session, lease_id)
        if lease is None:
            return [Outcome.STALE_EPOCH] * (len(items) if items is not None else 1)
        numbers = list(lease.items or ()) if items is None else items
        now = self.clock()
        if lease.expired or lease.deadline <= now:
            return [Outcome.EXPIRED] * len(numbers)
        known = self.namespaces[lease.namespace]
        outcomes, stored = self._writes.commit(known, lease, numbers, now, promoted=promoted)
        if self.ssd is not None and not promoted:
            self.ssd.stored(known, stored, now)
        if not lease.items:
            self.release(session, lease.id)
        return outcomes

    def abort(
        self, session: StoreSession, lease_id: bytes, items: Sequence[int] | None = None
    ) -> Outcome:
        """Gives open items back: the writer promises that nothing writes there any more."""
        lease = self._write_lease(session, lease_id)
        if lease is None or lease.items is None:
            return Outcome.STALE_EPOCH
        for number in lease.items.keys() & (items if items is not None else lease.items):
            self._holders.give_back(session, lease, number)
        if not lease.items:
            self.release(session, lease.id)
        return Outcome.OK

    def _write_lease(self, session: StoreSession, lease_id: bytes) -> Lease | None:
        lease = self.leases.get(lease_id, session.tenant)
        if lease is None or lease.items is None or session.id not in lease.holders:
            return None
        return lease

    # ---- pins, delete, clear, hints

    def pin(
        self, session: StoreSession, namespace: int, keys: bytes, ttl_s: float = 0.0
    ) -> list[Outcome]:
        """Keeps the stored leading run of `keys` from eviction until unpinned or `ttl_s` passed.

        HIT per pinned chunk, MISS for the rest. Each call is a claim of its own: the chain is
        pinned until the last one is taken back or over. Raises `BusyError` with figures if more
        would be pinned than may be.
        """
        known = self.known(session, namespace)
        count = check_keys(keys)
        run = self._reads.run(known, keys, 0)
        if run.hits:
            end = self.clock() + ttl_s if ttl_s else math.inf
            self.pins.add(known, keys[-KEY_BYTES:], run.rows, end)
        return [Outcome.HIT] * run.hits + [Outcome.MISS] * (count - run.hits)

    def unpin(self, session: StoreSession, namespace: int, keys: bytes) -> Outcome:
        """Takes back the claim that ends first of those on the chain of the last of `keys`: OK or
        MISS."""
        self.known(session, namespace)
        check_keys(keys)
        return Outcome.OK if self.pins.unpin((namespace, keys[-KEY_BYTES:])) else Outcome.MISS

    def delete(
        self, session: StoreSession, namespace: int, keys: bytes, *, corrupt: bool = False
    ) -> list[Outcome]:
        """Unlinks chunks at once: OK or MISS. Bytes under a lease are freed on last release.

        A write in progress is cut off. `corrupt` tells that a reader found bad bytes: counted,
        and said in later misses.
        """
        known = self.known(session, namespace)
        reason = Reason.QUARANTINED if corrupt else Reason.DELETED
        outcomes = [
            self._delete_one(known, key, reason) for key in reversed(split_keys(keys))
        ]  # deepest first, so that the chain itself leaves no orphans
        deleted = outcomes.count(Outcome.OK)
        if corrupt:
            self.counters.corrupt_chunks += deleted
        else:
            self.counters.deleted_chunks += deleted
        return outcomes[::-1]

    def _delete_one(self, known: KnownNamespace, key: bytes, reason: Reason) -> Outcome:
        stored = False
        if self.ssd is not None and reason is Reason.DELETED:
            stored = self.ssd.forget(known, key)  # a copy that is damaged says nothing of the other
        row = self.index.find_one(known.id, key)
        if row != NO_ROW:
            self.pins.forget(row)
            stored = self.room.remove(known, row, reason) or stored
        return Outcome.OK if stored else Outcome.MISS

    def clear(self, session: StoreSession, namespace: int = 0) -> int:
        """Deletes every chunk of one namespace, or of all of the tenant's. Returns how many."""
        self._holders.check_open(session)
        if namespace:
            mine = [self.known(session, namespace)]
        else:
            mine = self.room.namespaces.of_tenant(session.tenant)
        linked = self.index.linked_rows()
        total = 0
        for known in mine:
            rows = linked[self.index.namespace[linked] == known.id]
            if self.ssd is not None:
                total += self.ssd.clear(known)
            self.pins.forget_namespace(known, rows)
            total += self.room.remove_all(known, rows)
        self.counters.deleted_chunks += total
        return total

    def hint(
        self, session: StoreSession, namespace: int, keys: bytes, told: Told | None = None
    ) -> list[Outcome]:
        """Tells the future of a chain, or of its last chunks: HIT or MISS per key."""
        known = self.known(session, namespace)
        check_keys(keys)
        found = self.index.find(namespace, keys)
        stored = (found.rows >= 0) & (found.resident != 0)
        rows = found.rows[stored]
        _, first = np.unique(rows, return_index=True)
        self.hints.take(known, rows[np.sort(first)], told or Told(), self.clock())
        return [Outcome.HIT if here else Outcome.MISS for here in stored.tolist()]

    # ---- time

    def catch_up(self) -> None:
        """Does what matches have put off, so that they are answered sooner. Call it when nobody
        waits; whether and when changes no answer."""
        self.room.catch_up()
        if self.ssd is not None:
            self.ssd.shelf.catch_up()

    def reap(self) -> None:
        """Ends what time has ended. Call it from a timer: space comes back without traffic."""
        now = self.clock()
        self.counters.expired_leases += self._holders.expire(now)
        self.pins.expire(now)
        self.hints.expire(now)

    def _ttl(self, lease_s: float) -> float:
        return min(lease_s or self.options.lease_s, self.options.lease_s_max)

    def _check_quarantine(self, session: StoreSession) -> None:
        if self._holders.over_quarantine(session):
            self.counters.busy += 1
            raise BusyError(
                f"this session holds {session.quarantined_bytes} bytes past their leases (bound "
                f"{self._holders.quarantine_bound}); release them, or reconnect. {self.busy_text()}"
            )

    # ---- looking in

    def explain(self, session: StoreSession, namespace: int, keys: bytes) -> list[Explanation]:
        """What is known about each of `keys`, in order."""
        known = self.known(session, namespace)
        now = self.clock()
        found = [reports.explain(self.room, known, key, now) for key in split_keys(keys)]
        if self.ssd is None:
            return found
        ssd = self.ssd
        both = zip(found, split_keys(keys), strict=True)
        return [ssd.explain(known, key, one) for one, key in both]

    def keys(
        self, session: StoreSession, namespace: int = 0, cursor: int = 0, limit: int = 1000
    ) -> tuple[bytes, list[int], int]:
        """A page of stored keys: (keys, their namespaces, next cursor or 0 at the end).

        The cursor is a row position: chunks that come or go meanwhile may be missed or not, but
        none is listed twice unless it is stored anew.
        """
        self._holders.check_open(session)
        mine = self.room.namespaces.of_tenant(session.tenant)
        wanted = [known.id for known in mine if namespace in (0, known.id)]
        behind = self.index.capacity + 1  # cursors from here on are rows of the SSD
        if cursor < behind:
            keys, spaces, following = reports.page(self.index, wanted, cursor, limit)
            more = following or (behind if self.ssd is not None else 0)
            return keys, spaces, more
        if self.ssd is None:
            return b"", [], 0
        keys, spaces, following = reports.page(self.ssd.shelf.index, wanted, cursor - behind, limit)
        only = [
            (key, space)
            for key, space in zip(split_keys(keys) if keys else (), spaces, strict=True)
            if not self.holds(space, key)
        ]
        more = following + behind if following else 0
        return b"".join(key for key, _ in only), [space for _, space in only], more

    def holds(self, namespace: int, key: bytes) -> bool:
        """Whether some part of the chunk is in memory."""
        row = self.index.find_one(namespace, key)
        return row != NO_ROW and self.index.resident_at[row] != 0

    def figures(self) -> dict[str, int]:
        """Bytes by what holds them. O(leased rows)."""
        return reports.figures(self.room, self.leases, self._holders)

    def busy_text(self, known: KnownNamespace | None = None) -> str:
        """The figures that every BUSY carries, and those of the tenant if it has a quota."""
        text = ", ".join(f"{name} {value}" for name, value in self.figures().items()) + " bytes"
        if known is None or not known.account.limits.quota:
            return text
        account = known.account
        return f"{text}; tenant {account.tenant!r} holds {account.used} of {account.limits.quota}"

    def check_integrity(self) -> None:
        """Asserts that index, allocator, leases, pins and policies agree. O(rows)."""
        integrity.check_integrity(self.room, self.leases, self.pins, self._holders)
        self.hints.check_integrity()
