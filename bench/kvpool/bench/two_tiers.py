"""A store with an SSD below its DRAM, in simulated time. See `simulation`.

What DRAM evicts is written to the SSD if the admission says so (write back); a hit on the SSD
brings the chunk back to DRAM, and its copy stays until the SSD evicts it. One index holds the rows
of both tiers, and each tier's order is a policy of its own. A chunk with descendants on the SSD is
always written: without it they could never be matched.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvpool.bench.simulation import Prepared, Simulation
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.admission import make_admission
from kvpool.store.eviction.base import Hint, Rows, TakesHints
from kvpool.store.index import NO_ROW


class TwoTiers(Simulation):
    """`policy` orders both tiers."""

    def __init__(
        self, prepared: Prepared, dram: int, ssd: int, policy: str, admission: str
    ) -> None:
        super().__init__(prepared, dram + ssd, policy)
        self._dram, self._ssd = dram, ssd
        self._in_dram = np.zeros(dram + ssd, np.bool_)
        self._on_ssd = np.zeros(dram + ssd, np.bool_)
        self._dram_children = np.zeros(dram + ssd, np.int32)
        self._dram_used = self._ssd_used = 0
        facts = replace(self._facts(), idle=None)
        here = replace(facts, room=lambda: self._dram - self._dram_used)
        below = replace(facts, room=lambda: self._ssd - self._ssd_used)
        self.policy = make_policy(policy, dram + ssd, self._may_leave_dram, here)
        self.ssd_policy = make_policy(policy, dram + ssd, self._may_leave_ssd, below)
        self._admission = make_admission(admission, self.policy)

    def serve(self, number: int, hint: Hint | None = None) -> None:
        """The trace's request of this number."""
        blocks = self._prepared.trace.requests[number].blocks
        if not len(blocks):
            return
        index, policy, keys = self._index, self.policy, self._prepared.keys[number]
        known = self._leading(keys)
        index.leases[known] = 1
        hot = known[self._in_dram[known]]
        cold = known[~self._in_dram[known]]
        missing = len(blocks) - len(hot) - (self._dram - self._dram_used)
        if missing > 0:
            self.counts.evictions += policy.evict(missing, self._leave_dram)
        room = self._dram - self._dram_used
        added = self._insert(blocks[: len(known) + max(0, room - len(cold))], keys, known)
        entering = np.append(cold[:room], added)
        self._enter_dram(entering)
        policy.admit(entering)
        policy.touch(hot)
        written = known[self._on_ssd[known]]
        self.ssd_policy.touch(written)
        rows = np.append(hot, entering)
        if hint is not None and isinstance(policy, TakesHints):
            policy.hint(rows, hint)
        index.leases[known] = 0
        policy.unblock(rows[-1:])  # below each of the others is the next one
        self.ssd_policy.unblock(written)
        self.counts.ssd_hits += len(cold)
        self._count(len(blocks), len(known), len(added))

    def check_integrity(self) -> None:
        """O(capacity)."""
        self._index.check_integrity()
        linked = np.zeros(len(self._in_dram), np.bool_)
        linked[self._index.linked_rows()] = True
        assert np.array_equal(linked, self._in_dram | self._on_ssd), "resident somewhere"
        for policy, here, room in (
            (self.policy, self._in_dram, self._dram),
            (self.ssd_policy, self._on_ssd, self._ssd),
        ):
            policy.check_integrity()
            assert policy.statistics()["rows"] == np.count_nonzero(here) <= room

    def _enter_dram(self, rows: Rows) -> None:
        self._in_dram[rows] = True
        self._dram_used += len(rows)
        parents = self._index.parent[rows]
        self._dram_children[parents[parents >= 0]] += 1  # distinct: rows are of one chain

    def _leave_dram(self, row: int) -> int:
        index = self._index
        self._in_dram[row] = False
        self._dram_used -= 1
        parent = index.parent_at[row]
        if parent >= 0:
            self._dram_children[parent] -= 1
        if not self._on_ssd[row] and not self._write(row):
            index.unlink(row)
            index.release(row)
        return parent if parent >= 0 and self._may_leave_dram(_only(parent))[0] else NO_ROW

    def _write(self, row: int) -> bool:
        """To the SSD, if it is admitted and there is room."""
        rows = _only(row)
        if not self._index.children_at[row] and not self._admission.admits(rows)[0]:
            return False
        if self._ssd_used == self._ssd and not self.ssd_policy.evict(1, self._leave_ssd):
            return False
        self._on_ssd[row] = True
        self._ssd_used += 1
        self.ssd_policy.admit(rows)
        self.counts.ssd_writes += 1
        return True

    def _leave_ssd(self, row: int) -> int:
        self._on_ssd[row] = False
        self._ssd_used -= 1
        if self._in_dram[row]:
            return NO_ROW
        index = self._index
        parent = index.parent_at[row]
        index.unlink(row)
        index.release(row)
        if parent >= 0 and self._on_ssd[parent] and self._may_leave_ssd(_only(parent))[0]:
            return parent
        return NO_ROW

    def _may_leave_dram(self, rows: Rows) -> NDArray[np.bool_]:
        idle: NDArray[np.bool_] = (self._index.leases[rows] | self._dram_children[rows]) == 0
        return idle

    def _may_leave_ssd(self, rows: Rows) -> NDArray[np.bool_]:
        index = self._index
        last = (index.children[rows] == 0) | self._in_dram[rows]
        out: NDArray[np.bool_] = last & (index.leases[rows] == 0)
        return out


def _only(row: int) -> Rows:
    return np.array([row], np.intp)
