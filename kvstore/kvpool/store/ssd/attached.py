"""A tier at work below one store: what is matched, loaded, written and shown of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.eviction.admission import DEFAULT_ADMISSION
from kvpool.store.index import LINKED, NO_ROW, ROOT
from kvpool.store.leases import Lease
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import Explanation, Loading, split_keys
from kvpool.store.ssd.demotion import Demotion, Memory
from kvpool.store.ssd.prefill import Prefill
from kvpool.store.ssd.promotion import Cold, Promotion
from kvpool.store.ssd.shelf import Shelf
from kvpool.store.store import Store

WRITE_ONLY_CHUNKS = 1000
"""Written without one of them ever being read: worth a warning."""


class Ssd:
    """The SSD tier of `store`. One thread calls it, the store's own."""

    def __init__(
        self,
        store: Store,
        shelf: Shelf,
        memory: Memory,
        *,
        write_through: bool,
        admission: str = DEFAULT_ADMISSION,
    ) -> None:
        self.shelf = shelf
        self.demotion = Demotion(
            store, shelf, memory, write_through=write_through, admission=admission
        )
        self.promotion = Promotion(store, shelf, memory)
        self.hit_chunks = 0
        """That matches found here and not in memory."""
        self.skipped_chunks = 0
        """That would have taken longer to load than to compute."""
        self.learned_skipped_chunks = 0
        """Of these, by a prefill speed that was learned."""
        self.unsaved_chunks = 0
        """Evicted from memory without having been written."""
        store.room.evicted = self._evicted
        self.facts: dict[str, Any] = {}
        """What was found at the start: where it is, and how it is read."""
        self._store = store
        self._prefills: dict[int, Prefill] = {}

    # ---- reading

    def cold(
        self, known: KnownNamespace, keys: bytes, parts: int, hits: int, prefill_tokens_s: float
    ) -> tuple[Cold | None, int]:
        """What follows the first `hits` of `keys` here and is worth loading, and how many chunks
        are not. Nothing is held yet, and nothing counted."""
        if known.id not in self.shelf.known or self.shelf.tier.down:
            return None, 0
        run = self.shelf.run(known, keys, parts)
        count = run.hits - hits
        if count <= 0:
            return None, 0
        if not self._worth(known, count, prefill_tokens_s):
            return None, count
        start = hits * KEY_BYTES
        parent = keys[start - KEY_BYTES : start]
        wanted = split_keys(keys[start : run.hits * KEY_BYTES])
        return Cold(known, parent, wanted, run.rows[hits:], self.shelf), 0

    def _worth(self, known: KnownNamespace, count: int, prefill_tokens_s: float) -> bool:
        """Loading is linear in the chunks, behind what is queued, and so is computing them (at
        least): it pays for all of them or for none."""
        tokens_s = prefill_tokens_s if prefill_tokens_s >= 0 else self.prefill_tokens_s(known)
        if not tokens_s:
            return True
        return self.load_s(known, count) < count * known.namespace.chunk_tokens / tokens_s

    def prefill_tokens_s(self, known: KnownNamespace) -> float:
        """How fast the engines of a namespace seem to compute; 0: not known."""
        prefill = self._prefills.get(known.id)
        return prefill.tokens_s if prefill is not None else 0.0

    def missed(
        self, known: KnownNamespace, key: bytes, now: float, skipped: int, *, learned: bool
    ) -> None:
        """A match ends before the chunk `key`, which somebody computes now. `skipped` chunks from
        there on are here; `learned`: by the speed that was learned."""
        self.skipped_chunks += skipped
        self.learned_skipped_chunks += skipped if learned else 0
        prefill = self._prefills.get(known.id)
        if prefill is None:
            prefill = self._prefills[known.id] = Prefill(known.namespace.chunk_tokens)
        prefill.missed(key, now)

    def load_s(self, known: KnownNamespace, count: int) -> float:
        """How long loading `count` chunks would take now, in seconds."""
        return self.shelf.tier.estimate_s(count * sum(known.extent_bytes))

    def hold(self, cold: Cold, lease: Lease) -> None:
        """`lease` protects what is cold, too, until it is loaded or the lease ends."""
        self.shelf.protect(cold.rows)
        self.shelf.use(cold.known, cold.rows)
        self.hit_chunks += len(cold.keys)
        lease.cold = cold

    def load(self, lease: Lease, cold: Cold, upto: int) -> Loading:
        """Brings the first `upto` chunks of what was cold on their way. See `Store.load`."""
        pending = self.promotion.advance(lease, cold, upto)
        self.shelf.tier.flush()
        return Loading(
            len(lease.rows),
            pending,
            Outcome.HIT if pending else cold.outcome,
            self.promotion.wait_s(cold) if pending else 0.0,
        )

    def bring_up(self, known: KnownNamespace, key: bytes) -> bool:
        """Brings a chunk that is only here on its way into memory, with what is above it. False if
        that cannot be."""
        if known.id not in self.shelf.known or self.shelf.tier.down:
            return False
        index, row = self.shelf.index, self.shelf.find(known, key)
        keys: list[bytes] = []
        while row >= 0 and index.state_at[row] == LINKED and not self._store.holds(known.id, key):
            keys.append(key)
            row = index.parent_at[row]
            key = index.key_bytes(row) if row >= 0 else b""
        if not keys or (row < 0 and row != ROOT):
            return False
        coming = self.promotion.start(known, key, keys[::-1])
        self.shelf.tier.flush()
        return coming

    # ---- writing

    def stored(self, known: KnownNamespace, rows: list[int], now: float) -> None:
        """A writer's rows, parents first, have become visible in memory."""
        self.demotion.stored(rows)
        prefill = self._prefills.get(known.id)
        if prefill is not None and rows:
            index = self._store.index
            above = index.parent_at[rows[0]]
            parent = index.key_bytes(above) if above >= 0 else b""
            first, last = index.key_bytes(rows[0]), index.key_bytes(rows[-1])
            prefill.published(parent, first, last, len(rows), now)

    def turn(self) -> None:
        """Call it often: starts what should be written."""
        self.demotion.turn()
        self.demotion.advance()
        self.shelf.tier.tick()

    def _evicted(self, namespace: int, key: bytes) -> None:
        if self.shelf.index.find_one(namespace, key) == NO_ROW:
            self.unsaved_chunks += 1

    def forget(self, known: KnownNamespace, key: bytes) -> bool:
        """The chunk was deleted. True if it was here."""
        self.demotion.forget(key)
        return known.id in self.shelf.known and self.shelf.remove(known, key, Reason.DELETED)

    def clear(self, known: KnownNamespace) -> int:
        """Everything of a namespace goes; returns how many chunks were here only."""
        self.demotion.forget_namespace(known)
        if known.id not in self.shelf.known:
            return 0
        index = self._store.index
        rows = index.linked_rows()
        mine = rows[index.namespace[rows] == known.id].tolist()
        here = self.shelf.index.find(known.id, b"".join(map(index.key_bytes, mine))).rows
        return self.shelf.clear(known) - int(np.count_nonzero(here != NO_ROW))

    # ---- looking in

    def explain(self, known: KnownNamespace, key: bytes, found: Explanation) -> Explanation:
        """What is known of a chunk of which memory says `found`."""
        row = self.shelf.find(known, key) if known.id in self.shelf.known else NO_ROW
        if row == NO_ROW:
            return found
        index = self.shelf.index
        linked, parts = index.state_at[row] == LINKED, index.resident_at[row]
        if found.parts:
            return replace(found, durable=linked and not found.parts & ~parts)
        return Explanation(
            Outcome.HIT if linked else Outcome.MISS,
            Reason.UNKNOWN if linked else Reason.ORPHAN,
            parts,
            known.nbytes(parts),
            index.leases_at[row],
            children=index.children_at[row],
            on_ssd=True,
            durable=linked,
        )

    def trouble(self) -> str:
        """What stands in the way of normal work, in words; empty if nothing does."""
        tier = self.shelf.tier
        return f"the SSD tier is down: {tier.down}" if tier.down else tier.full

    def status(self) -> dict[str, Any]:
        """Figures, JSON-able."""
        tier, counters = self.shelf.tier, self.shelf.tier.counters
        new = counters.written_bytes
        return {
            **self.facts,
            "catalogue": tier.catalogue_figures,
            "down": tier.down,
            "full": tier.full,
            "downs": tier.condition.downs,
            "chunks": self.shelf.index.count,
            "chunks_max": self.shelf.index.capacity,
            "slabs": asdict(tier.space.statistics()),
            "quarantined_bytes": tier.space.quarantined_bytes,
            "writing_bytes": tier.writing_bytes,
            "writing_chunks": self.demotion.chunks,
            "waiting_chunks": self.demotion.waiting,
            "reading_bytes": tier.reading_bytes,
            "read_bytes_s": tier.speed.bytes_s,
            "write_through": self.demotion.write_through,
            "write_amplification": counters.device_bytes / new if new else 1.0,
            "writes_per_hit": counters.written_chunks / max(1, self.hit_chunks),
            "counters": asdict(counters)
            | {
                "hit_chunks": self.hit_chunks,
                "skipped_chunks": self.skipped_chunks,
                "learned_skipped_chunks": self.learned_skipped_chunks,
                "unsaved_chunks": self.unsaved_chunks,
                "declined_chunks": self.demotion.declined_chunks,
                "promoted_chunks": self.promotion.promoted_chunks,
                "failed_chunks": self.promotion.failed_chunks,
                "evicted_chunks": self.shelf.evicted_chunks,
                "reassigned_segments": self.shelf.reassigned_segments,
            },
        }

    def warnings(self) -> list[str]:
        written = self.shelf.tier.counters.written_chunks
        if written >= WRITE_ONLY_CHUNKS and not self.hit_chunks:
            return [f"the SSD tier is write-only: {written} chunks were written, none ever matched"]
        return []
