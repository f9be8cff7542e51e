"""phz learns what LRU cannot know, and where there is nothing to learn it is LRU."""

from __future__ import annotations

import random
from functools import cache, cached_property

import numpy as np
import pytest

from kvpool.bench.hints import hints_of
from kvpool.bench.traces import Trace
from kvpool.bench.workloads import make_workload
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Hint, Learns
from kvpool.store.eviction.guard import Guard
from kvpool.store.eviction.phz import PhzPolicy
from tests.eviction.test_policies import always, rows_of
from tests.eviction.tries import Requests, hits_of, trace_of

POINT = 0.01


@cache
def workload(kind: str) -> Trace:
    return make_workload(kind, scale=0.25)


def ratio(
    trace: Trace, capacity: int, policy: str, hints: list[Hint | None] | None = None
) -> float:
    return hits_of(trace, capacity, policy, hints) / trace.references


def chains(*lengths: int) -> Requests:
    """One chain of blocks per length, that share nothing."""
    starts = np.cumsum([0, *lengths]).tolist()
    return [list(range(start, start + n)) for start, n in zip(starts, lengths, strict=False)]


class TestPatterns:
    def test_a_scan_over_more_than_fits_keeps_a_part_that_hits(self) -> None:
        """Documents read in a circle, 1.2 times the capacity: LRU never hits (EV-7)."""
        documents = chains(*[8] * 60)
        trace = trace_of(documents * 150)
        assert hits_of(trace, 400, "lru") == 0
        assert ratio(trace, 400, "phz") >= 0.5

    def test_what_comes_once_does_not_displace_what_comes_again(self) -> None:
        """Most of the gap, of which the first 4096 uses are spent on learning."""
        dice = random.Random(1)
        popular, fresh = chains(*[6] * 40), iter(range(10_000, 10**9))
        mixed = [
            dice.choice(popular) if dice.random() < 0.4 else [next(fresh) for _ in range(12)]
            for _ in range(4000)
        ]
        trace = trace_of(mixed)
        best = hits_of(trace, 260, "belady") / trace.references
        lru, phz = ratio(trace, 260, "lru"), ratio(trace, 260, "phz")
        assert phz > lru + 0.45 * (best - lru)

    @pytest.mark.parametrize("kind", ["agents", "chats", "documents", "cycles", "recent", "phases"])
    def test_it_is_never_more_than_0_3_points_below_lru(self, kind: str) -> None:
        trace = workload(kind)
        capacity = trace.capacity(0.05)
        assert ratio(trace, capacity, "phz") >= ratio(trace, capacity, "lru") - 0.3 * POINT

    @pytest.mark.parametrize("share", [0.2, 0.5])
    @pytest.mark.parametrize("kind", ["agents", "chats", "recent"])
    def test_nor_in_a_short_past(self, kind: str, share: float) -> None:
        """Of 5,000 to 11,000 references, of which 0.3 points are a request or two."""
        for seed in (1, 2, 3):
            trace = make_workload(kind, seed=seed, scale=0.15)
            capacity = trace.capacity(share)
            lru, phz = (ratio(trace, capacity, name) for name in ("lru", "phz"))
            assert phz >= lru - 0.3 * POINT


class TestHints:
    """Where sessions that go on fit. Where they do not, knowing which ones go on is half of it:
    the optimum also knows when."""

    trace = workload("chats")
    capacity = trace.capacity(0.2)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        lru, best = (ratio(self.trace, self.capacity, name) for name in ("lru", "belady"))
        return lru, best

    def told(self, hints: list[Hint | None]) -> float:
        return ratio(self.trace, self.capacity, "phz", hints)

    def hints(self, kind: str) -> list[Hint | None]:
        return hints_of(self.trace, self.trace.next_uses(), kind)

    def test_knowing_which_session_goes_on_closes_most_of_the_gap(self) -> None:
        lru, best = self.bounds
        assert self.told(self.hints("oracle")) > lru + 0.6 * (best - lru)

    def test_an_engines_stop_reasons_help(self) -> None:
        assert self.told(self.hints("stop")) > self.told([None] * len(self.trace.requests))

    def test_hints_that_mean_nothing_do_no_harm(self) -> None:
        """What a hint is worth is learned, not believed."""
        coin = random.Random(1)
        coins = [Hint(will_continue=coin.choice([0.0, 1.0])) for _ in self.trace.requests]
        assert self.told(list(coins)) >= self.bounds[0] - 0.3 * POINT

    def test_hints_that_say_the_opposite_are_as_good_as_true_ones(self) -> None:
        lies = [
            Hint(will_continue=hint.will_continue == 0) for hint in self.hints("oracle") if hint
        ]
        lru, best = self.bounds
        assert self.told(list(lies)) > lru + 0.6 * (best - lru)


