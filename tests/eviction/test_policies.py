"""Every registered policy keeps the contract; LRU is exactly the brute-force leaf-only LRU."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvpool.proto.errors import ConfigError
from kvpool.store.eviction import make_policy, policy_names
from kvpool.store.eviction.base import Evictable, Policy, Rows, evict_in_turn
from kvpool.store.eviction.lru import LruPolicy

HERE = Path(__file__).parent
SAMPLE = HERE / "sample_trace.jsonl"
CONVERSATIONS = HERE.parents[2] / "shared/traces/conversation_trace.jsonl"
BLOCK_TOKENS = 512


def rows_of(rows: Iterable[int]) -> Rows:
    return np.array(list(rows), np.intp)


def always(rows: Rows) -> NDArray[np.bool_]:
    return np.ones(len(rows), np.bool_)


def small_blocks(capacity: int, evictable: Evictable) -> LruPolicy:
    """Blocks of four: whatever happens at their borders happens all the time."""
    return LruPolicy(capacity, evictable, block_rows=4)


class Forest:
    """What a store knows about rows: parents, leases, pins. Plain sets, slow and obvious."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}
        self.holds: list[list[int]] = []  # leases and pins: the rows of each

    def evictable(self, rows: Rows) -> NDArray[np.bool_]:
        return np.array([self.may_go(row) for row in rows.tolist()], np.bool_)

    def may_go(self, row: int) -> bool:
        assert row in self.parent, f"a policy asked about row {row}, which is not resident"
        return row not in self.parent.values() and not any(row in hold for hold in self.holds)

    def chain(self, row: int) -> list[int]:
        """From the root (or orphan) down to this row."""
        above = self.parent[row]
        return [*(self.chain(above) if above is not None else []), row]

    def below(self, row: int) -> list[int]:
        """The row and all its descendants, parents first."""
        children = [child for child, above in self.parent.items() if above == row]
        return [row, *(deeper for child in children for deeper in self.below(child))]


