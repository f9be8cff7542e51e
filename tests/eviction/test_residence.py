"""What is resident under any policy: a specification, checked by one machine for all of them.

The machine is a small store made of the real index and the policy under test. It publishes chunk by
chunk, matches, leases, pins, deletes and evicts in any order, and after each step:

- nothing is resident beyond the capacity;
- what is resident is prefix-closed: a chunk's parent is resident, or the chunk is an orphan, which
  a deletion left behind;
- what is leased or pinned is resident;
- orphans are never matched, and go before all others.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvpool.store.eviction import make_policy, phz, policy_names
from kvpool.store.eviction.base import Facts, Hint, Rows, TakesHints
from kvpool.store.index import LINKED, NO_ROW, ORPHAN, ORPHANED, ROOT, Index

Chain = tuple[int, ...]
"""A chunk by its path: the numbers of the chunks from the root down to it."""

CAPACITY = 12
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
"""Few numbers, so that chains share prefixes and branch off."""


def key_of(chain: Chain) -> bytes:
    return bytes([len(chain), *chain]).ljust(8, b"\0") * 4


class Residence(RuleBasedStateMachine):
    policy_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(CAPACITY, seed=1)
        facts = Facts(tags=self.tags, idle=self.index.idle)
        self.policy = make_policy(self.policy_name, CAPACITY, self.evictable, facts)
        self.held: list[tuple[NDArray[np.int32], Rows]] = []
        """Leases and pins: the column that counts them, and their rows."""
        self.evicted: list[int] = []
        self.demoted: set[int] = set()
        """Orphans, some of them adopted since, that nobody has used."""

    # The store's knowledge.

    def tags(self, rows: Rows) -> NDArray[np.uint64]:
        keys = b"".join(self.index.key_bytes(row) for row in rows.tolist())
        return np.frombuffer(keys, np.uint64)[::4]

    def evictable(self, rows: Rows) -> NDArray[np.bool_]:
        index = self.index
        held = index.leases[rows] | index.pins[rows] | index.children[rows]
        return np.asarray(held == 0)

    def leading(self, chain: Chain) -> Rows:
        """The rows of the leading chunks that can be matched."""
        rows = []
        for end in range(1, len(chain) + 1):
            row = self.index.find_one(0, key_of(chain[:end]))
            if row == NO_ROW or self.index.state[row] != LINKED:
                break
            rows.append(row)
        return np.array(rows, np.intp)

    def gone(self, row: int) -> int:
        index = self.index
        assert self.evictable(np.array([row], np.intp))[0], "leased, pinned or a parent"
        waiting = self.evictable(np.array(sorted(self.demoted), np.intp)).any()
        assert row in self.demoted or not waiting, "an orphan should have gone first"
        self.demoted.discard(row)
        parent = int(index.parent[row])
        index.unlink(row)
        index.release(row)
        self.evicted.append(row)
        return parent if parent >= 0 and self.evictable(np.array([parent], np.intp))[0] else NO_ROW

    def make_room(self) -> bool:
        return self.index.room > 0 or self.policy.evict(1, self.gone) == 1

    def use(self, rows: Rows) -> None:
        self.policy.touch(rows)
        self.demoted.difference_update(rows.tolist())

    # What happens.

    @rule(chain=paths, at_once=st.booleans())
    def publish(self, chain: Chain, at_once: bool) -> None:
        """All that is missing of a chain, in one commit or chunk by chunk; room may not suffice."""
        above = self.leading(chain)
        self.index.leases[above] += 1
        parent = int(above[-1]) if len(above) else ROOT
        added: list[int] = []
        for end in range(len(above) + 1, len(chain) + 1):
            row = self.index.find_one(0, key_of(chain[:end]))
            if row != NO_ROW:  # an orphan comes home
                if self.index.parent[row] == ORPHAN:
                    self.index.adopt(row, parent)
                self.use(np.array([row], np.intp))
            elif self.make_room():
                row = self.index.insert(0, key_of(chain[:end]), parent)
                if at_once:
                    added.append(row)
                else:
                    self.policy.admit(np.array([row], np.intp))
            else:
                break
            self.index.leases[row] += 1
            above, parent = np.append(above, np.intp(row)), row
        if added:
            self.policy.admit(np.array(added, np.intp))
        self.use(above[~np.isin(above, added)])
        self.let_go_of(self.index.leases, above)

    @rule(chain=paths, pinned=st.booleans())
    def match(self, chain: Chain, pinned: bool) -> None:
        """Uses what is there, and keeps it under a lease or pin."""
        rows = self.leading(chain)
        column = self.index.pins if pinned else self.index.leases
        column[rows] += 1
        self.use(rows)
        self.held.append((column, rows))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.held) - 1))
        self.let_go_of(*self.held.pop(number))

    @rule(n=st.integers(1, CAPACITY))
    def evict(self, n: int) -> None:
        before, self.evicted = self.index.count, []
        count = self.policy.evict(n, self.gone)
        assert count == len(self.evicted) == before - self.index.count
        if count < n:
            assert not self.evictable(self.index.linked_rows()).any(), "more could have gone"

    @rule(chain=paths)
    def delete(self, chain: Chain) -> None:
        """One chunk that nobody holds; what is below it becomes orphans."""
        row = self.index.find_one(0, key_of(chain))
        if row == NO_ROW or self.index.leases[row] or self.index.pins[row]:
            return
        parent = int(self.index.parent[row])
        self.policy.forget(np.array([row], np.intp))
        orphans = self.index.unlink(row)
        self.index.release(row)
        self.policy.demote(np.array(orphans, np.intp))
        self.demoted.discard(row)
        self.demoted.update(orphans)
        if parent >= 0:
            self.policy.unblock(np.array([parent], np.intp))

    @rule(chain=paths, goes_on=st.sampled_from([0.0, 0.5, 1.0]))
    def hint(self, chain: Chain, goes_on: float) -> None:
        if isinstance(self.policy, TakesHints):
            self.policy.hint(self.leading(chain), Hint(will_continue=goes_on))

    def let_go_of(self, column: NDArray[np.int32], rows: Rows) -> None:
        column[rows] -= 1
        self.policy.unblock(rows[column[rows] == 0])

    # What always holds.

    @invariant()
    def nothing_exceeds_the_capacity(self) -> None:
        assert self.index.count <= CAPACITY
        assert self.policy.statistics()["rows"] == self.index.count

    @invariant()
    def what_is_resident_is_prefix_closed(self) -> None:
        linked = set(self.index.linked_rows().tolist())
        for row in linked:
            parent = int(self.index.parent[row])
            assert parent in linked or parent in {ROOT, ORPHAN}
            assert parent != ORPHAN or self.index.state[row] == ORPHANED

    @invariant()
    def what_is_held_is_resident(self) -> None:
        linked = set(self.index.linked_rows().tolist())
        assert all(linked.issuperset(rows.tolist()) for _, rows in self.held)

    @invariant()
    def the_books_agree(self) -> None:
        self.index.check_integrity()
        self.policy.check_integrity()


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_keeps_the_residents_in_order(name: str) -> None:
    machine = type("NamedResidence", (Residence,), {"policy_name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("few_leaves", [0, 1024])
def test_phz_does_so_while_uses_wait_to_be_taken_in(
    monkeypatch: pytest.MonkeyPatch, few_leaves: int
) -> None:
    """As in a store of many thousand chunks; 0: and leaves are too many to look at all of them."""
    monkeypatch.setattr(phz, "_PENDING_SHARE", 0)
    monkeypatch.setattr(phz, "_FEW_LEAVES", few_leaves)
    machine = type("NamedResidence", (Residence,), {"policy_name": "phz"})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("name", policy_names())
def test_a_chain_goes_from_its_end_one_chunk_at_a_time(name: str) -> None:
    store: Residence = type("NamedResidence", (Residence,), {"policy_name": name})()
    chain = (0, 1, 2, 0, 1, 2)
    Residence.publish(store, chain=chain, at_once=False)
    for left in range(len(chain) - 1, -1, -1):
        store.policy.evict(1, store.gone)
        assert len(store.leading(chain)) == left