class TestGuard:
    @pytest.mark.parametrize(
        ("capacity", "references", "uses"), [(10_000, 50_000, 0), (1000, 8192, 0), (1000, 0, 4096)]
    )
    def test_nothing_is_trusted_before_five_turnovers_8192_references_and_4096_uses(
        self, capacity: int, references: int, uses: int
    ) -> None:
        guard = Guard(capacity)
        if uses:
            guard.account(10_000, 100_000, 0, 0, uses - 1)
        else:
            guard.account(5000, references - 1, 0, 0, 10_000)
        assert not guard.trusts
        assert guard.account(1, 1, 0, 0, 1)
        assert guard.trusts

    def test_nothing_is_trusted_before_it_may_lose_what_nearly_two_requests_bring(self) -> None:
        """Of 100 references each. It may lose 8, 1 % of the capacity and 0.15 % of what was asked
        for: 10 hits and, after 110,000 references, 165 more."""
        guard = Guard(200)
        guard.account(1090, 109_000, 0, 0, 4096)
        assert not guard.trusts
        guard.account(10, 1_000, 0, 0, 0)
        assert guard.trusts

    def test_tables_from_another_life_are_trusted_at_once(self) -> None:
        assert Guard(1000, learned=True).trusts

    def test_falling_behind_ends_trust_for_a_while_and_again_for_longer(self) -> None:
        guard = Guard(10_000, learned=True)
        guard.account(1000, 10_000, 0, 0, 0)
        pauses: list[int] = []
        for _ in range(3):
            while guard.trusts:
                guard.account(10, 100, 0, 10, 0)
            start = guard.references
            while not guard.trusts:
                guard.account(10, 100, 10, 0, 0)
            pauses.append(guard.references - start)
        assert pauses == [5000, 10_000, 20_000]
        assert guard.failures == 3

    def test_who_trades_hits_for_something_else_is_trusted_for_ever_once_it_has_learned(
        self,
    ) -> None:
        guard = Guard(1000, lenient=True)
        assert not guard.account(10, 9000, 0, 500, 4095)
        assert guard.account(10, 1000, 0, 500, 1)
        assert not guard.account(1000, 100_000, 0, 50_000, 0)
        assert guard.trusts

    def test_what_chance_explains_is_no_failure(self) -> None:
        """Steps of 40 up and down: a loss of 80 is within their noise, in steps of 1 it is not."""
        lumps, steady = Guard(1000, learned=True), Guard(1000, learned=True)
        for guard in (lumps, steady):
            guard.account(1000, 100_000, 0, 0, 0)
        for own, lru in [(0, 40), (40, 0)] * 5 + [(0, 40), (0, 40)]:
            lumps.account(1, 100, own, lru, 0)
        for _ in range(80):
            steady.account(1, 15, 0, 1, 0)
        assert (lumps.lead, lumps.trusts) == (-80, True)
        assert (steady.lead, steady.trusts) == (-80, False)

    def test_a_deficit_in_all_is_waited_off(self) -> None:
        guard = Guard(1000, learned=True)
        guard.account(1000, 10_000, 0, 100, 0)
        guard.account(2000, 20_000, 0, 0, 0)
        assert not guard.trusts
        guard.account(3000, 30_000, 0, 0, 0)
        assert guard.trusts


