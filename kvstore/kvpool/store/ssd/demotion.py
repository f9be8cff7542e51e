"""Demotion: which chunks of the memory are written to the SSD, and when.

write back       what is next to be evicted, before it is, parents first
write through    what was published, soon after

Nobody waits for it. While a chunk is being written a lease of the store's own keeps it; what the
tier refuses (it is slow, full or down) is counted and stays as it is: the memory evicts it as if
there was no SSD.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvpool.store.eviction.admission import DEFAULT_ADMISSION, Admission, make_admission
from kvpool.store.eviction.base import Policy
from kvpool.store.index import LINKED, ROOT
from kvpool.store.leases import Lease
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.ssd.entries import Entry
from kvpool.store.ssd.shelf import Shelf
from kvpool.store.ssd.tier import Draft, Piece
from kvpool.store.store import Store
from kvpool.transfer.copying import Bytes

Memory = Callable[[int, int], Bytes]
"""The bytes of the pool at an address, so many of them."""

AHEAD_SHARE = 8
"""Writing back begins when less than this part of the memory (an eighth) is free."""
AHEAD_ROWS = 128
"""Chunks that are looked at in one turn."""
RESERVE = 32
"""Extents of a class that are kept free on the SSD, so that a write need not wait for the deletion
of what makes room for it."""


@dataclass(slots=True)
class _Writing:
    """A chunk on its way."""

    known: KnownNamespace
    draft: Draft
    lease: Lease


class Demotion:
    """Moves chunks of `store` to `shelf`."""

    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        memory: Memory,
        *,
        write_through: bool,
        admission: str = DEFAULT_ADMISSION,
    ) -> None:
        """`admission` says which of the chunks that leave memory are worth writing back."""
        self.write_through = write_through
        self.declined_chunks = 0
        """Not worth writing, as the admission sees it."""
        self._admission = admission
        self._admissions: dict[Policy, Admission] = {}
        self._declined: dict[Policy, set[bytes]] = {}
        self._store = store
        self._shelf = shelf
        self._memory = memory
        self._writing: dict[bytes, _Writing] = {}
        self._early: dict[bytes, tuple[KnownNamespace, Entry]] = {}
        """Announced, but something above it is still on its way."""
        self._below: dict[bytes, list[bytes]] = {}
        """What came early, by its parent."""
        self._fresh: deque[int] = deque()
        self._seen = -1
        """What had changed when all that is to go was last found to be written."""

    @property
    def chunks(self) -> int:
        """On their way."""
        return len(self._writing)

    @property
    def waiting(self) -> int:
        """Published, and to be written as soon as the queue has room."""
        return len(self._fresh)

    def stored(self, rows: list[int]) -> None:
        """These rows have become visible in memory."""
        if self.write_through:
            self._fresh.extend(rows)

    def turn(self) -> None:
        """Looks for what should be written; call it every few ms."""
        tier, store = self._shelf.tier, self._store
        if self._fresh or store.allocator is None or tier.busy or tier.down or tier.full:
            return
        counters = store.counters
        changes = counters.published_chunks + counters.evicted_chunks + len(self._writing)
        figures = store.allocator.statistics()
        if changes != self._seen and figures.free_bytes * AHEAD_SHARE < figures.capacity_bytes:
            for policy in store.policies.values():
                self._fresh.extend(self._leaving(policy))
        self._seen = changes

    def advance(self) -> bool:
        """Starts one chunk of what is to be written; True if there is more, and the tier takes it.
        A match that comes meanwhile waits for it."""
        tier = self._shelf.tier
        if tier.down or tier.full:
            tier.counters.refused_writes += len(self._fresh)
            self._fresh.clear()
            return False
        if not self._fresh or tier.busy:
            return False
        lacking = self._lacking(self._fresh[0])
        if lacking and not self._write(*lacking[0]):
            return False
        if len(lacking) > 1:
            self._fresh.extendleft(row for _, row, _ in lacking[-2:0:-1])
        else:
            self._fresh.popleft()
        return bool(self._fresh)

    def _leaving(self, policy: Policy) -> list[int]:
        """What is next to be evicted, is not written yet and is worth it."""
        index, known = self._store.index, self._store.namespaces
        victims = {row: index.key_bytes(row) for row in policy.victims(AHEAD_ROWS).tolist()}
        dirty = [
            row
            for row, key in victims.items()
            if not self._on_way(key) and self._missing(known[index.namespace_at[row]], row, key)
        ]
        old = self._declined.get(policy, set())
        asked = [row for row in dirty if victims[row] not in old]
        worth = dict.fromkeys(dirty, False)
        if asked:
            admission = self._admissions.get(policy)
            if admission is None:
                admission = self._admissions[policy] = make_admission(self._admission, policy)
            answers = admission.admits(np.array(asked, np.intp)).tolist()
            worth.update(zip(asked, answers, strict=True))
            self.declined_chunks += answers.count(False)
        # Who is used again is no victim for a while, and is asked again afterwards.
        self._declined[policy] = {victims[row] for row in dirty if not worth[row]}
        return [row for row in dirty if worth[row]]

    def flush(self) -> bool:
        """Starts to write everything that is not there yet, as far as the queue has room; True if
        nothing is left to start."""
        index = self._store.index
        rows = index.linked_rows()
        return all(
            self._write(*chunk)
            for row in rows[index.resident[rows] != 0].tolist()
            for chunk in self._lacking(row)
        )

    def forget(self, key: bytes) -> None:
        """The chunk was deleted: what is on its way must not arrive."""
        writing = self._writing.get(key)
        if writing is not None:
            self._shelf.tier.cancel(writing.draft)
        elif key in self._early:
            self._drop(key)

    def forget_namespace(self, known: KnownNamespace) -> None:
        """As `forget`, of everything in a namespace."""
        writing = [key for key, one in self._writing.items() if one.known is known]
        early = [key for key, (owner, _) in self._early.items() if owner is known]
        for key in writing + early:
            self.forget(key)

    def _on_way(self, key: bytes) -> bool:
        return key in self._writing or key in self._early

    def _lacking(self, row: int) -> list[tuple[KnownNamespace, int, bytes]]:
        """What is to be written so that a row can be matched on the SSD, parents first: the row
        and what is above it; nothing if all is there or on its way, or if it is no use."""
        index, chain = self._store.index, []
        while row >= 0 and index.state_at[row] == LINKED and index.resident_at[row]:
            known = self._store.namespaces[index.namespace_at[row]]
            key = index.key_bytes(row)
            if self._on_way(key) or not self._missing(known, row, key):
                row = ROOT
                break
            if not self._shelf.fits(known):
                return []
            chain.append((known, row, key))
            row = index.parent_at[row]
        return chain[::-1] if row == ROOT else []  # else it is cut off somewhere above

    def _missing(self, known: KnownNamespace, row: int, key: bytes) -> int:
        """Bitmap of the parts that are in memory and not on the SSD."""
        return self._store.index.resident_at[row] & ~self._shelf.parts_of(known, key)

    def _write(self, known: KnownNamespace, row: int, key: bytes) -> bool:
        index, shelf = self._store.index, self._shelf
        missing = self._missing(known, row, key)
        parts = [part for part in range(missing.bit_length()) if missing >> part & 1]
        self._make_room(known, parts)
        forms = shelf.forms(known)
        pieces = [
            Piece(
                part,
                index.generation_at[part][row],
                self._memory(index.address_at[part][row], known.extent_bytes[part]),
                forms[part].planes,
            )
            for part in parts
        ]
        above = index.parent_at[row]
        old = shelf.find(known, key)
        kept = shelf.extents(old, range(len(forms))) if old >= 0 else []
        draft = Draft(
            key,
            shelf.space_of(known),
            index.key_bytes(above) if above >= 0 else b"",
            pieces,
            lambda entry: self._done(key, entry),
            kept=tuple(kept),
        )
        if shelf.tier.write(draft) is not None:
            return False
        lease = self._store.hold(known, np.array([row], np.intp))
        self._writing[key] = _Writing(known, draft, lease)
        return True

    def _make_room(self, known: KnownNamespace, parts: list[int]) -> None:
        tier = self._shelf.tier
        for part in parts:
            nbytes = known.extent_bytes[part]
            slot = tier.space.slot_bytes(nbytes)
            reserve = max(1, min(RESERVE, tier.space.capacity_bytes // slot // 8))
            lacking = reserve - tier.space.free_slots(nbytes) - tier.leaving
            if lacking > 0:
                self._shelf.make_room(lacking, slot)

    def _done(self, key: bytes, entry: Entry | None) -> None:
        writing = self._writing.pop(key)
        self._store.let_go(writing.lease)
        if entry is None:
            self._drop(key)
        elif self._on_way(entry.parent):
            self._early[key] = writing.known, entry
            self._below.setdefault(entry.parent, []).append(key)
        else:
            self._shelf.add(writing.known, entry)
            for child in self._arrived_below(key):
                self._shelf.add(*child)

    def _arrived_below(self, key: bytes) -> Iterator[tuple[KnownNamespace, Entry]]:
        """What came early and is below `key`, parents first; it does not wait any more."""
        waiting = deque(self._below.pop(key, ()))
        while waiting:
            child = waiting.popleft()
            early = self._early.pop(child, None)
            if early is not None:
                yield early
                waiting += self._below.pop(child, ())

    def _drop(self, key: bytes) -> None:
        """A chunk does not arrive: what was announced of it and below it is of no use."""
        early = self._early.pop(key, None)
        gone = [early] if early is not None else []
        for _, entry in [*gone, *self._arrived_below(key)]:
            self._shelf.tier.delete(entry.key)
            self._shelf.tier.release(entry.extents)
