"""`kvpool bench evict`: what an eviction costs in a large store, and the longest pause it makes.

The store is full of chains of 20 chunks. Each request evicts some, stores as many new ones below a
prompt of their own, and uses three others; the index and the policy are the real ones, called as
the store calls them. CPU time, because others may share the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool.bench.report import Row
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Rows
from kvpool.store.index import ROOT, Index

BATCHES = (1, 20, 100, 1000)
CHAIN = 20
_USES = 3
_KEY_BYTES = 32
_NAMESPACE = 1
_WARM_UP = 4
"""The first of so many parts of the requests is not in the averages, but in the longest call: it
finds cold caches and untouched pages."""


def run(
    policy: str,
    rows: int,
    chunks: int,
    progress: Callable[[str], None],
    batches: Sequence[int] = BATCHES,
) -> list[Row]:
    """A row for each batch: about `chunks` evictions, so many at a time, from `rows` chunks."""
    out = []
    for batch in batches:
        progress(f"{policy}: filling {rows:,} rows")
        store = _Store(policy, rows)
        filled_ns = store.fill()
        progress(f"{policy}: evicting {batch} at a time")
        out.append(_measure(store, policy, batch, max(_WARM_UP, chunks // batch), filled_ns))
    return out


def _measure(store: _Store, policy: str, batch: int, requests: int, filled_ns: int) -> Row:
    spent = [store.request(batch) for _ in range(requests)]
    counted = spent[requests // _WARM_UP :]
    chunks = sum(one.chunks for one in counted)
    evicting = sum(one.evicting_ns for one in counted)
    using = sum(one.using_ns for one in counted)
    longest = max(max(one.evicting_ns, one.using_ns) for one in spent)
    return {
        "policy": policy,
        "rows": store.rows,
        "at_a_time": batch,
        "evict_us": evicting / chunks / 1e3,
        "with_uses_us": (evicting + using) / chunks / 1e3,
        "longest_ms": longest / 1e6,
        "longest_filling_ms": filled_ns / 1e6,
    }


@dataclass(frozen=True, slots=True)
class _Spent:
    chunks: int
    evicting_ns: int
    """In the policy's `evict`."""
    using_ns: int
    """Telling the policy what was stored and used, and taking it in."""


class _Store:
    """An index and a policy, without bytes."""

    def __init__(self, policy: str, rows: int) -> None:
        self.rows = rows
        self._index = Index(rows, seed=1)
        self._random = np.random.default_rng(2)
        self._tags = np.zeros(rows, np.uint64)
        facts = Facts(tags=lambda of: self._tags[of], idle=self._index.idle)
        self._policy = make_policy(policy, rows, self._evictable, facts)

    def fill(self) -> int:
        """Until nothing fits; returns the longest call of the policy, in nanoseconds."""
        longest = 0
        while room := self._index.room:
            longest = max(longest, self._told(self._stored(min(CHAIN, room)), used=None))
        return longest

    def request(self, batch: int) -> _Spent:
        """Evicts `batch` chunks, stores as many, and uses some."""
        start = time.process_time_ns()
        self._policy.evict(batch, self._index.cut)
        evicting = time.process_time_ns() - start
        gone = self._index.unlink_cut()
        self._index.release_all(gone)
        new = self._stored(len(gone))
        used = np.unique(self._random.integers(0, self.rows, _USES)).astype(np.intp)
        return _Spent(len(gone), evicting, self._told(new, used))

    def _stored(self, count: int) -> Rows:
        """A new chain."""
        keys = self._random.bytes(count * _KEY_BYTES)
        rows = self._index.insert_chain(_NAMESPACE, keys, ROOT)
        self._tags[rows] = np.frombuffer(keys, np.uint64)[:: _KEY_BYTES // 8]
        return rows

    def _told(self, new: Rows, used: Rows | None) -> int:
        """Tells the policy; returns the nanoseconds that it took."""
        start = time.process_time_ns()
        self._policy.admit(new)
        if used is not None:
            self._policy.touch(used)
        self._policy.unblock(new[-1:])
        self._policy.catch_up()
        return time.process_time_ns() - start

    def _evictable(self, rows: Rows) -> NDArray[np.bool_]:
        idle: NDArray[np.bool_] = (self._index.leases[rows] | self._index.children[rows]) == 0
        return idle
