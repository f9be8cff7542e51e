"""Room for chunks: rows of the index, extents of the allocator, and who goes when there is none.

A row is *idle* when it has no lease, pin or child. Idle rows with a part are victims; an idle row
without any (its write came to nothing) goes at once, and one that was deleted under a lease goes
with it. So every row that stays empty is held by a write lease, directly or from below, and what
is resident is prefix-closed: a stored row's parent is stored, or the row is an orphan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import TooLargeError
from kvpool.proto.outcomes import Reason
from kvpool.store import segments
from kvpool.store.accounts import Account, Accounts
from kvpool.store.allocator import SlabAllocator, segment_size
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Policy, least_recent
from kvpool.store.ghosts import Ghosts
from kvpool.store.index import FREE, UNLINKED, Index, Rows
from kvpool.store.learned import Learned, Lessons
from kvpool.store.namespaces import KnownNamespace, Namespaces, Shape
from kvpool.store.records import Counters, StoreOptions

_FEW = 4  # up to this many rows plain Python beats the fixed cost of NumPy calls
_USES = 64
"""Matches whose time of use may wait for being noted."""
_SEGMENT_BYTES = 64 << 20
_BYTES_PER_GHOST = 1024
"""Of a chunk: what policies remember of chunks that left (16 bytes each, a power of
two of them) stays below 1/32 of it."""


class Room:
    """Index, allocator and policies of one store, which this class keeps in step."""

    def __init__(
        self,
        options: StoreOptions,
        seed: int,
        namespaces: Namespaces,
        counters: Counters,
        learned: Learned,
    ) -> None:
        self.options = options
        self.lessons = Lessons(learned, counters)
        self._seed = seed
        self.index = Index(options.chunks, seed)
        self.ghosts = Ghosts()
        self.namespaces = namespaces
        self.counters = counters
        self.regions = 0
        self.allocator: SlabAllocator | None = None
        self.accounts = Accounts(options.limits)
        self.policies: dict[tuple[Shape, str], Policy] = {}
        """By shape of the chunks and owner: see `Account.owner`."""
        self.loose: dict[int, int] = {}
        """Address → bytes of the extents that are in no row: being written, or quarantined."""
        self.evicted: Callable[[int, bytes], None] | None = None
        """Is told the namespace and key of every chunk that makes room for others."""
        self.zombies = 0
        """Rows that are deleted but leased."""
        self._used_at = np.zeros(options.chunks, np.float64)
        self._uses: list[tuple[Rows, float]] = []
        self._turns = segments.Turns()

    # ---- space

    def add_region(self) -> None:
        self.regions += 1
        if self.allocator is not None:
            self.allocator.add_region()

    @property
    def capacity_bytes(self) -> int:
        return self.regions * self.options.region_bytes

    @property
    def slabs(self) -> SlabAllocator:
        assert self.allocator is not None, "a namespace was opened, so there is an allocator"
        return self.allocator

    def shape_of(self, sizes: Sequence[int]) -> Shape:
        """The size classes of parts of `sizes` bytes, ascending. Raises `TooLargeError`.

        The first namespace decides the segment size.
        """
        region, largest = self.options.region_bytes, max(sizes)
        if largest > region:
            raise TooLargeError(
                f"a part of {largest} bytes exceeds the region of {region} bytes; raise --capacity"
            )
        if self.allocator is None:
            eighth = max(self.capacity_bytes, region) // 8
            ideal = min(max(_SEGMENT_BYTES, 8 * largest), max(largest, eighth))
            segment = segment_size(region, self.options.segment_bytes or ideal)
            slabs = SlabAllocator(region // segment * segment, segment)
            shape = tuple(sorted(slabs.slot_bytes(size) for size in sizes))
            for _ in range(self.regions):
                slabs.add_region()
            self.allocator = slabs
            return shape
        return tuple(sorted(self.allocator.slot_bytes(size) for size in sizes))

    def policy_of(self, shape: Shape, account: Account) -> Policy:
        policy = self.policies.get((shape, account.owner))
        if policy is None:
            facts = Facts(
                tags=self.index.tags,
                room=lambda: self._chunks_free(shape, account),
                ghosts_per_row=max(1, sum(shape) // _BYTES_PER_GHOST),
                idle=self.index.idle,
            )
            policy = make_policy(
                self.options.policy, self.options.chunks, self.evictable, facts, self._seed
            )
            self.lessons.teach(self._name_of(shape, account.owner), policy)
            self.policies[shape, account.owner] = policy
        return policy

    def _name_of(self, shape: Shape, owner: str) -> str:
        return "/".join((self.options.policy, "+".join(map(str, shape)), owner))

    def named_policies(self) -> list[tuple[str, Policy]]:
        """By the names that their experience is kept under."""
        return [(self._name_of(*key), policy) for key, policy in self.policies.items()]

    def _chunks_free(self, shape: Shape, account: Account) -> int:
        """Chunks of a shape that fit before one has to go."""
        slots = Counter(shape)
        free = min(self.slabs.free_slots(slot) // parts for slot, parts in slots.items())
        return int(min(free, max(0, account.left) // sum(shape)))

    def allocate(self, known: KnownNamespace, nbytes: int, count: int) -> list[int]:
        """Up to `count` addresses, in no row yet; evicts what must go for them."""
        slot, account = self.slabs.slot_bytes(nbytes), known.account
        if account.limits.quota:
            count = self._within_quota(known, nbytes, count)
        while (missing := count - self.slabs.free_slots(nbytes)) > 0:
            if not (
                self._takes_turn(slot, account)
                or self.evict(missing, account, slot)
                or self._reassign(slot, account)
            ):
                break
        found = self.slabs.allocate(nbytes, count)
        addresses: list[int] = (found + found // self.slabs.region_bytes * self._slack).tolist()
        self.loose.update(dict.fromkeys(addresses, nbytes))
        account.used += nbytes * len(addresses)
        return addresses

    def could_hold(self, account: Account, sizes: Sequence[int]) -> bool:
        """Whether each of these extents, of one chunk, has a place or something may go for it.

        Evicts nothing. O(rows) where only a segment of another class could make room.
        """
        quota = account.limits.quota
        if quota and account.left < sum(sizes) and not _any_victims(self._own(account)):
            return False
        for slot, count in Counter(map(self.slabs.slot_bytes, sizes)).items():
            if self.slabs.free_slots(slot) < count and not (
                _any_victims(self._offers(account, slot)) or self._to_empty(slot, account)
            ):
                return False
        return True

    def _own(self, account: Account) -> list[Policy]:
        """The policies that order chunks of this account's owner."""
        return [policy for (_, owner), policy in self.policies.items() if owner == account.owner]

    def _within_quota(self, known: KnownNamespace, nbytes: int, count: int) -> int:
        """How many of `count` extents the tenant may have, once its own chunks have made room.

        Nothing goes for a chunk that exceeds the quota as a whole.
        """
        account, quota = known.account, known.account.limits.quota
        if known.chunk_bytes > quota:
            return 0
        count = min(count, quota // nbytes)
        while (excess := int(count * nbytes - account.left)) > 0:
            chunks = max(1, excess // known.chunk_bytes)
            if not (
                self._evict_from([known.policy], chunks, "quota")
                or self._evict_from(self._own(account), 1, "quota")
            ):
                return int(max(0, account.left) // nbytes)
        return count

    def give_back(self, known: KnownNamespace, addresses: Iterable[int]) -> None:
        """Frees extents that are in no row."""
        freed = list(addresses)
        for address in freed:
            known.account.used -= self.loose.pop(address)
        self._free(freed)

    def make_rows(self, count: int, account: Account) -> int:
        """How many of `count` free rows the index has, after evicting for them if need be."""
        missing = count - self.index.room
        if missing > 0:
            self.evict(missing, account)
        return min(count, self.index.room)

    def nbytes_of(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Bytes that each row holds."""
        index = self.index
        namespace, resident = index.namespace[rows], index.resident[rows]
        sizes = np.zeros(len(rows), np.int64)
        for number in np.unique(namespace).tolist():
            mine = namespace == number
            for part, nbytes in enumerate(self.namespaces.by_id[number].extent_bytes):
                sizes[mine & (resident >> np.uint64(part) & 1 != 0)] += nbytes
        return sizes

    def _free(self, addresses: list[int]) -> None:
        if addresses:
            self.slabs.free(self._inside(np.array(addresses, np.int64)))

    @property
    def _slack(self) -> int:
        """Bytes at the end of each region that are too few for a segment."""
        return self.options.region_bytes - self.slabs.region_bytes

    def segments_of(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The allocator's segment of each address."""
        return self.slabs.segments_of(self._inside(addresses))

    def _inside(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Addresses of the pool as the allocator counts them, which knows of no slack."""
        return addresses - addresses // self.options.region_bytes * self._slack

    # ---- what holds rows

    def evictable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """True where a row is idle: the policies' view of the store."""
        index = self.index
        held = index.leases[rows] | index.pins[rows] | index.children[rows]
        idle: npt.NDArray[np.bool_] = held == 0
        return idle

    def protect(self, rows: Rows) -> None:
        """One lease more on each of `rows`, which are distinct."""
        if len(rows) > _FEW:
            leases = self.index.leases
            leases.put(rows, leases.take(rows) + 1)
            return
        for row in rows.tolist():
            self.index.leases_at[row] += 1

    def use(self, known: KnownNamespace, rows: Rows, now: float) -> None:
        """Stored `rows`, parents first, were used. The time is noted later, off a match's path."""
        known.policy.touch(rows)
        self._uses.append((rows, now))
        if len(self._uses) >= _USES:
            self._note_uses()

    @property
    def used_at(self) -> npt.NDArray[np.float64]:
        """By row: the time of its last use."""
        if self._uses:
            self._note_uses()
        return self._used_at

    def catch_up(self) -> None:
        """Does what matches have put off. For moments when nobody waits."""
        for policy in self.policies.values():
            policy.catch_up()
        if 4 * len(self._uses) >= _USES:
            self._note_uses()

    def _note_uses(self) -> None:
        uses, self._uses = self._uses, []
        rows, times = [rows for rows, _ in uses], [now for _, now in uses]
        self._used_at[np.concatenate(rows)] = np.repeat(times, [len(few) for few in rows])

    def unprotect(self, known: KnownNamespace, rows: Rows, *, empties: bool = False) -> None:
        """One lease less on each of `rows`, which are distinct, parents first.

        `empties`: there may be rows without parts, because they were to be written.
        """
        if len(rows) > _FEW:
            self.unprotect_by(known, rows, 1, empties=empties)
            return
        index = self.index
        idle = []
        for row in rows[::-1].tolist():
            index.leases_at[row] -= 1
            if not index.leases_at[row]:
                if index.resident_at[row] and index.state_at[row] != UNLINKED:
                    idle.append(row)
                else:
                    self.settle(row)
        if idle:
            known.policy.unblock(np.array(idle, np.intp))

    def unprotect_by(
        self,
        known: KnownNamespace,
        rows: Rows,
        counts: int | npt.NDArray[np.int64],
        *,
        empties: bool = False,
    ) -> None:
        """As `unprotect`, of many rows, so many leases less on each."""
        index = self.index
        left = index.leases.take(rows) - counts
        index.leases.put(rows, left)
        idle = rows[left == 0] if np.count_nonzero(left) else rows
        if empties or self.zombies:
            stored = (index.state[idle] != UNLINKED) & (index.resident[idle] != 0)
            for row in idle[~stored][::-1].tolist():
                self.settle(row)
            idle = idle[stored]
        known.policy.unblock(idle)

    def settle(self, row: int) -> None:
        """`row` has lost a lease, pin or child; if it is idle now, it goes its way."""
        index = self.index
        while row >= 0 and index.idle(row) and index.state_at[row] != FREE:
            if index.state_at[row] == UNLINKED:
                self.zombies -= 1
                self._free(self._take_apart(row))
                return
            if index.resident_at[row]:
                policy = self.namespaces.by_id[index.namespace_at[row]].policy
                policy.unblock(np.array([row], np.intp))
                return
            parent = index.parent_at[row]
            index.unlink(row)
            index.release(row)
            row = parent

    # ---- departures

    def remove(self, known: KnownNamespace, row: int, reason: Reason) -> bool:
        """Unlinks a linked row without pins at once, whatever is below it; False if it was empty.

        What a lease holds is freed on its last release.
        """
        index = self.index
        self.ghosts.add(known.id, index.key_bytes(row), reason)
        parent, stored = index.parent_at[row], index.resident_at[row] != 0
        if stored:
            known.policy.forget(np.array([row], np.intp))
        orphans = [below for below in index.unlink(row) if index.resident_at[below]]
        if orphans:
            known.policy.demote(np.array(orphans, np.intp))
        if index.leases_at[row]:
            self.zombies += 1
        else:
            self._free(self._take_apart(row))
        self.settle(parent)
        return stored

    def remove_all(self, known: KnownNamespace, rows: Rows) -> int:
        """Unlinks all rows of a namespace, which have no pins; returns how many were stored."""
        index = self.index
        stored = rows[index.resident[rows] != 0]
        known.policy.forget(stored)
        index.unlink_all(rows)
        unleased = rows[index.leases[rows] == 0]
        self.zombies += len(rows) - len(unleased)
        self._take_all_apart(known, unleased)
        return len(stored)

    def evict(self, n: int, account: Account, slot: int | None = None) -> int:
        """Evicts up to `n` rows (of shapes with class `slot`) for `account`; returns how many.

        Each time the least recently used of what the policies offer goes.
        """
        reason = "rows" if slot is None else "room"
        evicted = 0
        while evicted < n and (offers := self._offers(account, slot)):
            # A reserve is looked at before each eviction, unless there is none to look at.
            many = n - evicted if not self.options.limits else 1
            gone = self._evict_from(offers, many, reason)
            evicted += gone
            if not gone:
                break
        if slot is not None:
            self._turns.evicted(slot, evicted)
        return evicted

    def _offers(self, account: Account, slot: int | None) -> list[Policy]:
        """The policies (of shapes with class `slot`) from which `account` may take a chunk."""
        return [
            policy
            for (shape, owner), policy in self.policies.items()
            if (slot is None or slot in shape)
            and (owner in ("", account.owner) or sum(shape) <= self.accounts.of(owner).spare)
        ]

    def _evict_from(self, policies: Sequence[Policy], n: int, reason: str) -> int:
        if len(policies) == 1:
            evicted = policies[0].evict(n, self.index.cut)
        else:
            evicted = 0
            while evicted < n and (policy := least_recent(policies, self.used_at)) is not None:
                evicted += policy.evict(1, self.index.cut)
        self._bury(reason)
        return evicted

    def may_take(self, rows: Rows, account: Account) -> bool:
        """Whether `account` may evict all `rows` at once: nobody else's reserve is among them."""
        if not self.options.limits:
            return True
        spaces, sizes = self.index.namespace[rows], self.nbytes_of(rows)
        taken: Counter[str] = Counter()
        for number in np.unique(spaces).tolist():
            tenant = self.namespaces.by_id[number].tenant
            taken[tenant] += int(sizes[spaces == number].sum())
        others = [(self.accounts.of(t), n) for t, n in taken.items() if t != account.tenant]
        return all(n <= other.spare or not other.limits.reserve for other, n in others)

    def _bury(self, reason: str) -> None:
        """What policies let go of leaves the store."""
        index, counters = self.index, self.counters
        rows = index.unlink_cut()
        spaces = index.namespace[rows]
        for row, space in zip(rows.tolist(), spaces.tolist(), strict=True):
            key = index.key_bytes(row)
            self.ghosts.add(space, key, Reason.EVICTED)
            if self.evicted is not None:
                self.evicted(space, key)
        for space in set(spaces.tolist()):
            known = self.namespaces.by_id[space]
            mine = rows[spaces == space]
            known.account.evicted_chunks += len(mine)
            self._take_all_apart(known, mine)
        counters.evicted_chunks += len(rows)
        counters.evictions[reason] = counters.evictions.get(reason, 0) + len(rows)

    def _take_all_apart(self, known: KnownNamespace, rows: Rows) -> None:
        """Gives unlinked rows of one namespace back, and frees their extents."""
        index = self.index
        if len(rows) <= _FEW:
            self._free([address for row in rows.tolist() for address in self._take_apart(row)])
            return
        known.account.used -= int(self.nbytes_of(rows).sum())
        for part, extents in enumerate(index.extents):
            here = rows[index.resident[rows] >> np.uint64(part) & 1 != 0]
            self.slabs.free(self._inside(extents[here, 0]))
        index.resident[rows] = 0
        index.release_all(rows)

    def _take_apart(self, row: int) -> list[int]:
        """Gives an unlinked row back; returns the addresses of its extents, which are to free."""
        index = self.index
        parts = index.resident_at[row]
        known = self.namespaces.by_id[index.namespace_at[row]]
        known.account.used -= known.nbytes(parts)
        addresses = [
            index.address_at[part][row] for part in range(parts.bit_length()) if parts >> part & 1
        ]
        index.resident_at[row] = 0
        index.release(row)
        return addresses

    # ---- segments change class

    def _takes_turn(self, slot: int, account: Account) -> bool:
        """True if it was this class's turn to take over an older segment, and there was one."""
        if not self._turns.due(slot, self.slabs) or not len(self.slabs.used_segments(slot)):
            return False
        oldest = least_recent(self._offers(account, slot), self.used_at)
        if oldest is None:
            return self._reassign(slot, account)
        return self._reassign(slot, account, float(self.used_at[oldest.victims(1)[0]]))

    def _reassign(self, slot: int, account: Account, before: float = math.inf) -> bool:
        """Empties the least recently used segment of another class, if last used `before`.

        The declared exception to "one publish evicts one victim". O(rows), and rare.
        """
        doomed = self._to_empty(slot, account, before)
        if not doomed:
            return False
        self._evict_all(doomed)
        self.counters.reassigned_segments += 1
        return True

    def _to_empty(self, slot: int, account: Account, before: float = math.inf) -> list[int]:
        """The rows that `_reassign` would evict."""
        return segments.to_empty(self, slot, before, lambda rows: self.may_take(rows, account))

    def _evict_all(self, rows: Sequence[int]) -> None:
        """Evicts rows without leases or pins, and with all that is below them."""
        index = self.index
        doomed, every = set(rows), np.array(rows, np.intp)
        for namespace in np.unique(index.namespace[every]).tolist():
            policy = self.namespaces.by_id[namespace].policy
            policy.forget(every[index.namespace[every] == namespace])
        leaves = [row for row in rows if not index.children_at[row]]
        for row in leaves:
            above, parent = index.parent_at[row], index.cut(row)
            if parent in doomed:
                leaves.append(parent)
            else:
                self.settle(above)
        self._bury("segment")


def _any_victims(policies: Iterable[Policy]) -> bool:
    return any(len(policy.victims(1)) for policy in policies)