class LeafOnlyLru:
    """The reference: a number per row, sorted anew for each question."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.now = 0
        self.then = 0

    def touch(self, rows: Sequence[int]) -> None:
        for row in reversed(rows):
            self.now += 1
            self.used[row] = self.now

    def demote(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.then -= 1
            self.used[row] = self.then

    def victims(self, forest: Forest) -> list[int]:
        return sorted(filter(forest.may_go, self.used), key=self.used.__getitem__)


# Conformance


@pytest.mark.parametrize("name", policy_names())
class TestEveryPolicy:
    def test_it_offers_nothing_while_it_knows_nothing(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        assert policy.victims(3).tolist() == []
        assert policy.statistics()["rows"] == 0

    def test_victims_are_distinct_row_numbers_and_no_more_than_asked_for(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        policy.admit(rows_of(range(8)))
        for n in (0, 1, 5, 8, 100):
            victims = policy.victims(n)
            assert victims.dtype == np.intp
            assert len(set(victims.tolist())) == len(victims) == min(n, 8)

    def test_asking_again_gives_the_same_victims_first(self, name: str) -> None:
        policy = make_policy(name, 64, always)
        policy.admit(rows_of(range(64)))
        few, many = policy.victims(5).tolist(), policy.victims(40).tolist()
        assert many[:5] == few == policy.victims(5).tolist()

    def test_victims_are_the_callers_array(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        policy.admit(rows_of(range(8)))
        one, few = policy.victims(1), policy.victims(3)
        expected = one.tolist(), few.tolist()
        policy.forget(one.copy())
        policy.demote(policy.victims(1))
        policy.touch(policy.victims(7))
        policy.victims(7)
        assert (one.tolist(), few.tolist()) == expected

    def test_victims_stay_known_until_forgotten(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        policy.admit(rows_of(range(8)))
        victims = policy.victims(3)
        assert policy.statistics()["rows"] == 8
        policy.touch(victims)
        policy.forget(victims)
        assert policy.statistics()["rows"] == 5
        assert not np.isin(policy.victims(8), victims).any()

    def test_a_forgotten_row_may_be_admitted_again(self, name: str) -> None:
        policy = make_policy(name, 4, always)
        for _ in range(10):
            policy.admit(rows_of([2, 3]))
            policy.forget(rows_of([2, 3]))
        policy.admit(rows_of([3]))
        assert policy.victims(4).tolist() == [3]
        policy.check_integrity()

    def test_blocked_rows_are_never_victims_and_are_again_once_unblocked(self, name: str) -> None:
        blocked = np.ones(8, np.bool_)
        policy = make_policy(name, 8, lambda rows: ~blocked[rows])
        policy.admit(rows_of(range(8)))
        assert policy.victims(8).tolist() == []
        blocked[[1, 6]] = False
        policy.unblock(rows_of([1, 6]))
        assert sorted(policy.victims(8).tolist()) == [1, 6]
        blocked[1] = True
        assert policy.victims(8).tolist() == [6]
        blocked[1] = False
        policy.unblock(rows_of([1]))
        assert sorted(policy.victims(8).tolist()) == [1, 6]

    def test_of_two_rows_of_a_chain_the_deeper_goes_first(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        policy.admit(rows_of([4, 2, 6]))
        policy.touch(rows_of([]))
        assert policy.victims(3).tolist() == [6, 2, 4]

    def test_demoted_rows_go_before_all_others_until_they_are_touched(self, name: str) -> None:
        policy = make_policy(name, 16, always)
        policy.admit(rows_of(range(16)))
        policy.demote(rows_of([3, 9]))
        assert policy.victims(2).tolist() == [9, 3]
        policy.touch(rows_of([3]))
        assert policy.victims(1).tolist() == [9]
        assert 3 not in policy.victims(2).tolist()

    @pytest.mark.parametrize("at_once", [1, 7])
    def test_what_could_go_had_children_and_was_used_goes_after_them(
        self, name: str, at_once: int
    ) -> None:
        """All of a store that is large enough for samples, with uses between the evictions."""
        above = range(1500)
        parent = {row + len(above): row for row in above}
        children = np.zeros(2 * len(above), np.intp)
        policy = make_policy(name, len(children), lambda rows: children[rows] == 0)
        policy.admit(rows_of(above))
        for _ in range(3):  # it looks at some of them in each call
            policy.victims(5)
        for child, row in parent.items():
            children[row] = 1
            policy.admit(rows_of([child]))
            policy.touch(rows_of([row]))
        dice, gone = random.Random(1), dict[int, None]()

        def go(row: int) -> int:
            assert not children[row], "a parent before its child"
            assert row not in gone
            gone[row] = None
            if (up := parent.get(row, -1)) >= 0:
                children[up] = 0
            return up

        while len(gone) < len(children):
            missing = len(children) - len(gone)
            assert policy.evict(at_once, go) == min(at_once, missing)
            if dice.random() < 0.3 and (left := set(range(len(children))) - gone.keys()):
                policy.touch(rows_of(dice.sample(sorted(left), min(3, len(left)))))
        assert policy.evict(at_once, go) == 0
        policy.check_integrity()

    def test_wrong_rows_raise(self, name: str) -> None:
        policy = make_policy(name, 8, always)
        policy.admit(rows_of([1]))
        with pytest.raises(ValueError, match="known already"):
            policy.admit(rows_of([2, 1]))
        with pytest.raises(ValueError, match="never admitted"):
            policy.forget(rows_of([1, 5]))
        with pytest.raises(ValueError, match="never admitted"):
            policy.demote(rows_of([5]))
        policy.touch(rows_of([5]))
        with pytest.raises(ValueError, match="never admitted"):
            policy.victims(1)
        policy.check_integrity()

    def test_it_keeps_its_contract_over_a_forest_with_leases_and_pins(self, name: str) -> None:
        machine = type("NamedEvictions", (Evictions,), {"policy_name": name})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
        )


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no eviction policy 'lur'; choose lru"):
        make_policy("lur", 8, always)


class Evictions(RuleBasedStateMachine):
    """A store of at most 24 rows: chains grow, are used, held, evicted and cut in the middle."""

    capacity = 24
    policy_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.forest = Forest()
        self.policy = self.make()
        self.calls = LeafOnlyLru()

    def make(self) -> Policy:
        return make_policy(self.policy_name, self.capacity, self.forest.evictable)

    @precondition(lambda self: len(self.forest.parent) < self.capacity)
    @rule(data=st.data(), length=st.integers(1, 6), use=st.booleans())
    def publish(self, data: st.DataObject, length: int, use: bool) -> None:
        """Below any row or none; with `use`, the rows above count as used by the publish."""
        parent = data.draw(st.sampled_from([None, *sorted(self.forest.parent)]))
        above = [] if parent is None else self.forest.chain(parent)
        free = [row for row in range(self.capacity) if row not in self.forest.parent]
        added = data.draw(st.permutations(free))[:length]
        for row in added:
            self.forest.parent[row] = parent
            parent = row
        self.policy.admit(rows_of(added))
        self.calls.touch(added)
        if use:
            self.policy.touch(rows_of(above))
            self.calls.touch(above)

    @precondition(lambda self: self.forest.parent)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        chain = self.forest.chain(data.draw(st.sampled_from(sorted(self.forest.parent))))
        self.policy.touch(rows_of(chain))
        self.calls.touch(chain)

    @precondition(lambda self: self.forest.parent)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.forest.parent)))
        self.forest.holds.append(self.forest.chain(row))

    @precondition(lambda self: self.forest.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.forest.holds) - 1))
        self.policy.unblock(rows_of(self.forest.holds.pop(index)))

    @rule(n=st.integers(1, 30), evicted=st.integers(0, 30))
    def evict(self, n: int, evicted: int) -> None:
        victims = self.policy.victims(n).tolist()
        self.check(victims, n)
        assert self.policy.victims(30).tolist()[: len(victims)] == victims
        gone = victims[:evicted]
        self.policy.forget(rows_of(gone))
        parents = {self.forest.parent[row] for row in gone} - {None}
        for row in gone:
            del self.forest.parent[row], self.calls.used[row]
        self.policy.unblock(rows_of(row for row in parents if row is not None))

    @rule(n=st.integers(1, 30), in_turn=st.booleans())
    def evict_in_order(self, n: int, in_turn: bool) -> None:
        """Parents that become free take their turn among the others."""
        gone = []

        def go(row: int) -> int:
            self.check([row], 1)
            parent = self.forest.parent.pop(row)
            del self.calls.used[row]
            gone.append(row)
            return parent if parent is not None and self.forest.may_go(parent) else -1

        policy = self.policy
        evicted = evict_in_turn(policy, n, go) if in_turn else policy.evict(n, go)
        assert evicted == len(gone) <= n
        assert evicted == n or not self.calls.victims(self.forest)

    @precondition(lambda self: self.forest.parent)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Wherever it is, held or not: what is below is orphaned."""
        row = data.draw(st.sampled_from(sorted(self.forest.parent)))
        above = self.forest.parent[row]
        orphans = self.forest.below(row)[1:]
        for child in orphans:
            if self.forest.parent[child] == row:
                self.forest.parent[child] = None
        del self.forest.parent[row], self.calls.used[row]
        self.forest.holds = [[r for r in hold if r != row] for hold in self.forest.holds]
        self.policy.forget(rows_of([row]))
        self.policy.demote(rows_of(orphans))
        self.calls.demote(orphans)
        self.policy.unblock(rows_of([] if above is None else [above]))

    @precondition(lambda self: not self.forest.holds)
    @rule()
    def clear(self) -> None:
        self.policy.forget(rows_of(self.forest.parent))
        self.forest.parent.clear()
        self.calls.used.clear()

    @rule()
    def catch_up(self) -> None:
        self.policy.catch_up()

    @rule()
    def check_the_books(self) -> None:
        """No invariant, because what was put off is done by it."""
        self.policy.check_integrity()

    @invariant()
    def no_row_is_forgotten(self) -> None:
        assert self.policy.statistics()["rows"] == len(self.forest.parent)

    def teardown(self) -> None:
        self.policy.check_integrity()

    def check(self, victims: list[int], n: int) -> None:
        assert len(set(victims)) == len(victims)
        allowed = self.calls.victims(self.forest)
        assert set(victims) <= set(allowed)
        assert len(victims) == min(n, len(allowed))