class TestRestart:
    def test_what_was_learned_is_used_from_the_first_eviction_on(self) -> None:
        """Two kinds of requests, long ones that never return and short ones that do."""
        taught = make_policy("phz", 512, always, Facts(tags=lambda rows: rows.astype(np.uint64)))
        assert isinstance(taught, Learns)
        for _ in range(200):
            taught.admit(rows_of(range(400, 440)))
            taught.admit(rows_of(range(8)))
            taught.touch(rows_of(range(8)))
            taught.evict(48, lambda row: -1)
        dumped = taught.dump()

        fresh = make_policy("phz", 512, always)
        restarted = make_policy("phz", 512, always)
        assert isinstance(restarted, Learns)
        restarted.load(dumped)
        for policy in (fresh, restarted):
            policy.admit(rows_of(range(8)))
            policy.touch(rows_of(range(8)))
            policy.admit(rows_of(range(400, 440)))
        assert set(fresh.victims(8).tolist()) == set(range(8)), "the oldest"
        assert set(restarted.victims(8).tolist()) <= set(range(400, 440)), "the hopeless"

    def test_other_bytes_are_refused_and_change_nothing(self) -> None:
        policy = make_policy("phz", 8, always)
        assert isinstance(policy, Learns)
        before = policy.dump()
        with pytest.raises(ValueError, match="no hazard tables"):
            policy.load(b"{}")
        assert policy.dump() == before


def test_weighted_by_cost_the_dearest_stay() -> None:
    """The oldest is 10,000 chunks deep: computing it again costs 169 times as much."""
    facts = Facts(depths=lambda rows: np.where(rows == 0, 10_000, 0))
    first: dict[str, list[int]] = {}
    for name in ("phz", "phz-cost"):
        policy = make_policy(name, 8, always, facts)
        assert isinstance(policy, Learns)
        policy.load(policy.dump())
        for row in range(8):
            policy.admit(rows_of([row]))
        first[name] = policy.victims(1).tolist()
    assert first == {"phz": [0], "phz-cost": [1]}


def test_a_large_store_finds_a_victim_in_a_sample_of_its_leaves() -> None:
    """Without looking at all of them: here 1 of 64 is hopeless, and those go first."""
    policy = make_policy("phz", 1 << 16, always)
    policy.admit(rows_of(range(1 << 16)))
    for first in range(0, 1 << 16, 64):
        policy.touch(rows_of(range(first + 1, first + 64)))
    gone: list[int] = []

    def record(row: int) -> int:
        gone.append(row)
        return -1

    policy.evict(64, record)
    assert np.mean([row % 64 == 0 for row in gone]) > 0.3, "in a blind choice it would be 1 of 64"
    policy.check_integrity()


def test_what_was_just_used_is_no_victim_though_nothing_was_learned_from_it_yet() -> None:
    """In a large store, a few uses wait until victims are chosen anew."""
    policy = make_policy("phz", 1 << 13, always)
    policy.admit(rows_of(range(1 << 13)))
    next_ones = policy.victims(6)
    policy.touch(next_ones)
    gone: list[int] = []

    def record(row: int) -> int:
        gone.append(row)
        return -1

    assert policy.evict(100, record) == len(set(gone)) == 100
    assert not set(gone) & set(next_ones.tolist())
    policy.check_integrity()


def test_memory_is_bounded_when_chunks_come_and_go_without_evictions() -> None:
    policy = PhzPolicy(256, always, Facts(tags=lambda rows: rows.astype(np.uint64) + 1))
    for _ in range(2000):
        policy.admit(rows_of(range(64)))
        policy.forget(rows_of(range(64)))
    policy.check_integrity()
    assert policy.statistics()["ghosts"] <= 8 * 256 + 128
    assert sum(len(rows) for rows in policy._fresh) <= 256 + 4096 + 64


def test_a_use_of_many_rows_is_taken_in_when_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = PhzPolicy(5000, always)
    policy.admit(rows_of(range(5000)))
    policy.catch_up()
    taken_in: list[int] = []
    flush = PhzPolicy._flush

    def counted(self: PhzPolicy) -> None:
        taken_in.append(self._pending_rows)
        flush(self)

    monkeypatch.setattr(PhzPolicy, "_flush", counted)
    policy.touch(rows_of(range(4000)))
    assert taken_in == []
    policy.catch_up()
    assert taken_in == [4000]
