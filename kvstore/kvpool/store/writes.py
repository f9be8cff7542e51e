"""Publishing: reserve room for a chain, then commit it in order, or give it back.

reserve   known rows are looked up, extents allocated, new rows linked below their parents
commit    an item becomes visible if its parent is
end       abort, expiry, a dead writer: extents come back, rows that stayed empty go
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome
from kvpool.store.index import LINKED, NO_ROW, ORPHAN, ORPHANED, ROOT, UNLINKED, Rows
from kvpool.store.leases import Lease, WriteItem
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import NO_EXTENT, split_keys
from kvpool.store.room import Room

_OK, _EXISTS, _WRITING, _BUSY = map(
    int, (Outcome.OK, Outcome.EXISTS, Outcome.WRITING, Outcome.BUSY)
)
"""As plain numbers: NumPy takes microseconds to see that a member of an enumeration is one."""


@dataclass(slots=True)
class Plan:
    """One reserve: what became of each chunk of the chain and each part.

    `chain` holds the rows, parent first; all of them are protected. `items` are numbered
    chunk * parts + part, as are the entries of `outcomes`, shape (chunks, parts).
    """

    outcomes: npt.NDArray[np.uint8]
    chain: Rows = field(default_factory=lambda: np.empty(0, np.intp))
    items: dict[int, WriteItem] = field(default_factory=dict)

    def extents(self) -> bytes:
        """(chunks, parts, 2) int64."""
        words = [*NO_EXTENT] * self.outcomes.size
        for number, item in self.items.items():
            words[2 * number : 2 * number + 2] = item.address, item.generation
        return np.array(words, np.int64).tobytes()


class Writes:
    """The writing half of a store: who may put which bytes where."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._index = room.index
        self.next_generation = 1

    # ---- reserve

    def reserve(
        self, known: KnownNamespace, parent: bytes, keys: bytes, parts: int, now: float
    ) -> Plan:
        """Decides each item, and protects the chain of what may be written. See `Store.reserve`."""
        names = split_keys(keys)
        limit = self._room.options.reserve_max
        if len(names) > limit:
            raise InvalidError(f"{len(names)} chunks in one reserve; 1 to {limit} are allowed")
        if len(parent) not in (0, KEY_BYTES):
            raise InvalidError(f"a parent key of {len(parent)} bytes; 0 (none) or {KEY_BYTES}")
        if len({*names, parent}) != len(names) + 1:
            raise InvalidError("the chain holds the same key twice")
        indices = known.namespace.part_indices(parts)
        plan = Plan(np.full((len(names), len(indices)), _OK, np.uint8))
        above = self._index.find_one(known.id, parent) if parent else ROOT
        if parent and (above == NO_ROW or self._index.state_at[above] != LINKED):
            plan.outcomes[:] = Outcome.NO_PARENT
            return plan
        rows: list[int] = self._index.find(known.id, keys).rows.tolist()
        self._protect(known, _as_rows((above, *rows)), now)
        self._judge(plan, rows, indices)
        addresses = self._find_room(known, plan, indices)
        fitting = self._link(known, keys, above, rows, len(addresses))
        self._room.give_back(
            known, (address for chunk in addresses[fitting:] for address in chunk.values())
        )
        plan.outcomes[fitting:][plan.outcomes[fitting:] == _OK] = _BUSY
        plan.chain = _as_rows((above, *rows[:fitting]))
        self._room.unprotect(known, _as_rows(rows[fitting:]), empties=True)
        self._open(known, plan, rows, indices, addresses[:fitting])
        return plan

    def _protect(self, known: KnownNamespace, rows: Rows, now: float) -> None:
        """Nothing of the chain goes while room is made for the rest; what is stored, is used."""
        if not len(rows):
            return
        self._room.protect(rows)
        self._room.use(known, rows[self._index.resident[rows] != 0], now)

    def _judge(self, plan: Plan, rows: Sequence[int], indices: Sequence[int]) -> None:
        """EXISTS and WRITING, for the chunks that have a row."""
        for i, row in enumerate(rows):
            if row != NO_ROW:
                resident, writing = self._index.resident_at[row], self._index.writing.get(row, 0)
                for j, part in enumerate(indices):
                    if resident >> part & 1:
                        plan.outcomes[i, j] = _EXISTS
                    elif writing >> part & 1:
                        plan.outcomes[i, j] = _WRITING

    def _find_room(
        self, known: KnownNamespace, plan: Plan, indices: Sequence[int]
    ) -> list[dict[int, int]]:
        """Addresses by position of the part, for each chunk before the first that does not fit."""
        wanted = plan.outcomes == _OK
        if len(indices) == 1:
            return self._find_room_at_once(known, wanted, indices)
        # If room is short, one by one: the first part may not take the room of the others.
        free = [self._room.slabs.free_slots(known.extent_bytes[part]) for part in indices]
        enough = min(free) >= len(indices) * len(wanted)
        enough &= known.account.left >= known.chunk_bytes * len(wanted)
        found = self._find_room_at_once(known, wanted, indices) if enough else []
        while len(found) < len(wanted):
            chunk = wanted[len(found)]
            sizes = [known.extent_bytes[part] for part in np.array(indices)[chunk].tolist()]
            if not self._room.could_hold(known.account, sizes):
                break
            one = self._find_room_at_once(known, chunk[None], indices)
            if not one:
                break
            found += one
        return found

    def _find_room_at_once(
        self, known: KnownNamespace, wanted: npt.NDArray[np.bool_], indices: Sequence[int]
    ) -> list[dict[int, int]]:
        fitting = len(wanted)
        addresses: list[dict[int, int]] = [{} for _ in range(fitting)]
        for j, part in enumerate(indices):
            chunks = np.flatnonzero(wanted[:fitting, j]).tolist()
            found = self._room.allocate(known, known.extent_bytes[part], len(chunks))
            for i, address in zip(chunks, found, strict=False):
                addresses[i][j] = address
            if len(found) < len(chunks):
                fitting = chunks[len(found)]
        for chunk in addresses[fitting:]:
            self._room.give_back(known, chunk.values())
        return addresses[:fitting]

    def _link(
        self,
        known: KnownNamespace,
        keys: bytes,
        above: int,
        rows: list[int],
        fitting: int,
    ) -> int:
        """Gives the first `fitting` chunks rows, as far as there are any; returns how many."""
        left = self._room.make_rows(rows[:fitting].count(NO_ROW), known.account)
        end = 0
        while end < fitting:
            start, end = end, end + 1
            if rows[start] == NO_ROW:
                if not left:
                    return start
                while end < fitting and rows[end] == NO_ROW and end - start < left:
                    end += 1
                chain = keys[start * KEY_BYTES : end * KEY_BYTES]
                new = self._index.insert_chain(known.id, chain, above)
                self._index.leases[new] = 1
                rows[start:end] = new.tolist()
                left -= end - start
            above = rows[end - 1]
        return fitting

    def _open(
        self,
        known: KnownNamespace,
        plan: Plan,
        rows: Sequence[int],
        indices: Sequence[int],
        addresses: Sequence[dict[int, int]],
    ) -> None:
        writing, generation, width = self._index.writing, self.next_generation, len(indices)
        for i, (row, chunk) in enumerate(zip(rows, addresses, strict=False)):
            for j, address in chunk.items():
                part = indices[j]
                nbytes = known.extent_bytes[part]
                plan.items[i * width + j] = WriteItem(row, part, address, nbytes, generation)
                writing[row] = writing.get(row, 0) | 1 << part
                generation += 1
        self.next_generation = generation

    # ---- commit

    def commit(
        self,
        known: KnownNamespace,
        lease: Lease,
        numbers: Sequence[int],
        now: float,
        *,
        promoted: bool,
    ) -> tuple[list[Outcome], list[int]]:
        """Makes open items of a lease in its time visible, whatever order they are named in.

        Also gives the rows that have become visible by it. `promoted`: the store's own copies of
        what was published before; not counted again.
        """
        outcomes: dict[int, Outcome] = {}
        stored: list[int] = []
        before = self._room.counters.published_bytes
        for number in sorted(set(numbers)):
            outcomes[number] = self._commit_one(known, lease, number, stored)
        if promoted:
            self._room.counters.published_bytes = before
        if stored:
            rows = np.array(stored, np.intp)
            self._room.used_at[rows] = now
            known.policy.admit(rows)
            if not promoted:
                known.published += len(rows)
                self._room.counters.published_chunks += len(rows)
        return [outcomes[number] for number in numbers], stored

    def _commit_one(
        self, known: KnownNamespace, lease: Lease, number: int, stored: list[int]
    ) -> Outcome:
        items = lease.items or {}
        item = items.get(number)
        if item is None:
            return Outcome.INVALID
        index, row, part = self._index, item.row, item.part
        if index.state_at[row] == UNLINKED:  # deleted while it was being written
            self.close(lease, number)
            return Outcome.EXPIRED
        if not self._anchored(lease, row):
            self.close(lease, number)
            return Outcome.NO_PARENT
        self._forget_writing(item)
        del items[number], self._room.loose[item.address]
        index.address_at[part][row] = item.address
        index.generation_at[part][row] = item.generation
        resident = index.resident_at[row]
        if not resident:
            stored.append(row)
        index.resident_at[row] = resident | 1 << part
        if index.pins_at[row]:
            known.account.pinned += item.nbytes
        self._room.counters.published_bytes += item.nbytes
        return Outcome.OK

    def _anchored(self, lease: Lease, row: int) -> bool:
        """Whether what is above `row` is stored, up to the root of the chain."""
        index = self._index
        if index.state_at[row] == ORPHANED:  # a chunk above may have been published again
            for above, below in pairwise(lease.rows.tolist()):
                stored = index.state_at[above] == LINKED and index.resident_at[above]
                if stored and index.parent_at[below] == ORPHAN:
                    index.adopt(below, above)
        parent = index.parent_at[row]
        return index.state_at[row] == LINKED and (parent == ROOT or index.resident_at[parent] != 0)

    # ---- the end

    def close(self, lease: Lease, number: int) -> WriteItem:
        """Takes an open item's extent back: nothing writes there any more."""
        assert lease.items is not None
        item = lease.items.pop(number)
        self._room.give_back(self._room.namespaces.by_id[lease.namespace], [item.address])
        if not lease.expired:
            self._forget_writing(item)
        return item

    def end(self, known: KnownNamespace, lease: Lease) -> None:
        """The lease has ended."""
        for number in list(lease.items or ()):
            self.close(lease, number)
        self._room.unprotect(known, lease.rows, empties=True)

    def overdue(self, known: KnownNamespace, lease: Lease) -> int:
        """The lease has expired, but its holder may still write: only the extents stay its own.

        Others may write the keys at once. Returns the bytes that stay out of reach.
        """
        items = (lease.items or {}).values()
        for item in items:
            self._forget_writing(item)
        self._room.unprotect(known, lease.rows, empties=True)
        lease.rows = lease.rows[:0]
        return sum(item.nbytes for item in items)

    def _forget_writing(self, item: WriteItem) -> None:
        writing = self._index.writing
        others = writing.pop(item.row) & ~(1 << item.part)
        if others:
            writing[item.row] = others


def _as_rows(rows: Iterable[int]) -> Rows:
    """Those that there are."""
    return np.array([row for row in rows if row >= 0], np.intp)