class LruEvictions(Evictions):
    def make(self) -> Policy:
        return small_blocks(self.capacity, self.forest.evictable)

    def check(self, victims: list[int], n: int) -> None:
        assert victims == self.calls.victims(self.forest)[:n]


# LRU


def test_lru_is_exactly_the_brute_force_leaf_only_lru() -> None:
    run_state_machine_as_test(
        LruEvictions, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )


def test_lru_goes_up_a_chain_that_was_blocked_when_it_last_looked() -> None:
    """A daemon with an SSD evicted the wrong chunks: those above a chunk that had been written
    while the next victims were asked for were off the log, and newer ones went before them."""
    parents = {1: 0, 2: 1, 3: 2, 5: 4, 6: 5, 7: 6}
    held, stored = {3}, set(range(8))

    def may_go(row: int) -> bool:
        return row not in held and not any(parents.get(below) == row for below in stored)

    def gone(row: int) -> int:
        stored.remove(row)
        parent = parents.get(row, -1)
        return parent if parent >= 0 and may_go(parent) else -1

    policy = LruPolicy(8, lambda rows: np.array([may_go(row) for row in rows.tolist()], np.bool_))
    for chain in (range(4), range(4, 8)):
        policy.admit(np.array(chain, np.intp))
    assert policy.victims(1).tolist() == [7]
    held.clear()
    policy.unblock(np.array([3], np.intp))
    assert policy.evict(3, gone) == 3 and stored == {0, 4, 5, 6, 7}
    assert policy.evict(2, gone) == 2 and stored == {4, 5, 6}
    assert policy.evict(8, gone) == 3 and not stored
    policy.check_integrity()


