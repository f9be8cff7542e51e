"""A store in simulated time: the real index and eviction policy under a trace, without the bytes.

What is real: `kvpool.store.index.Index` with its look-ups, insertions, unlinking, parents, children
and leases; the policies, called as the store calls them. What is not there: sessions, the allocator
(every chunk has the same size), payloads and time between match and commit.

A request matches its leading resident blocks and leases them, makes room for the others, stores
them, and lets go. Blocks that do not fit beside what the request itself holds are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.bench.traces import BLOCK_TOKENS, NEVER, Blocks, Trace
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Hint, Rows, TakesHints
from kvpool.store.index import NO_ROW, ROOT, Index

_NAMESPACE = 1
_KEY_BYTES = 32

_FEW = 2
"""Blocks that are looked up one by one: many requests end there."""

WORK_TOKENS = 30_500
"""A block at this position costs twice what the first one costs to compute."""


@dataclass(slots=True)
class Counts:
    """Of blocks."""

    references: int = 0
    hits: int = 0
    work: float = 0.0
    """References, each weighted by what it costs to compute."""
    saved_work: float = 0.0
    evictions: int = 0
    """From DRAM."""
    writes: int = 0
    """To DRAM."""
    ssd_hits: int = 0
    """Hits that DRAM alone would have missed."""
    ssd_writes: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A trace with what all its simulations share."""

    trace: Trace
    keys: list[bytes]
    """By request: 32 bytes for each block."""
    tags: NDArray[np.uint64]
    """By block: the first 64 bits of its key."""
    next_uses: list[NDArray[np.int64]]
    """By request: for each block, the reference that uses it next, or NEVER."""
    work: list[float]
    """What the first n blocks of a prompt cost to compute, the first one's cost being 1."""


def prepare(trace: Trace) -> Prepared:
    """Keys are random: the index sees digests."""
    keys = np.frombuffer(np.random.default_rng(0).bytes(_KEY_BYTES * trace.unique), np.uint64)
    keys = keys.reshape(trace.unique, -1)
    by_request = [keys[request.blocks].tobytes() for request in trace.requests]
    longest = max(len(request.blocks) for request in trace.requests)
    weights = 1 + np.arange(longest) * BLOCK_TOKENS / WORK_TOKENS
    work = [0.0, *np.cumsum(weights).tolist()]
    return Prepared(trace, by_request, keys[:, 0].copy(), trace.next_uses(), work)


class Simulation:
    """One policy at one capacity."""

    def __init__(self, prepared: Prepared, capacity: int, policy: str) -> None:
        self.counts = Counts()
        self._prepared = prepared
        # The optimum does not store what is never used again, which is a tail of each prompt. Of
        # the rest it may decline to store a block: it stores all, then lets go of what is too much.
        self._offline = policy == "belady"
        self._capacity = capacity
        rows = capacity + len(prepared.work) if self._offline else capacity
        self._index = Index(rows, seed=1)
        self._block = np.zeros(rows, np.intp)
        self._next_use = np.zeros(prepared.trace.unique, np.int64)  # by block
        self.policy = make_policy(policy, rows, self._evictable, self._facts())

    def serve(self, number: int, hint: Hint | None = None) -> None:
        """The trace's request of this number."""
        blocks = self._prepared.trace.requests[number].blocks
        if not len(blocks):
            return
        index, policy = self._index, self.policy
        wanted, keys = len(blocks), self._prepared.keys[number]
        if self._offline:
            self._next_use[blocks] = uses = self._prepared.next_uses[number]
            wanted = int(np.count_nonzero(uses < NEVER))
        known = self._leading(keys)
        added = known[:0]
        index.leases[known] = 1
        if len(known) < wanted:
            added = self._store(blocks[:wanted], keys, known)
            policy.admit(added)
        policy.touch(known)
        if hint is not None and isinstance(policy, TakesHints):
            policy.hint(np.concatenate([known, added]), hint)
        index.leases[known] = 0
        policy.unblock((added if len(added) else known)[-1:])  # above it, each has a child
        self._count(len(blocks), len(known), len(added))
        if self._offline:
            self._shed(added)

    def check_integrity(self) -> None:
        """O(capacity)."""
        assert self._index.count <= self._capacity, "no more blocks than fit"
        assert self.policy.statistics()["rows"] == self._index.count
        self.policy.check_integrity()

    # ---- what a store does

    def _leading(self, keys: bytes) -> Rows:
        """The rows of the leading blocks that are resident."""
        index = self._index
        few: list[int] = []
        for at in range(0, min(len(keys), _FEW * _KEY_BYTES), _KEY_BYTES):
            row = index.find_one(_NAMESPACE, keys[at : at + _KEY_BYTES])
            if row == NO_ROW:
                return np.array(few, np.intp)
            few.append(row)
        rows = index.find(_NAMESPACE, keys).rows
        absent = (rows == NO_ROW).nonzero()[0]
        return rows[: absent[0]] if len(absent) else rows

    def _store(self, blocks: Blocks, keys: bytes, above: Rows) -> Rows:
        """Stores what fits of those of `blocks` that follow `above`; returns its rows."""
        index = self._index
        missing = len(blocks) - len(above) - index.room
        if missing > 0:
            self.counts.evictions += len(self._evict(missing))
        return self._insert(blocks[: len(above) + index.room], keys, above)

    def _insert(self, blocks: Blocks, keys: bytes, above: Rows) -> Rows:
        """New rows for those of `blocks` that follow `above`."""
        first, end = len(above), len(blocks)
        parent = int(above[-1]) if first else ROOT
        chain = keys[first * _KEY_BYTES : end * _KEY_BYTES]
        rows = self._index.insert_chain(_NAMESPACE, chain, parent)
        self._block[rows] = blocks[first:]
        return rows

    def _shed(self, added: Rows) -> None:
        """Evicts what exceeds the capacity; a block that was just stored was never written."""
        excess = self._index.count - self._capacity
        if excess > 0:
            evicted = self._evict(excess)
            declined = int(np.isin(added, evicted).sum())
            self.counts.evictions += len(evicted) - declined
            self.counts.writes -= declined

    def _evict(self, n: int) -> Rows:
        """Up to `n` rows go; returns them in their order."""
        self.policy.evict(n, self._index.cut)
        rows = self._index.unlink_cut()
        self._index.release_all(rows)
        return rows

    def _count(self, asked: int, hits: int, added: int) -> None:
        counts, work = self.counts, self._prepared.work
        counts.references += asked
        counts.hits += hits
        counts.work += work[asked]
        counts.saved_work += work[hits]
        counts.writes += added

    # ---- what a policy may ask

    def _evictable(self, rows: Rows) -> NDArray[np.bool_]:
        index = self._index
        idle: NDArray[np.bool_] = (index.leases[rows] | index.children[rows]) == 0
        return idle

    def _facts(self) -> Facts:
        prepared = self._prepared
        tags, depths = prepared.tags, prepared.trace.depths()
        return Facts(
            tags=lambda rows: tags[self._block[rows]],
            depths=lambda rows: depths[self._block[rows]],
            next_uses=lambda rows: self._next_use[self._block[rows]],
            idle=self._index.idle,
        )
