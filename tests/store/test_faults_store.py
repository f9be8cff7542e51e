"""The faults of stores like this one, one test for each kind that the pure store can show."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from kvpool.proto.errors import BusyError, InvalidError, TooLargeError
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.store import KnownNamespace, StoreSession
from tests.store.world import SEGMENT, World, chain, extents, granted, part

CHUNK = 4096
"""Bytes of a chunk in most tests: four per segment, sixteen per world."""
WHOLE = part("all", CHUNK)
FULL = 4 * SEGMENT // CHUNK


def full_world(**options: float) -> tuple[World, KnownNamespace, StoreSession, list[bytes]]:
    """A pool without a free byte: one chain per chunk, the oldest first."""
    world = World(options=options)
    known, session = world.open(WHOLE), world.session()
    keys = [chain(f"old {number}", 1)[0] for number in range(FULL)]
    for key in keys:
        world.publish(session, known, [key])
        world.clock.now += 1
    assert world.used_bytes() == 4 * SEGMENT
    return world, known, session, keys


def assert_quiet(world: World) -> None:
    """Invariant Q: nothing is leased, being written or pinned, and the sums agree."""
    store = world.store
    assert len(store.leases) == 0 and store.leases.opened == store.leases.ended
    figures = store.figures()
    assert figures["leased"] == figures["writing"] == figures["quarantined"] == 0
    assert figures["pinned"] == 0 and figures["stored"] == world.used_bytes()
    store.check_integrity()


# Prefixes


def test_a_hole_ends_the_prefix_whatever_is_stored_behind_it() -> None:
    """PX-1"""
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 10)
    world.publish(session, known, keys)
    assert world.store.delete(session, known.id, keys[3]) == [Outcome.OK]
    match = world.store.match(session, known.id, b"".join(keys))
    assert (match.hits, match.reason) == (3, Reason.DELETED)
    for start in range(4, 10):
        behind = world.store.match(session, known.id, b"".join(keys[start:]))
        assert (behind.hits, behind.reason) == (0, Reason.ORPHAN)


def test_orphans_are_adopted_when_the_hole_is_published_again() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 10)
    world.publish(session, known, keys)
    world.store.delete(session, known.id, keys[3])
    got = world.publish(session, known, [keys[3]], parent=keys[2])
    assert got.outcomes.tolist() == [[Outcome.OK]]
    assert world.pull(session, known, keys) == 10
    assert world.pull(session, known, keys[6:]) == 4
    world.store.check_integrity()


def test_a_whole_republish_writes_only_the_hole_and_mends_the_chain() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 12)
    world.publish(session, known, keys[:10])
    world.store.delete(session, known.id, keys[3])
    got = world.store.reserve(session, known.id, b"", b"".join(keys))
    ok, exists = Outcome.OK, Outcome.EXISTS
    assert got.outcomes.ravel().tolist() == [exists] * 3 + [ok] + [exists] * 6 + [ok] * 2
    world.fill(known, got, keys)
    assert world.store.commit(session, got.lease) == [ok] * 3
    assert world.pull(session, known, keys) == 12
    assert_quiet(world)


def test_an_orphan_is_no_parent() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 5)
    world.publish(session, known, keys[:4])
    world.store.delete(session, known.id, keys[1])
    for parent in keys[2:4]:
        got = world.store.reserve(session, known.id, parent, keys[4])
        assert got.outcomes.tolist() == [[Outcome.NO_PARENT]] and not got.lease
    assert_quiet(world)


def test_a_chain_that_is_cut_above_a_write_refuses_the_commit() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 4)
    world.publish(session, known, keys[:3])
    got = world.store.reserve(session, known.id, keys[2], keys[3])
    world.store.delete(session, known.id, keys[0])
    assert world.store.commit(session, got.lease) == [Outcome.NO_PARENT]
    assert world.used_bytes() == 2 * CHUNK
    assert_quiet(world)


def test_orphans_are_the_first_victims_deepest_first() -> None:
    world, known, session, old = full_world()
    world.store.delete(session, known.id, b"".join(old[:4]))
    keys = chain("x", 4)
    world.publish(session, known, keys)
    world.store.delete(session, known.id, keys[1])
    world.publish(session, known, chain("y", 1))
    for number, left in enumerate(([keys[2]], [])):
        world.publish(session, known, chain(f"z {number}", 1))
        stored = [
            key
            for key, told in zip(
                keys[2:],
                world.store.explain(session, known.id, b"".join(keys[2:])),
                strict=True,
            )
            if told.parts
        ]
        assert stored == left
    assert all(world.hits(session, known, [key]) for key in old[4:]), "others went before orphans"


def test_a_commit_without_a_stored_parent_keeps_nothing() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 3)
    got = world.store.reserve(session, known.id, b"", b"".join(keys))
    assert world.store.commit(session, got.lease, [2]) == [Outcome.NO_PARENT]
    assert world.used_bytes() == 2 * CHUNK
    assert world.store.commit(session, got.lease) == [Outcome.OK] * 2
    unknown = world.store.reserve(session, known.id, chain("y", 1)[0], chain("y", 2)[1])
    assert unknown.outcomes.tolist() == [[Outcome.NO_PARENT]] and unknown.lease == b""
    assert_quiet(world)


def test_a_chain_that_holds_a_key_twice_is_refused() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 6)
    world.publish(session, known, keys)
    for twice in ([keys[0]] * 2, [*keys, keys[2]], [keys[4], *keys]):
        with pytest.raises(InvalidError, match="the same key twice"):
            world.store.match(session, known.id, b"".join(twice))
        with pytest.raises(InvalidError, match="the same key twice"):
            world.store.pin(session, known.id, b"".join(twice))
        with pytest.raises(InvalidError, match="the same key twice"):
            world.store.reserve(session, known.id, b"", b"".join(twice))
    with pytest.raises(InvalidError, match="the same key twice"):
        world.store.reserve(session, known.id, keys[0], b"".join(keys))
    assert_quiet(world)


# Parts


def test_a_chunk_is_a_hit_when_all_its_parts_are_there() -> None:
    """HY-1"""
    world = World()
    known, first, second = (
        world.open(part("kv", 1024), part("state", 2048)),
        world.session(),
        world.session(),
    )
    keys = chain("x", 3)
    world.publish(first, known, keys, parts=0b01)
    match = world.store.match(first, known.id, b"".join(keys))
    assert (match.hits, match.reason) == (0, Reason.PART_MISSING)
    got = world.store.reserve(second, known.id, b"", b"".join(keys[:2]), parts=0b10)
    world.fill(known, got, keys, [1])
    being = world.store.match(first, known.id, b"".join(keys))
    assert (being.hits, being.reason) == (0, Reason.BEING_WRITTEN)
    assert world.store.commit(second, got.lease) == [Outcome.OK] * 2
    assert world.pull(first, known, keys) == 2
    assert_quiet(world)


def test_all_parts_of_a_chunk_go_together() -> None:
    """HY-1"""
    world = World()
    known, session = world.open(part("kv", 1024), part("state", 2048)), world.session()
    for number in range(100):
        world.publish(session, known, chain(f"{number}", 1))
    for number in range(100):
        [told] = world.store.explain(session, known.id, chain(f"{number}", 1)[0])
        assert told.parts in (0, 3)
    assert world.store.counters.evicted_chunks > 50
    assert_quiet(world)


@pytest.mark.parametrize(
    ("missing", "hits"),
    [((), 8), ((0,), 8), ((5,), 8), ((7,), 7), ((6, 7), 6), ((5, 7), 5), (tuple(range(8)), 0)],
)
def test_a_windowed_part_is_needed_only_near_the_end(missing: tuple[int, ...], hits: int) -> None:
    """HY-1: the window of 32 tokens is two chunks."""
    world = World()
    known, session = world.open(part("kv", 1024), part("w", 512, window=32)), world.session()
    keys = chain("x", 8)
    world.publish(session, known, keys, parts=0b01)
    for at in range(8):
        if at not in missing:
            parent = keys[at - 1] if at else b""
            world.publish(session, known, [keys[at]], parent=parent, parts=0b10)
    assert world.pull(session, known, keys) == hits


def test_two_windows_must_both_be_there_at_the_same_length() -> None:
    world = World()
    known = world.open(part("kv", 1024), part("a", 512, window=16), part("b", 768, window=16))
    session = world.session()
    keys = chain("x", 4)
    world.publish(session, known, keys, parts=0b001)
    world.publish(session, known, keys[:3], parts=0b010)
    world.publish(session, known, keys[:2], parts=0b100)
    world.publish(session, known, [keys[3]], parent=keys[2], parts=0b100)
    assert world.pull(session, known, keys) == 2, "3 lacks b, 4 lacks a"


def test_what_does_not_fit_is_a_tail_of_whole_chunks() -> None:
    world = World(segments=2)
    known, session = world.open(part("a", 4096), part("b", 8192)), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 6)))
    assert got.outcomes.tolist() == [[Outcome.OK] * 2] * 2 + [[Outcome.BUSY] * 2] * 4
    assert len(list(granted(got))) == 4
    assert world.used_bytes() == 2 * (4096 + 8192)
    world.fill(known, got, chain("x", 6))
    assert world.store.commit(session, got.lease) == [Outcome.OK] * 4
    assert world.pull(session, known, chain("x", 6)) == 2
    assert_quiet(world)


# Writers


def test_one_of_two_writers_of_a_key_wins_and_the_other_is_told() -> None:
    """CW-1"""
    world = World()
    known, first, second = world.open(WHOLE), world.session(), world.session()
    key = chain("x", 1)[0]
    got = world.store.reserve(first, known.id, b"", key)
    other = world.store.reserve(second, known.id, b"", key)
    assert other.outcomes.tolist() == [[Outcome.WRITING]] and other.lease == b""
    world.fill(known, got, [key])
    assert world.store.commit(first, got.lease) == [Outcome.OK]
    late = world.store.reserve(second, known.id, b"", key)
    assert late.outcomes.tolist() == [[Outcome.EXISTS]]
    assert world.pull(second, known, [key]) == 1
    assert_quiet(world)


def test_a_late_duplicate_costs_no_byte_but_keeps_the_chunk_young() -> None:
    """CW-5"""
    world, known, session, old = full_world()
    before = world.store.figures()
    got = world.store.reserve(session, known.id, b"", old[0])
    assert got.outcomes.tolist() == [[Outcome.EXISTS]] and got.lease == b""
    assert world.store.figures() == before
    world.publish(session, known, chain("new", 1))
    assert world.hits(session, known, [old[0]]) == 1
    assert world.hits(session, known, [old[1]]) == 0
    assert_quiet(world)


def test_a_dead_writer_leaves_nothing_and_its_key_can_be_written_at_once() -> None:
    """CW-4"""
    world = World()
    known, dead, alive = world.open(WHOLE), world.session(), world.session()
    keys = chain("x", 3)
    got = world.store.reserve(dead, known.id, b"", b"".join(keys))
    assert world.store.commit(dead, got.lease, [0]) == [Outcome.OK]
    world.store.close_session(dead)
    assert world.used_bytes() == CHUNK and world.store.index.count == 1
    world.publish(alive, known, keys[1:], parent=keys[0])
    assert world.hits(alive, known, keys) == 3
    assert_quiet(world)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_silent_writers_key_is_free_after_its_lease_by_the_timer_alone(mapped: bool) -> None:
    """CW-4: a session that maps the pool may still write, so its extents stay out of reach."""
    world = World()
    known, silent, other = world.open(WHOLE), world.session(mapped=mapped), world.session()
    key = chain("x", 1)[0]
    got = world.store.reserve(silent, known.id, b"", key)
    world.clock.now += 31
    world.store.reap()
    assert world.used_bytes() == (CHUNK if mapped else 0)
    world.publish(other, known, [key])
    world.fill(known, got, [key])
    assert world.store.commit(silent, got.lease) == (
        [Outcome.EXPIRED] if mapped else [Outcome.STALE_EPOCH]
    )
    if mapped:
        assert world.pull(other, known, [key]) == 1, "the overdue writer wrote into the new extent"
        assert world.store.figures()["quarantined"] == CHUNK
        assert world.store.release(silent, got.lease) is Outcome.OK
    assert world.used_bytes() == CHUNK
    assert_quiet(world)


def test_an_overdue_writer_cannot_commit_before_the_timer_has_seen_it_either() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", chain("x", 1)[0], lease_s=5.0)
    world.clock.now += 5
    assert world.store.commit(session, got.lease) == [Outcome.EXPIRED]
    assert world.store.renew(session, got.lease) is Outcome.EXPIRED
    assert world.store.abort(session, got.lease) is Outcome.OK
    assert world.used_bytes() == 0
    assert_quiet(world)


def test_an_overdue_writers_end_does_not_disturb_the_writer_after_it() -> None:
    world = World()
    known, late, second, third = world.open(WHOLE), *(world.session() for _ in range(3))
    key = chain("x", 1)[0]
    first = world.store.reserve(late, known.id, b"", key)
    world.clock.now += 31
    world.store.reap()
    got = world.store.reserve(second, known.id, b"", key)
    assert got.outcomes.tolist() == [[Outcome.OK]]
    assert world.store.release(late, first.lease) is Outcome.OK
    refused = world.store.reserve(third, known.id, b"", key)
    assert refused.outcomes.tolist() == [[Outcome.WRITING]]
    assert world.store.commit(second, got.lease) == [Outcome.OK]
    assert_quiet(world)


def test_what_is_deleted_while_it_is_written_is_not_stored() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 2)
    got = world.store.reserve(session, known.id, b"", b"".join(keys))
    assert world.store.delete(session, known.id, keys[0]) == [Outcome.MISS]
    outcomes = world.store.commit(session, got.lease)
    assert outcomes == [Outcome.EXPIRED, Outcome.NO_PARENT]
    assert world.store.index.count == 0 and world.used_bytes() == 0
    assert_quiet(world)


def test_a_clear_cuts_off_readers_and_writers_alike() -> None:
    """CW-9"""
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 2))
    match = world.store.match(session, known.id, b"".join(chain("x", 2)))
    got = world.store.reserve(session, known.id, chain("x", 2)[1], chain("x", 3)[2])
    assert world.store.clear(session) == 2
    world.store.check_integrity()
    assert world.hits(session, known, chain("x", 3)) == 0
    assert world.store.commit(session, got.lease) == [Outcome.EXPIRED]
    assert world.store.release(session, match.lease) is Outcome.OK
    assert world.used_bytes() == 0 and world.store.index.count == 0
    assert_quiet(world)


# Deletes


def test_deletes_are_idempotent() -> None:
    """CW-8"""
    world = World()
    known, session = world.open(WHOLE), world.session()
    key = chain("x", 1)[0]
    assert world.store.delete(session, known.id, key) == [Outcome.MISS]
    world.publish(session, known, [key])
    assert world.store.delete(session, known.id, key * 2) == [Outcome.MISS, Outcome.OK]
    assert world.store.delete(session, known.id, key) == [Outcome.MISS]
    assert world.store.counters.deleted_chunks == 1
    assert_quiet(world)


def test_a_leased_chunk_is_deleted_at_once_and_its_bytes_live_until_the_last_release() -> None:
    """CW-8"""
    world = World()
    known, reader, operator = world.open(WHOLE), world.session(), world.session()
    key = chain("x", 1)[0]
    world.publish(reader, known, [key])
    match = world.store.match(reader, known.id, key)
    [(_, address, generation)] = extents(match, 1)
    content = world.read(address, CHUNK)
    assert world.store.delete(operator, known.id, key) == [Outcome.OK]
    assert world.hits(operator, known, [key]) == 0
    adopted = world.store.adopt(operator, match.lease)
    assert list(extents(adopted, 1)) == [((0, 0), address, generation)]
    world.publish(operator, known, [key])
    for number in range(20):
        world.publish(operator, known, chain(f"{number}", 1))
    assert world.read(address, CHUNK) == content
    assert world.store.release(reader, match.lease) is Outcome.OK
    world.store.check_integrity()
    assert world.store.release(operator, match.lease) is Outcome.OK
    assert world.used_bytes() == 4 * SEGMENT - CHUNK
    assert_quiet(world)


def test_a_corrupt_chunk_is_gone_counted_and_remembered_as_such() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    key = chain("x", 1)[0]
    world.publish(session, known, [key])
    assert world.store.delete(session, known.id, key, corrupt=True) == [Outcome.OK]
    assert world.store.delete(session, known.id, key, corrupt=True) == [Outcome.MISS]
    assert world.store.match(session, known.id, key).reason is Reason.QUARANTINED
    counters = world.store.counters
    assert (counters.corrupt_chunks, counters.deleted_chunks) == (1, 0)
    world.publish(session, known, [key])
    assert world.pull(session, known, [key]) == 1


# Leases and pins


def test_leases_end_once_and_only_for_those_who_hold_them() -> None:
    """PN-1"""
    world = World()
    known, session, other = world.open(WHOLE), world.session(), world.session()
    stranger = world.session("blue")
    keys = b"".join(chain("x", 2))
    world.publish(session, known, chain("x", 2))
    one, two = (world.store.match(session, known.id, keys) for _ in range(2))
    assert world.store.release(stranger, one.lease) is Outcome.STALE_EPOCH
    assert world.store.release(other, one.lease) is Outcome.STALE_EPOCH
    assert world.store.release(session, bytes(16)) is Outcome.STALE_EPOCH
    assert world.store.release(session, one.lease) is Outcome.OK
    assert world.store.release(session, one.lease) is Outcome.STALE_EPOCH
    assert [told.leases for told in world.store.explain(session, known.id, keys)] == [1, 1]
    assert world.store.release(session, two.lease) is Outcome.OK
    assert_quiet(world)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_lookup_that_is_never_followed_up_is_over_with_its_time_or_session(mapped: bool) -> None:
    """PN-1: a TTL ends a right, never a mapping."""
    world = World()
    known, session = world.open(WHOLE), world.session(mapped=mapped)
    world.publish(session, known, chain("x", 2))
    match = world.store.match(session, known.id, b"".join(chain("x", 2)))
    world.clock.now += 30
    world.store.reap()
    assert len(world.store.leases) == int(mapped)
    assert world.store.figures()["quarantined"] == (2 * CHUNK if mapped else 0)
    gone = Outcome.EXPIRED if mapped else Outcome.STALE_EPOCH
    assert world.store.renew(session, match.lease) is gone
    world.store.close_session(session)
    assert_quiet(world)


def test_an_expired_readers_extents_are_not_reused_until_it_lets_go() -> None:
    world, known, session, old = full_world()
    match = world.store.match(session, known.id, old[0])
    [(_, address, _)] = extents(match, 1)
    content = world.read(address, CHUNK)
    world.clock.now += 1e6
    world.store.reap()
    other = world.session()
    for number in range(40):
        world.publish(other, known, chain(f"{number}", 1))
    assert world.read(address, CHUNK) == content
    assert world.store.release(session, match.lease) is Outcome.OK
    assert_quiet(world)


def test_what_a_session_holds_past_its_leases_is_bounded_then_it_is_busy() -> None:
    world = World()
    known, session, other = world.open(WHOLE), world.session(), world.session()
    world.publish(session, known, chain("x", 5))
    match = world.store.match(session, known.id, b"".join(chain("x", 5)))
    world.clock.now += 31
    world.store.reap()
    assert session.quarantined_bytes == 5 * CHUNK > 0.25 * 4 * SEGMENT
    with pytest.raises(BusyError, match=r"20480 bytes past .* release them.*quarantined 20480"):
        world.store.match(session, known.id, chain("x", 1)[0])
    with pytest.raises(BusyError):
        world.store.reserve(session, known.id, b"", chain("y", 1)[0])
    assert world.store.match(session, known.id, chain("x", 1)[0], peek=True).hits == 1
    assert world.pull(other, known, chain("x", 5)) == 5, "others are served"
    assert world.store.release(session, match.lease) is Outcome.OK
    assert session.quarantined_bytes == 0
    assert world.pull(session, known, chain("x", 5)) == 5
    assert_quiet(world)


def test_only_what_is_still_open_of_an_overdue_write_is_quarantined() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 4)))
    world.store.commit(session, got.lease, [0])
    world.clock.now += 31
    world.store.reap()
    assert session.quarantined_bytes == 3 * CHUNK
    assert world.store.abort(session, got.lease, [1]) is Outcome.OK
    assert session.quarantined_bytes == 2 * CHUNK
    assert world.store.abort(session, got.lease) is Outcome.OK
    assert session.quarantined_bytes == 0
    assert_quiet(world)


def test_a_session_that_held_a_lease_twice_is_quarantined_once() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 1))
    match = world.store.match(session, known.id, chain("x", 1)[0])
    world.store.adopt(session, match.lease)
    world.clock.now += 31
    world.store.reap()
    for left in (CHUNK, 0):
        assert world.store.release(session, match.lease) is Outcome.OK
        assert session.quarantined_bytes == left
    assert_quiet(world)


def test_a_clock_that_jumps_ahead_ends_leases_and_loses_nothing() -> None:
    """CK-1"""
    world = World()
    known, session = world.open(WHOLE), world.session(mapped=False)
    world.publish(session, known, chain("x", 2))
    world.store.match(session, known.id, chain("x", 1)[0])
    world.store.reserve(session, known.id, b"", chain("y", 1)[0])
    world.clock.now += 365 * 86400
    world.store.reap()
    assert world.pull(session, known, chain("x", 2)) == 2
    assert_quiet(world)


def test_many_leases_that_end_at_once_end_quickly() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session(mapped=False)
    world.publish(session, known, chain("x", 1))
    leases = 20_000
    for _ in range(leases):
        world.store.match(session, known.id, chain("x", 1)[0])
    world.clock.now += 31
    start = time.thread_time()
    world.store.reap()
    assert time.thread_time() - start < leases * 50e-6
    assert world.store.counters.expired_leases == leases
    assert_quiet(world)


# Eviction


def test_a_pool_that_is_all_pinned_is_busy_with_figures_until_one_pin_goes() -> None:
    """EV-1"""
    world, known, session, old = full_world()
    for key in old:
        world.store.pin(session, known.id, key)
    new = chain("new", 1)
    start = time.thread_time()
    got = world.store.reserve(session, known.id, b"", new[0])
    assert time.thread_time() - start < 1.0
    assert got.outcomes.tolist() == [[Outcome.BUSY]] and got.lease == b""
    size = 4 * SEGMENT
    assert got.text == (
        f"total {size}, stored {size}, leased 0, pinned {size}, evictable 0, writing 0, "
        "quarantined 0 bytes"
    )
    world.store.unpin(session, known.id, old[5])
    world.publish(session, known, new)
    assert world.hits(session, known, [old[5]]) == 0
    assert all(world.hits(session, known, [key]) for key in old if key != old[5])
    assert world.store.counters.busy == 1


def test_what_is_leased_does_not_go_and_goes_again_after_release() -> None:
    world, known, session, old = full_world()
    held = [world.store.match(session, known.id, key) for key in old]
    assert world.store.reserve(session, known.id, b"", chain("new", 1)[0]).text
    world.store.release(session, held[3].lease)
    world.publish(session, known, chain("new", 1))
    assert world.hits(session, known, [old[3]]) == 0
    assert world.store.counters.evicted_chunks == 1
    world.store.close_session(session)
    assert_quiet(world)


def test_what_can_never_fit_is_refused_at_once_and_evicts_nothing() -> None:
    """EV-4"""
    world, known, session, old = full_world()
    with pytest.raises(TooLargeError):
        world.open(part("all", 2 * SEGMENT), model="large")
    with pytest.raises(InvalidError):
        world.store.reserve(session, known.id, b"", b"".join(chain("x", 129)))
    assert world.store.counters.evicted_chunks == 0
    assert all(world.hits(session, known, [key]) for key in old)


def test_what_was_just_written_is_not_the_first_victim() -> None:
    """EV-6"""
    world, known, session, old = full_world()
    for number in range(FULL):
        key = chain(f"{number}", 1)
        world.publish(session, known, key)
        assert world.hits(session, known, key) == 1
        assert world.hits(session, known, [old[number]]) == 0
    assert world.store.counters.evicted_chunks == FULL


def test_a_chain_goes_from_its_end_one_chunk_at_a_time() -> None:
    """EV-8"""
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", FULL)
    world.publish(session, known, keys[:7])
    world.publish(session, known, keys[7:], parent=keys[6])
    other = chain("y", FULL)
    for number in range(FULL):
        world.publish(session, known, [other[number]], parent=other[number - 1] if number else b"")
        assert world.hits(session, known, keys) == FULL - number - 1
    assert world.store.counters.evicted_chunks == FULL


def test_a_publish_into_a_full_pool_evicts_one_victim_per_chunk_the_oldest_first() -> None:
    world, known, session, old = full_world()
    world.publish(session, known, chain("x", 5))
    assert world.store.counters.evicted_chunks == 5
    assert [world.hits(session, known, [key]) for key in old] == [0] * 5 + [1] * (FULL - 5)
    assert world.store.match(session, known.id, old[0]).reason is Reason.EVICTED
    assert world.used_bytes() == 4 * SEGMENT
    assert_quiet(world)


def test_a_publish_never_evicts_the_chain_that_it_extends() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", FULL + 4)
    world.publish(session, known, keys[:FULL])
    got = world.store.reserve(session, known.id, keys[FULL - 1], b"".join(keys[FULL:]))
    assert (got.outcomes == Outcome.BUSY).all() and got.lease == b""
    assert world.store.counters.evicted_chunks == 0
    assert world.hits(session, known, keys) == FULL
    assert_quiet(world)


def test_what_is_stored_behind_a_chunk_without_room_is_not_held() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 4)
    world.publish(session, known, keys)
    world.store.delete(session, known.id, keys[1])
    others = chain("y", FULL - 3)
    world.publish(session, known, others)
    match = world.store.match(session, known.id, b"".join(others))
    got = world.store.reserve(session, known.id, b"", b"".join(keys))
    exists, busy = Outcome.EXISTS, Outcome.BUSY
    assert got.outcomes.ravel().tolist() == [exists, busy, exists, exists]
    world.store.check_integrity()
    world.store.release(session, match.lease)
    assert_quiet(world)


def test_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", FULL + 4)))
    assert got.outcomes.ravel().tolist() == [Outcome.OK] * FULL + [Outcome.BUSY] * 4
    assert world.store.commit(session, got.lease) == [Outcome.OK] * FULL
    assert world.hits(session, known, chain("x", FULL + 4)) == FULL
    assert_quiet(world)


def test_when_the_rows_run_out_the_oldest_chunk_makes_room() -> None:
    world = World(chunks=4)
    known, session = world.open(WHOLE), world.session()
    for number in range(9):
        world.publish(session, known, chain(f"{number}", 1))
    assert world.store.index.count == 4 and world.store.counters.evicted_chunks == 5
    held = world.store.reserve(session, known.id, b"", b"".join(chain("x", 6)))
    assert held.outcomes.ravel().tolist() == [Outcome.OK] * 4 + [Outcome.BUSY] * 2
    assert world.used_bytes() == 4 * CHUNK
    world.store.abort(session, held.lease)
    assert world.used_bytes() == 0
    assert_quiet(world)


def test_whoever_is_told_of_a_hit_gets_its_bytes() -> None:
    """WB-13: whatever is published, evicted and deleted meanwhile."""
    world = World()
    known, session = world.open(WHOLE), world.session()
    draw = random.Random(1)
    served = 0
    for _ in range(600):
        name, length = f"{draw.randrange(6)}", draw.randint(1, 6)
        keys = chain(name, length)
        told = world.hits(session, known, keys)
        assert world.pull(session, known, keys) == told
        served += told
        if draw.random() < 0.1:
            world.store.delete(session, known.id, draw.choice(keys))
        elif told < length:
            parent = keys[told - 1] if told else b""
            got = world.store.reserve(session, known.id, parent, b"".join(keys[told:]))
            world.fill(known, got, keys[told:])
            world.store.commit(session, got.lease)
    assert served > 500 and world.store.counters.evicted_chunks > 50
    assert_quiet(world)


# Memory


def test_a_part_has_at_least_a_plane_so_an_empty_value_cannot_be_declared() -> None:
    """WB-14"""
    with pytest.raises(InvalidError, match="0 bytes; an int from 1"):
        part("all", 0)


def test_free_bytes_of_another_class_are_found_by_emptying_a_segment() -> None:
    """MM-3: and what must go goes children first."""
    world = World()
    small, large = world.open(WHOLE), world.open(part("all", SEGMENT), model="large")
    session = world.session()
    keys = chain("x", FULL)
    world.publish(session, small, keys)
    world.publish(session, large, chain("y", 1))
    assert world.store.counters.reassigned_segments == 1
    left = world.hits(session, small, keys)
    assert left == len(world.store.keys(session, small.id)[1]) == FULL - 4, "a prefix is left"
    assert_quiet(world)


def test_the_least_recently_used_segment_changes_class() -> None:
    world, small, session, old = full_world()
    large = world.open(part("all", SEGMENT), model="large")
    world.pull(session, small, [old[0]])
    world.publish(session, large, chain("y", 1))
    assert [world.hits(session, small, [key]) for key in old] == [1] * 4 + [0] * 4 + [1] * 8


@pytest.mark.parametrize("hold", ["lease", "pin", "write"])
def test_a_segment_with_something_held_in_it_does_not_change_class(hold: str) -> None:
    world, small, session, old = full_world()
    large = world.open(part("all", SEGMENT), model="large")
    if hold == "write":
        world.store.delete(session, small.id, b"".join(old[::4]))
    for number, key in enumerate(old[::4]):
        if hold == "lease":
            world.store.match(session, small.id, key)
        elif hold == "pin":
            world.store.pin(session, small.id, key)
        else:
            world.store.reserve(session, small.id, b"", chain(f"{number}", 1)[0])
    got = world.store.reserve(session, large.id, b"", chain("y", 1)[0])
    assert got.outcomes.tolist() == [[Outcome.BUSY]]
    assert world.store.counters.evicted_chunks == 0
    world.store.check_integrity()


@pytest.mark.parametrize("hold", ["lease", "pin"])
def test_a_segment_above_something_held_does_not_change_class(hold: str) -> None:
    world = World()
    small, large = world.open(WHOLE), world.open(part("all", SEGMENT), model="large")
    session = world.session()
    keys = chain("x", FULL)
    world.publish(session, small, keys)
    if hold == "lease":
        world.store.match(session, small.id, keys[-1])
    else:
        world.store.pin(session, small.id, keys[-1])
    got = world.store.reserve(session, large.id, b"", chain("y", 1)[0])
    assert got.outcomes.tolist() == [[Outcome.BUSY]]
    assert world.hits(session, small, keys) == FULL


def test_what_a_lost_segment_leaves_behind_goes_in_its_turn() -> None:
    world = World()
    small, large = world.open(WHOLE), world.open(part("all", SEGMENT), model="large")
    session = world.session()
    keys = chain("x", FULL)
    world.publish(session, small, keys)
    match = world.store.match(session, small.id, keys[-1])
    assert world.store.reserve(session, small.id, b"", chain("z", 1)[0]).text, "nothing can go"
    world.store.release(session, match.lease)
    world.publish(session, large, chain("y", 1))
    assert world.hits(session, small, keys) == FULL - 4
    world.publish(session, small, chain("z", 1))
    assert world.hits(session, small, keys) == FULL - 5
    assert_quiet(world)


def test_a_class_that_came_late_gets_its_share_from_what_is_older() -> None:
    world, small, session, old = full_world()
    large = world.open(part("all", 2 * CHUNK), model="large")
    for number in range(40):
        world.publish(session, large, chain(f"{number}", 1))
        world.clock.now += 1
    assert len(world.store.keys(session, large.id)[1]) == 8, "the whole pool"
    assert not any(world.hits(session, small, [key]) for key in old)
    assert_quiet(world)


def test_mixed_sizes_come_and_go_and_the_whole_pool_is_one_size_again() -> None:
    """MM-2"""
    world = World(chunks=400)
    session = world.session()
    sizes = (512, 1024, 1536, 4096, 6144, SEGMENT)
    spaces = [world.open(part("all", size), model=str(size)) for size in sizes]
    draw = random.Random(2)
    for number in range(300):
        world.publish(session, draw.choice(spaces), chain(f"{number}", draw.randint(1, 2)))
        world.clock.now += 1
        world.store.check_integrity()
    for known in (*spaces, spaces[0]):
        count = 4 * (SEGMENT // known.extent_bytes[0])
        for number in range(count):
            world.publish(session, known, chain(f"fill {number}", 1))
            world.clock.now += 1
        assert len(world.store.keys(session, known.id)[1]) >= count // 4
    world.store.clear(session)
    assert world.used_bytes() == 0
    for known in spaces:
        count = 4 * (SEGMENT // known.extent_bytes[0])
        for number in range(count):
            world.publish(session, known, chain(f"fill {number}", 1))
        assert len(world.store.keys(session, known.id)[1]) == count
        world.store.clear(session)
    assert_quiet(world)


def test_extents_never_overlap_and_never_cross_a_region() -> None:
    world = World(regions=2)
    session = world.session()
    spaces = [world.open(part("all", size), model=str(size)) for size in (1024, 3072, 8192)]
    taken: list[tuple[int, int]] = []
    for number in range(30):
        known = spaces[number % 3]
        got = world.store.reserve(session, known.id, b"", chain(f"{number}", 1)[0])
        taken += [(address, address + known.extent_bytes[0]) for _, address, _ in granted(got)]
    assert len(taken) > 8
    assert all(end <= start for (_, end), (start, _) in pairwise(sorted(taken)))
    region = world.store.options.region_bytes
    assert all(start // region == (end - 1) // region for start, end in taken)
