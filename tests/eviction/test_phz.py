"""phz learns what LRU cannot know, and where there is nothing to learn it is LRU."""

from __future__ import annotations

import random
from functools import cache, cached_property

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpool.bench.hints import hints_of
from kvpool.bench.simulation import Simulation, prepare
from kvpool.bench.traces import Trace
from kvpool.bench.workloads import make_workload
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Facts, Hint, Learns
from kvpool.store.eviction.guard import EVERY_AGE, Guard
from kvpool.store.eviction.hazards import BUCKETS, LIMITS, WIDTHS
from kvpool.store.eviction.phz import PhzPolicy
from tests.eviction.test_policies import always, rows_of
from tests.eviction.tries import Requests, hits_of, trace_of

POINT = 0.01
RANDOM_SEEDS = range(20)


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
        """Nearly half of the gap: at first phz has to learn, and what it takes grows as it wins."""
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

    @pytest.mark.parametrize("seed", RANDOM_SEEDS)
    def test_nor_under_any_load(self, seed: int) -> None:
        """Loads of random kinds and parameters, mixed or one after the other."""
        trace = make_workload("random", seed=seed, scale=0.4)
        for share in (0.02, 0.1, 0.5):
            capacity = trace.capacity(share)
            lru, phz = (ratio(trace, capacity, name) for name in ("lru", "phz"))
            assert phz >= lru - 0.3 * POINT, f"at {share:%}"


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
        """Where room is short: with more of it, LRU has more to lose than a short past affords."""
        capacity = self.trace.capacity(0.05)
        told = ratio(self.trace, capacity, "phz", self.hints("stop"))
        assert told > ratio(self.trace, capacity, "phz") + 0.5 * POINT

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


def guard_after(
    references: int,
    lead: int = 0,
    *,
    lessons: int = 60,
    uses: NDArray[np.float64] | None = None,
    reach: int = 1000,
    lenient: bool = False,
) -> Guard:
    """A guard of a store whose LRU holds what was used within `reach` references. Requests have 10
    references each, and used something again at each age equally often, if not said otherwise."""
    guard = Guard(lenient=lenient)
    guard.account(references // 10, references, max(0, lead), max(0, -lead), lessons, reach)
    guard.weigh(1000 * WIDTHS if uses is None else uses, reach)
    guard.account(0, 0, 0, 0, 0, reach)
    return guard


class TestGuard:
    def test_all_is_protected_until_60_requests_used_something_again(self) -> None:
        guard = guard_after(100_000, lessons=59)
        assert (guard.protected, guard.trusts) == (EVERY_AGE, False)
        guard.account(0, 0, 0, 0, 1, 1000)
        assert guard.trusts

    def test_nothing_is_protected_where_lru_has_nothing_to_lose(self) -> None:
        assert guard_after(10_000, uses=np.zeros(BUCKETS)).protected == 0

    @given(
        references=st.integers(1000, 10**6),
        lead=st.integers(-1000, 10_000),
        uses=st.lists(st.integers(0, 10_000), min_size=BUCKETS, max_size=BUCKETS),
        reach=st.integers(1, 10**6),
    )
    def test_what_is_at_stake_can_be_afforded(
        self, references: int, lead: int, uses: list[int], reach: int
    ) -> None:
        """0.15 % of the references, and what was won or lost; who can afford less than half a
        request is LRU."""
        guard = guard_after(references, lead, uses=np.array(uses, np.float64), reach=reach)
        affordable = 0.0015 * references + lead
        if affordable < 5:
            assert guard.protected == EVERY_AGE
        elif affordable > 5.1:
            assert 0 <= guard.protected <= reach
            first, last = np.searchsorted(LIMITS, [guard.protected, reach], "right")
            beyond = sum(uses[first:last]) / references
            assert beyond * (reach - guard.protected) <= affordable + 1e-6

    def test_the_more_was_won_the_less_is_protected(self) -> None:
        leads = (-150, -140, 0, 100, 1000, 5000)
        protected = [guard_after(100_000, lead).protected for lead in leads]
        assert protected[0] == EVERY_AGE
        assert protected == sorted(set(protected), reverse=True)

    def test_protected_is_a_share_of_what_lru_holds_now(self) -> None:
        """Its oldest age changes faster than uses are learned from."""
        guard = guard_after(100_000)
        before = guard.protected
        guard.account(0, 0, 0, 0, 0, 3000)
        assert guard.protected == pytest.approx(3 * before, abs=3)

    def test_tables_from_another_life_are_trusted_at_once(self) -> None:
        assert Guard(learned=0).protected == 0

    def test_what_another_life_saw_counts(self) -> None:
        """10,000 references can afford 15 hits, which is more than half of a request of 10; and
        what is at stake is known before this life has seen it."""
        protected = []
        for learned in (100, 10_000, 20_000):
            guard = Guard(learned=learned)
            guard.weigh(learned / 100 * WIDTHS, 1000)
            guard.account(10, 100, 0, 0, 0, 1000)
            protected.append(guard.protected)
        assert protected[0] == EVERY_AGE
        assert 1000 > protected[1] > protected[2] > 0

    def test_who_trades_hits_for_something_else_protects_nothing_once_it_has_learned(self) -> None:
        assert guard_after(10_000, -500, lessons=59, lenient=True).protected == EVERY_AGE
        assert guard_after(10_000, -500, lenient=True).protected == 0


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

    def test_what_the_first_half_taught_helps_in_the_second(self) -> None:
        trace = workload("chats")
        prepared, half = prepare(trace), len(trace.requests) // 2
        capacity = trace.capacity(0.05)
        taught, fresh, restarted = (Simulation(prepared, capacity, "phz") for _ in range(3))
        for number in range(half):
            taught.serve(number)
        assert isinstance(taught.policy, Learns) and isinstance(restarted.policy, Learns)
        restarted.policy.load(taught.policy.dump())
        for simulation in (fresh, restarted):
            for number in range(half, len(trace.requests)):
                simulation.serve(number)
        gained = (restarted.counts.hits - fresh.counts.hits) / fresh.counts.references
        assert gained > POINT

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