@given(st.data(), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_on_whole_requests_leaf_only_lru_is_plain_lru_touched_tail_first(
    data: st.DataObject, capacity: int, seed: int
) -> None:
    store, plain = Replay(capacity, small_blocks), TailFirstLru(capacity)
    for request in random_requests(random.Random(seed), data.draw(st.integers(1, 60))):
        assert store.serve(request) == plain.serve(request)
        assert store.row.keys() == plain.blocks.keys()
        store.policy.check_integrity()


def test_the_log_stays_below_two_entries_per_row_whatever_the_rows_do() -> None:
    random_ = np.random.default_rng(1)
    capacity, block = 4096, 64
    policy = LruPolicy(capacity, always, block_rows=block)
    policy.admit(rows_of(range(capacity)))
    patterns: list[Callable[[], NDArray[np.int64]]] = [
        lambda: random_.integers(0, capacity, 50),  # all alike
        lambda: random_.integers(0, 40, 50),  # a few hot rows, the others lie at the old end
        lambda: np.arange(50) + random_.integers(0, capacity - 50),
        lambda: (random_.zipf(1.2, 50) - 1) % capacity,
    ]
    for pattern in patterns:
        for _ in range(2000):
            policy.touch(np.unique(pattern()).astype(np.intp))
            assert policy.statistics()["log_entries"] <= 2 * capacity + 3 * block
    policy.check_integrity()
    policy.forget(rows_of(range(capacity - 100)))
    for _ in range(500):
        policy.touch(random_.choice(np.arange(capacity - 100, capacity, dtype=np.intp), 20, False))
    assert policy.statistics()["log_entries"] <= 2 * 100 + 3 * block
    policy.check_integrity()


# Traces


class Replay:
    """A store of `capacity` chunks under whole requests, as the study of the traces defines it."""

    def __init__(self, capacity: int, make: Callable[[int, Evictable], Policy]) -> None:
        self.row: dict[int, int] = {}
        self.block = np.zeros(capacity, np.int64)
        self.parent = [-1] * capacity
        self.children = np.zeros(capacity, np.int32)
        self.leased = np.zeros(capacity, np.bool_)
        self.free = list(range(capacity))
        self.policy = make(capacity, self.evictable)

    def evictable(self, rows: Rows) -> NDArray[np.bool_]:
        idle: NDArray[np.bool_] = self.children[rows] == 0
        return idle & ~self.leased[rows]

    def serve(self, request: list[int]) -> int:
        """Number of leading blocks that were resident; afterwards all are, as far as they fit."""
        hits = next((i for i, b in enumerate(request) if b not in self.row), len(request))
        known = rows_of(self.row[block] for block in request[:hits])
        self.leased[known] = True
        added: list[int] = []
        parent = int(known[-1]) if hits else -1
        for block in request[hits:]:
            if not self.free and not self.evict_one():
                break
            row = self.free.pop()
            self.row[block], self.block[row], self.parent[row] = row, block, parent
            self.children[parent] += parent >= 0
            added.append(row)
            parent = row
        self.policy.admit(rows_of(added))
        self.policy.touch(known)
        self.leased[known] = False
        self.policy.unblock(known)
        return hits

    def evict_one(self) -> bool:
        victims = self.policy.victims(1)
        for row in victims.tolist():
            self.policy.forget(victims)
            del self.row[int(self.block[row])]
            self.free.append(row)
            if (parent := self.parent[row]) >= 0:
                self.children[parent] -= 1
                self.policy.unblock(np.array([parent], np.intp))
        return len(victims) > 0


class TailFirstLru:
    """Plain LRU that knows no tree: each request touches its blocks from the last to the first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: list[int]) -> int:
        hits = next((i for i, b in enumerate(request) if b not in self.blocks), len(request))
        for block in reversed(request):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hits


def random_requests(random_: random.Random, count: int) -> list[list[int]]:
    """Conversations that go on or branch off, blocks numbered by first use."""
    chains: list[list[int]] = [[]]
    blocks = 0
    for _ in range(count):
        base = random_.choice(chains)
        kept = base[: random_.randint(0, len(base))] if random_.random() < 0.3 else base
        grown = random_.randint(0 if kept else 1, 6)
        chains.append([*kept, *range(blocks, blocks + grown)])
        blocks += grown
    return [chain for chain in chains if chain]


def read_trace(path: Path) -> list[list[int]]:
    """The full blocks of each request; partial tails are left out."""
    requests = map(json.loads, path.read_text().splitlines())
    return [r["hash_ids"][: r["input_length"] // BLOCK_TOKENS] for r in requests]


def capacity_of(requests: list[list[int]], share: float) -> int:
    return round(share * len({block for request in requests for block in request}))


def brute_force_hits(requests: list[list[int]], capacity: int) -> int:
    """Leaf-only LRU of the definition: sort all leaves for every single eviction."""
    used: dict[int, int] = {}
    parent: dict[int, int] = {}
    now = hits = 0
    for request in requests:
        hits += next((i for i, b in enumerate(request) if b not in used), len(request))
        parent |= zip(request[1:], request, strict=False)
        for block in reversed(request):
            now += 1
            used[block] = now
        while len(used) > capacity:
            inner = {parent.get(block) for block in used}
            del used[min((b for b in used if b not in inner), key=used.__getitem__)]
    return hits


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 1.0])
def test_lru_has_the_hits_of_the_definition_on_the_sample_trace(share: float) -> None:
    requests = read_trace(SAMPLE)
    capacity = capacity_of(requests, share)
    store = Replay(capacity, LruPolicy)
    assert sum(map(store.serve, requests)) == brute_force_hits(requests, capacity) > 0
    store.policy.check_integrity()


@pytest.mark.parametrize("trace", [one for one in (SAMPLE, CONVERSATIONS) if one.exists()])
def test_lru_has_the_hits_of_plain_lru_on_the_start_of_a_trace(trace: Path) -> None:
    """The public conversation trace has 22,160 hits at 2 %, as published; all of it takes a quarter
    of a minute. It is replayed where it is at hand, our own sample everywhere."""
    requests = read_trace(trace)
    capacity = capacity_of(requests, 0.1)
    store, plain = Replay(capacity, LruPolicy), TailFirstLru(capacity)
    start = requests[:1500]
    assert sum(map(store.serve, start)) == sum(map(plain.serve, start)) > 0
