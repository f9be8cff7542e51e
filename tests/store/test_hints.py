"""What engines say of the future: what it means, whom it reaches, and that lies cost little."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto.errors import InvalidError
from kvpool.store.hints import ABORT, SOON_S, STOP_REASONS, TOOL, TURN, Told, meaning
from kvpool.store.store import KnownNamespace, StoreSession
from tests.store.world import World, chain, part

CHUNK = 4096
WHOLE = part("all", CHUNK)


@pytest.mark.parametrize(
    ("told", "chance"),
    [
        (Told(), None),
        (Told(stop_reason="a word of tomorrow"), None),
        (Told(ttl_s=5), None),
        (Told(will_continue=0.4), 0.4),
        (Told(will_continue=True), 1.0),
        (Told(stop_reason="tool_calls"), TOOL),
        (Told(stop_reason="STOP"), TURN),
        (Told(stop_reason="abort"), ABORT),
        (Told(will_continue=0.1, stop_reason="tool_calls"), 0.1),
        (Told(gap_s=17), TOOL),
        (Told(gap_s=184), TURN),
        (Told(gap_s=184, will_continue=0.3), 0.3),
        (Told(gap_s=184, stop_reason="tool_use"), TURN),
        (Told(ended=True, will_continue=1.0, priority=9), 0.0),
        (Told(priority=1), TOOL),
        (Told(priority=1, will_continue=1.0), 1.0),
        (Told(priority=-1), ABORT),
        (Told(priority=-1, will_continue=0.0), 0.0),
        (Told(priority=-1, stop_reason="tool_calls"), ABORT),
    ],
)
def test_each_word_means_what_the_table_says(told: Told, chance: float | None) -> None:
    assert meaning(told).will_continue == chance


@given(
    will_continue=st.none() | st.floats(0, 1),
    gap_s=st.none() | st.floats(0, math.inf),
    ended=st.booleans(),
    stop_reason=st.sampled_from(["", "?", *STOP_REASONS]),
    priority=st.integers(-3, 3),
)
def test_whatever_is_said_becomes_a_probability_or_nothing(
    will_continue: float | None, gap_s: float | None, ended: bool, stop_reason: str, priority: int
) -> None:
    told = Told(will_continue, gap_s, 0.0, ended, stop_reason, priority)
    chance = meaning(told).will_continue
    assert chance is None or 0 <= chance <= 1
    if gap_s is not None and gap_s > SOON_S and priority <= 0:
        assert chance is not None and chance <= TURN
    higher = meaning(Told(will_continue, gap_s, 0.0, ended, stop_reason, priority + 1))
    assert (chance or 0) <= (higher.will_continue or 0) or priority == -1


@pytest.mark.parametrize(
    "wrong",
    [{"will_continue": math.nan}, {"will_continue": 1.5}, {"gap_s": -1.0}, {"ttl_s": math.inf}],
)
def test_what_is_no_probability_or_time_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidError):
        Told(**wrong)  # type: ignore[arg-type]


def full(policy: str = "phz") -> tuple[World, KnownNamespace, StoreSession]:
    """Sixteen chains of one chunk, "0" the oldest, in a pool of sixteen chunks."""
    world = World(options={"policy": policy})
    known, session = world.open(WHOLE), world.session()
    for number in range(16):
        world.clock.now += 1
        world.publish(session, known, chain(str(number), 1))
    return world, known, session


def gone(world: World, known: KnownNamespace, session: StoreSession) -> list[int]:
    return [n for n in range(16) if not world.hits(session, known, chain(str(n), 1))]


def test_after_its_ttl_a_chain_goes_first_without_any_traffic() -> None:
    world, known, session = full()
    world.store.hint(session, known.id, chain("7", 1)[0], Told(ttl_s=10))
    world.clock.now += 9
    world.store.reap()
    assert world.store.counters.hint_ends == {}
    world.clock.now += 1
    world.store.reap()
    world.store.check_integrity()
    assert world.store.counters.hint_ends == {"ttl_demoted": 1}
    world.publish(session, known, chain("new", 1))
    assert gone(world, known, session) == [7]


def test_before_its_ttl_a_chain_is_as_safe_as_any_other() -> None:
    world, known, session = full()
    world.store.hint(session, known.id, chain("7", 1)[0], Told(ttl_s=10))
    world.publish(session, known, chain("new", 1))
    assert gone(world, known, session) == [0]


def test_a_use_after_the_hint_outlives_its_ttl() -> None:
    world, known, session = full()
    world.store.hint(session, known.id, chain("7", 1)[0], Told(ttl_s=10))
    world.clock.now += 5
    world.pull(session, known, chain("7", 1))
    world.clock.now += 5
    world.store.reap()
    assert world.store.counters.hint_ends == {"ttl_outlived": 1}
    world.publish(session, known, chain("new", 1))
    assert gone(world, known, session) == [0]


def test_a_chain_goes_from_its_end_after_its_ttl_and_what_others_used_since_stays() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 6))
    world.publish(session, known, chain("y", 10))
    world.store.hint(session, known.id, b"".join(chain("x", 6)), Told(ttl_s=1))
    world.clock.now += 1
    world.pull(session, known, chain("x", 2))
    world.store.reap()
    for number in range(4):
        world.publish(session, known, chain(f"new{number}", 1))
        assert world.hits(session, known, chain("x", 6)) == 5 - number
    world.publish(session, known, chain("last", 1))
    assert world.hits(session, known, chain("x", 6)) == 2
    world.store.check_integrity()


def test_the_last_hint_about_a_chain_sets_its_ttl() -> None:
    world, known, session = full()
    for seconds in (10, 100):
        world.store.hint(session, known.id, chain("7", 1)[0], Told(ttl_s=seconds))
    world.clock.now += 50
    world.store.reap()
    assert world.store.counters.hint_ends == {} and len(world.store.hints) == 1
    world.clock.now += 50
    world.store.reap()
    assert world.store.counters.hint_ends == {"ttl_demoted": 1} and len(world.store.hints) == 0


def test_a_ttl_of_what_was_deleted_is_nobodys() -> None:
    world, known, session = full()
    world.store.hint(session, known.id, chain("7", 1)[0], Told(ttl_s=10))
    world.store.delete(session, known.id, chain("7", 1)[0])
    world.publish(session, known, chain("new", 1))
    world.clock.now += 10
    world.store.reap()
    assert world.store.counters.hint_ends == {"ttl_outlived": 1}
    world.store.check_integrity()


def test_hints_are_counted_by_what_they_say_and_by_what_became_of_them() -> None:
    world, known, session = full()
    key, absent = chain("3", 1)[0], chain("?", 1)[0]
    world.store.hint(session, known.id, key, Told(stop_reason="tool_calls", gap_s=3))
    world.store.hint(session, known.id, key, Told(stop_reason="boredom"))
    world.store.hint(session, known.id, absent, Told(ended=True))
    counters = world.store.counters
    assert counters.hints == 3
    assert counters.hint_kinds == {"stop_reason": 2, "gap_s": 1, "ended": 1}
    assert counters.hint_ends == {"passed_on": 1, "unknown_reason": 1, "not_stored": 1}


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_policy_that_does_not_listen_goes_its_way(policy: str) -> None:
    world, known, session = full(policy)
    world.store.hint(session, known.id, chain("7", 1)[0], Told(ended=True, ttl_s=1))
    world.clock.now += 1
    world.store.reap()
    assert world.store.counters.hint_ends == {"policy_ignores": 1}


def test_a_key_named_twice_in_a_hint_is_one_chunk() -> None:
    world, known, session = full()
    world.store.hint(session, known.id, chain("3", 1)[0] * 2, Told(will_continue=1.0))
    world.store.check_integrity()


def hits_under_load(policy: str, told: Told | None) -> int:
    """Chains of one to four chunks, the popular ones used again and again."""
    world = World(segments=32, chunks=1000, options={"policy": policy})
    known, session = world.open(WHOLE), world.session()
    draw = random.Random(5)
    hits = 0
    for _ in range(4000):
        keys = chain(str(int(200 * draw.random() ** 2)), draw.randint(1, 4))
        found = world.pull(session, known, keys)
        hits += found
        if found < len(keys):
            world.publish(session, known, keys[found:], keys[found - 1] if found else b"")
        if told is not None:
            world.store.hint(session, known.id, b"".join(keys), told)
        world.clock.now += 1
        world.store.reap()
    return hits


@pytest.mark.parametrize("lie", [Told(ttl_s=0.5), Told(ended=True), Told(priority=5)])
def test_lies_about_everything_cost_little(lie: Told) -> None:
    """All chunks are said to be over at once, or to matter most, whatever will happen to them."""
    plain = hits_under_load("lru", None)
    assert hits_under_load("phz", lie) > 0.98 * plain
