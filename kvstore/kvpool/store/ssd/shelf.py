"""The chunks on the SSD: rows of their own, in trees, with their places, and who goes first.

The SSD has an index of its own beside the memory's, because the two sets of chunks differ and each
is prefix-closed by itself: chunks are written parents first and leave leaves first. What a prompt
finds is therefore the longer of two runs from its first chunk.

A row is idle when no lease holds it and nothing is below it. Not idle rows stay; what is deleted
under a lease keeps its extents until the lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import TooLargeError
from kvpool.proto.outcomes import Reason
from kvpool.store import segments
from kvpool.store.allocator import SlabAllocator
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Policy, least_recent
from kvpool.store.ghosts import Ghosts
from kvpool.store.index import NO_ROW, ROOT, UNLINKED, Index, Rows
from kvpool.store.learned import Lessons
from kvpool.store.namespaces import KnownNamespace, Shape
from kvpool.store.reads import Reads, Run
from kvpool.store.sorting import distinct
from kvpool.store.ssd.entries import Entry, Extent, SpaceRecord
from kvpool.store.ssd.listing import ADDRESS, GENERATION, NBYTES, SUM, Listing
from kvpool.store.ssd.tier import Tier
from kvpool.store.ssd.verify import Form, forms_of

ADMIT_ROWS = 1 << 14
"""That a policy gets at once when a tier starts: what it puts off stays short, too."""


class Shelf:
    """Index and policies of one tier, kept in step with it."""

    def __init__(self, tier: Tier, chunks: int, policy: str, seed: int, lessons: Lessons) -> None:
        self.tier = tier
        self.index = Index(chunks, seed)
        self.ghosts = Ghosts()
        self.policies: dict[Shape, Policy] = {}
        self.known: dict[int, KnownNamespace] = {}
        """By the store's number of the namespace."""
        self.used_at = np.zeros(self.index.capacity, np.float64)
        """By row: the time of its last use in this life."""
        self.evicted_chunks = 0
        self.reassigned_segments = 0
        self._turns = segments.Turns()
        self._policy = policy
        self._lessons = lessons
        self._seed = seed
        self._reads = Reads(self.index, self.ghosts)
        self._sums: list[npt.NDArray[np.uint64]] = []
        self._shapes: dict[int, Shape] = {}
        self._forms: dict[int, tuple[Form, ...]] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 1

    # ---- namespaces

    def space_of(self, known: KnownNamespace) -> int:
        """The catalogue's number of a namespace; made known to it if it is new."""
        number = self._numbers.get(known.id)
        if number is None:
            number = self._next_number
            self.meet(known, number)
            record = known.namespace.to_record().SerializeToString(deterministic=True)
            self.tier.add_space(SpaceRecord(number, known.tenant, known.digest, record))
        return number

    def meet(self, known: KnownNamespace, number: int) -> None:
        """`known` has this number in the catalogue."""
        self.skip_number(number)
        self.known[known.id] = known
        self._numbers[known.id] = number
        self.index.ensure_parts(len(known.extent_bytes))
        while len(self._sums) < len(known.extent_bytes):
            self._sums.append(np.zeros(self.index.capacity, np.uint64))

    def skip_number(self, number: int) -> None:
        """The catalogue has a namespace of this number."""
        self._next_number = max(self._next_number, number + 1)

    def fits(self, known: KnownNamespace) -> bool:
        """Whether a chunk of this namespace could ever be stored."""
        return bool(self._shape(known))

    def forms(self, known: KnownNamespace) -> tuple[Form, ...]:
        forms = self._forms.get(known.id)
        if forms is None:
            forms = self._forms[known.id] = forms_of(known.namespace, known.digest)
        return forms

    def policy_of(self, known: KnownNamespace) -> Policy:
        shape = self._shape(known)
        policy = self.policies.get(shape)
        if policy is None:
            facts = Facts(tags=self.index.tags)
            policy = make_policy(
                self._policy, self.index.capacity, self.evictable, facts, self._seed
            )
            self._lessons.teach(self._name_of(shape), policy)
            self.policies[shape] = policy
        return policy

    def _name_of(self, shape: Shape) -> str:
        """No policy is called "ssd", so the names of the memory's policies are others."""
        return "/".join(("ssd", self._policy, "+".join(map(str, shape))))

    def named_policies(self) -> list[tuple[str, Policy]]:
        """By the names that their experience is kept under."""
        return [(self._name_of(shape), policy) for shape, policy in self.policies.items()]

    def catch_up(self) -> None:
        """See `Policy.catch_up`."""
        for policy in self.policies.values():
            policy.catch_up()

    def _shape(self, known: KnownNamespace) -> Shape:
        """The size classes of its parts, ascending; none if a part is too large."""
        shape = self._shapes.get(known.id)
        if shape is None:
            try:
                slots = (self.tier.space.slot_bytes(nbytes) for nbytes in known.extent_bytes)
                shape = tuple(sorted(slots))
            except TooLargeError:
                shape = ()
            self._shapes[known.id] = shape
        return shape

    # ---- looking

    def run(self, known: KnownNamespace, keys: bytes, parts: int) -> Run:
        """The leading run of `keys` that is on the SSD; counts as no use. See `Reads.run`."""
        return self._reads.run(known, keys, parts)

    def find(self, known: KnownNamespace, key: bytes) -> int:
        """The row of a chunk, or NO_ROW."""
        return self.index.find_one(known.id, key)

    def parts_of(self, known: KnownNamespace, key: bytes) -> int:
        """Bitmap of the parts that are here."""
        row = self.find(known, key)
        return self.index.resident_at[row] if row != NO_ROW else 0

    def extents(self, row: int, parts: Sequence[int]) -> list[Extent]:
        """Where the parts of a row are, as far as they are here."""
        index, known = self.index, self.known[self.index.namespace_at[row]]
        resident = index.resident_at[row]
        return [
            Extent(
                part,
                index.address_at[part][row],
                known.extent_bytes[part],
                index.generation_at[part][row],
                int(self._sums[part][row]),
            )
            for part in parts
            if resident >> part & 1
        ]

    def evictable(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """True where a row is idle."""
        idle: npt.NDArray[np.bool_] = (self.index.leases[rows] | self.index.children[rows]) == 0
        return idle

    # ---- what holds rows

    def use(self, known: KnownNamespace, rows: Rows) -> None:
        """`rows`, parents first, were asked for, or would have been if memory had not had them."""
        self.policy_of(known).touch(rows)
        self.used_at[rows] = self.tier.clock()

    def protect(self, rows: Rows) -> None:
        """One lease more on each of `rows`, which are distinct."""
        self.index.leases[rows] += 1

    def unprotect(self, rows: Rows) -> None:
        """One lease less on each of `rows`, which are distinct, parents first."""
        index = self.index
        for row in rows[::-1].tolist():
            index.leases_at[row] -= 1
            if not index.idle(row):
                continue
            if index.state_at[row] == UNLINKED:
                self.tier.release(self._take_apart(row))
            else:
                known = self.known[index.namespace_at[row]]
                self.policy_of(known).unblock(np.array([row], np.intp))
        self.tier.flush()

    # ---- coming and going

    def add(self, known: KnownNamespace, entry: Entry) -> bool:
        """An announced entry gets its row, or more parts. False if what is above it is not here,
        or there is no row left: then it has no use, and goes."""
        index, row = self.index, self.find(known, entry.key)
        fresh = row == NO_ROW
        if fresh:
            above = self.find(known, entry.parent) if entry.parent else ROOT
            if (entry.parent and above == NO_ROW) or not (index.room or self.evict(1)):
                self.tier.delete(entry.key)
                self.tier.release(entry.extents)
                return False
            row = index.insert(known.id, entry.key, above)
            self.used_at[row] = self.tier.clock()
        for extent in entry.extents:
            index.address_at[extent.part][row] = extent.address
            index.generation_at[extent.part][row] = extent.generation
            self._sums[extent.part][row] = extent.sum
            index.resident_at[row] |= 1 << extent.part
        if fresh:
            self.policy_of(known).admit(np.array([row], np.intp))
        return True

    def remove(
        self, known: KnownNamespace, key: bytes, reason: Reason, *, damaged: bool = False
    ) -> bool:
        """Unlinks a chunk at once, and its entry as soon as that can be committed; False if there
        is none. `damaged`: its place is not used again."""
        row = self.find(known, key)
        if row == NO_ROW:
            return False
        index, policy = self.index, self.policy_of(known)
        self.ghosts.add(known.id, key, reason)
        parent = index.parent_at[row]
        policy.forget(np.array([row], np.intp))
        orphans = index.unlink(row)
        if orphans:
            policy.demote(np.array(orphans, np.intp))
        self.tier.delete(key)
        if damaged:
            self.tier.quarantine(self.extents(row, range(len(known.extent_bytes))))
            index.resident_at[row] = 0
        if not index.leases_at[row]:
            self.tier.release(self._take_apart(row))
        if parent >= 0 and self.index.idle(parent):
            policy.unblock(np.array([parent], np.intp))
        self.tier.flush()
        return True

    def clear(self, known: KnownNamespace) -> int:
        """Everything of one namespace goes; returns how many chunks that was."""
        rows = self.index.linked_rows()
        rows = rows[self.index.namespace[rows] == known.id]
        keys = [self.index.key_bytes(row) for row in rows.tolist()]
        return sum(self.remove(known, key, Reason.DELETED) for key in keys)

    def evict(self, count: int, slot: int | None = None) -> int:
        """Up to `count` chunks (with a part of class `slot`) go, leaves first; returns how many."""
        policies = self._policies_with(slot)
        evicted = 0
        if len(policies) == 1:
            evicted = policies[0].evict(count, self.index.cut)
        else:
            while evicted < count and (policy := least_recent(policies, self.used_at)) is not None:
                evicted += policy.evict(1, self.index.cut)
        for row in self.index.unlink_cut().tolist():
            key = self.index.key_bytes(row)
            self.ghosts.add(self.index.namespace_at[row], key, Reason.EVICTED)
            self.tier.delete(key)
            self.tier.release(self._take_apart(row))
        self.evicted_chunks += evicted
        if slot is not None:
            self._turns.evicted(slot, evicted)
        self.tier.flush()
        return evicted

    def make_room(self, count: int, slot: int) -> None:
        """Up to `count` chunks with a part of class `slot` go; or a whole segment of another class,
        if there are none, or once per segment's worth of such evictions, if it is older."""
        if not (self._takes_turn(slot) or self.evict(count, slot)):
            self._empty_segment(slot)

    def _takes_turn(self, slot: int) -> bool:
        """True if it was this class's turn to take over an older segment, and there was one."""
        if not self._turns.due(slot, self.slabs):
            return False
        oldest = least_recent(self._policies_with(slot), self.used_at)
        if oldest is None:
            return self._empty_segment(slot)
        return self._empty_segment(slot, float(self.used_at[oldest.victims(1)[0]]))

    def _policies_with(self, slot: int | None) -> list[Policy]:
        """Of shapes with a part of class `slot` (None: all)."""
        return [one for shape, one in self.policies.items() if slot is None or slot in shape]

    def _empty_segment(self, slot: int, before: float = math.inf) -> bool:
        """The least recently used segment of another class goes, if last used `before`: see
        `segments.to_empty`. O(rows), and rare."""
        doomed = segments.to_empty(self, slot, before, lambda rows: True)
        index, gone = self.index, set(doomed)
        leaves = [row for row in doomed if not index.children_at[row]]
        for row in leaves:
            parent = index.parent_at[row]
            known = self.known[index.namespace_at[row]]
            self.remove(known, index.key_bytes(row), Reason.EVICTED)
            if parent in gone and not index.children_at[parent]:
                leaves.append(parent)
        self.evicted_chunks += len(doomed)
        self.reassigned_segments += bool(doomed)
        return bool(doomed)

    @property
    def slabs(self) -> SlabAllocator:
        return self.tier.space.slabs

    def segments_of(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The allocator's segment of each address."""
        return self.slabs.segments_of(addresses)

    def _take_apart(self, row: int) -> list[Extent]:
        """Gives an unlinked row back; returns the extents that it had."""
        extents = self.extents(row, range(len(self._sums)))
        self.index.resident_at[row] = 0
        self.index.release(row)
        return extents

    # ---- a new life

    def load(self, listing: Listing, known_of: Callable[[int], KnownNamespace | None]) -> int:
        """Takes what an earlier life has left; returns how many chunks.

        `known_of(number)` is the namespace with that number in the catalogue. REQUIRES: nothing is
        here yet, the extents are claimed, and sizes and namespaces have been checked.
        """
        index, count = self.index, len(listing)
        spaces = {number: known_of(number) for number in distinct(listing.spaces)}
        namespaces = np.zeros(count, np.int32)
        for number, known in spaces.items():
            assert known is not None
            namespaces[listing.spaces == number] = known.id
        order = index.load(namespaces, listing.keys, listing.parents, listing.roots)
        for part, extents in enumerate(listing.extents):
            index.extents[part][:count, 0] = extents[:, ADDRESS]
            index.extents[part][:count, 1] = extents[:, GENERATION]
            self._sums[part][:count] = extents[:, SUM]
        index.resident[:count] = listing.parts
        for known in spaces.values():
            assert known is not None
            mine, policy = order[namespaces[order] == known.id], self.policy_of(known)
            for end in range(len(mine), 0, -ADMIT_ROWS):  # the deepest first: they are the oldest
                policy.admit(mine[max(0, end - ADMIT_ROWS) : end])
        return count

    def newest_generation(self) -> int:
        """The highest that is in use."""
        rows = self.index.linked_rows()
        return max((int(one[rows, 1].max(initial=0)) for one in self.index.extents), default=0)

    def check_integrity(self) -> None:
        """Asserts that rows, extents and policies agree. O(rows)."""
        index, space = self.index, self.tier.space
        index.check_integrity()
        space.check_integrity()
        linked = index.linked_rows()
        assert sum(policy.statistics()["rows"] for policy in self.policies.values()) == len(linked)
        assert (index.resident[linked] != 0).all()
        for policy in self.policies.values():
            policy.check_integrity()


def usable(listing: Listing, sizes_of: Callable[[int], Sequence[int]]) -> npt.NDArray[np.bool_]:
    """True for entries whose namespace is known and whose parts have its sizes.

    `sizes_of(number)`: bytes of an extent by part; none for an unknown namespace.
    """
    good = np.zeros(len(listing), np.bool_)
    for number in distinct(listing.spaces):
        mine, sizes = listing.spaces == number, sizes_of(number)
        fits = mine & bool(sizes)
        for part, extents in enumerate(listing.extents):
            nbytes = sizes[part] if part < len(sizes) else 0
            fits &= ~listing.has(part) | (extents[:, NBYTES] == nbytes)
        good |= fits
    return good
