"""A store with an SSD below it: what is evicted is found again, whatever the device does."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.eviction import make_policy
from kvpool.store.eviction.base import Learns
from kvpool.store.ssd.condition import HANG_S
from kvpool.store.ssd.simulated import Crash
from tests.ssd.samples import SPACE, key_of, namespace
from tests.ssd.world import World, chain


def test_what_memory_evicts_is_found_on_the_ssd_and_comes_back_whole() -> None:
    world = World()
    keys = chain("a", 5)
    world.publish(keys)
    world.flood()
    assert world.in_memory(keys) == 0
    match = world.match(keys)
    assert (match.hits, match.cold, match.outcome) == (0, 5, Outcome.HIT)
    assert match.load_s > 0
    world.store.release(world.session, match.lease)
    assert world.pull(keys) == 5
    assert world.in_memory(keys) == 5, "it was promoted"
    world.check()


def test_a_prefix_may_be_in_memory_and_its_end_on_the_ssd() -> None:
    world = World(room=8)
    keys = chain("a", 6)
    world.publish(keys)
    world.settle()
    while world.in_memory(keys) == 6:
        world.flood(1)
    match = world.match(keys)
    assert match.hits + match.cold == 6 and match.cold > 0
    world.store.release(world.session, match.lease)
    assert world.pull(keys) == 6
    world.check()


def test_a_hole_ends_the_prefix_whatever_the_tiers_hold_behind_it() -> None:
    world = World()
    keys = chain("a", 6)
    world.publish(keys)
    world.flood()
    world.pull(keys[:2])  # the first two are in memory, too
    world.store.delete(world.session, world.known.id, keys[3])
    match = world.match(keys)
    assert match.hits + match.cold == 3
    world.store.release(world.session, match.lease)
    assert world.pull(keys) == 3
    world.check()


def test_growing_a_conversation_writes_only_what_is_new() -> None:
    world = World(room=30, write_through=True)
    keys = chain("a", 20)
    for end in range(1, 21):
        world.publish(keys[end - 1 : end], parent=keys[end - 2] if end > 1 else b"")
        world.settle()
    assert world.tier.counters.written_chunks == 20
    assert world.ssd.status()["write_amplification"] <= 1.5  # three blocks for 8,392 bytes
    world.check()


def test_writing_through_has_a_copy_of_all_and_writing_back_only_of_what_must_go() -> None:
    for write_through, copies in ((True, 3), (False, 0)):
        world = World(room=20, write_through=write_through)
        world.publish(chain("a", 3))
        world.settle()
        assert world.ssd.shelf.index.count == copies


def test_the_ssd_evicts_leaves_first_and_its_room_is_used_again() -> None:
    world = World(segments=3)
    chains = [chain(name, 4) for name in "abcdefghij"]
    for keys in chains:
        world.publish(keys)
        world.flood(8)
    stored = [world.match(keys, peek=True) for keys in chains]
    assert stored[0].hits + stored[0].cold == 0, "the oldest chain is gone"
    assert stored[-1].hits + stored[-1].cold == 4, "the newest is there"
    assert world.ssd.shelf.evicted_chunks > 80
    world.check()


def test_another_size_of_chunks_takes_the_segments_that_were_not_used_for_longest() -> None:
    world = World()  # ten segments: of five small chunks each, or of three large ones
    small, large = world.known, namespace(9000, model="other")
    hot = chain("hot", 4)
    world.publish(hot)
    world.flood(60)
    assert world.pull(hot) == 0, "the SSD is full"
    world.publish(hot)
    world.flood(12)
    world.switch(large)
    slot = world.tier.space.slot_bytes(world.form.nbytes)
    chains = [chain(f"large{name}", 1) for name in range(21)]
    for keys in chains[:10]:
        world.publish(keys)
        world.flood(1)
    taken = world.tier.space.statistics().segments_by_class
    assert world.ssd.shelf.reassigned_segments >= taken[slot] > 1, "and not its first for ever"
    assert world.store.match(world.session, small.id, hot[0], peek=True).cold == 1
    for keys in chains[10:]:
        world.publish(keys)
        world.flood(2)
    taken = world.tier.space.statistics().segments_by_class
    assert taken[slot] >= 9, "who is alone gets all"
    assert [world.pull(keys) for keys in chains[-8:]] == [1] * 8
    world.check()


def test_a_segment_that_somebody_reads_is_not_given_to_another_size() -> None:
    world = World(segments=3)
    keys = chain("a", 3)
    world.publish(keys)
    world.flood(7)
    match = world.match(keys)
    assert match.cold == 3
    world.switch(namespace(9000, model="other"))
    world.flood(20)
    assert world.load(match).chunks == 3
    world.store.release(world.session, match.lease)
    world.check()


def test_two_readers_of_one_chain_share_its_reads() -> None:
    world = World()
    keys = chain("a", 5)
    world.publish(keys)
    world.flood()
    one, other = world.match(keys), world.match(keys)
    assert world.store.load(world.session, one.lease).pending
    assert world.store.load(world.session, other.lease).pending
    assert world.load(one).chunks == world.load(other).chunks == 5
    assert world.tier.counters.read_chunks == 5
    for match in (one, other):
        world.store.release(world.session, match.lease)
    world.check()


def test_readers_of_chains_that_part_both_get_theirs() -> None:
    world = World(room=12)
    stem = chain("a", 3)
    left, right = [*stem, key_of("l")], [*stem, key_of("r")]
    world.publish(left)
    world.publish(right[3:], parent=stem[-1])
    world.flood(30)
    one, other = world.match(left), world.match(right)
    world.store.load(world.session, one.lease)
    world.store.load(world.session, other.lease)
    assert world.load(one).chunks == world.load(other).chunks == 4
    for match in (one, other):
        world.store.release(world.session, match.lease)
    world.check()


def test_a_lookup_that_never_loads_holds_its_chunks_and_leaves_nothing() -> None:
    world = World(segments=3)
    keys = chain("a", 4)
    world.publish(keys)
    world.flood(8)
    match = world.match(keys)
    assert match.cold == 4
    for _ in range(6):
        world.flood(8)  # would push it out of the SSD, too
    assert world.load(match).chunks == 4
    world.store.release(world.session, match.lease)
    world.check()


def test_a_reader_that_leaves_while_its_chunks_are_loaded_leaves_nothing() -> None:
    for steps in range(6):
        world = World(seed=steps)
        keys = chain("a", 5)
        world.publish(keys)
        world.flood()
        match = world.match(keys)
        world.store.load(world.session, match.lease)
        for _ in range(steps):
            world.lanes.step()
        world.store.close_session(world.session)
        world.session = world.store.open_session("default", mapped=True)
        world.check()
        assert world.pull(keys) == 5


def test_a_load_in_time_is_served_and_a_late_one_is_expired() -> None:
    world = World()
    keys = chain("a", 3)
    world.publish(keys)
    world.flood()
    match = world.match(keys, lease_s=5)
    world.clock.now += 6
    world.store.reap()
    assert world.store.load(world.session, match.lease).outcome is Outcome.EXPIRED
    world.store.release(world.session, match.lease)
    world.check()


def test_memory_that_is_all_held_is_said_and_what_fits_is_had() -> None:
    world = World(room=7)
    keys = chain("a", 5)
    world.publish(keys)
    world.flood()
    others = chain("b", 4)
    world.publish(others)
    held = world.match(others)
    match = world.match(keys)
    loading = world.load(match)
    assert loading.chunks == 3 and loading.outcome is Outcome.BUSY
    world.store.release(world.session, held.lease)
    assert world.load(match).chunks == 5, "and the rest, when there is room"
    world.store.release(world.session, match.lease)
    world.check()


def test_delete_and_clear_reach_the_ssd() -> None:
    world = World()
    a, b = chain("a", 3), chain("b", 3)
    world.publish(a)
    world.publish(b)
    world.flood()
    out = world.store.delete(world.session, world.known.id, b"".join(a[1:]))
    assert out == [Outcome.OK, Outcome.OK]
    assert world.match(a, peek=True).cold == 1
    world.settle()
    assert not {a[1], a[2]} & world.catalogue.stored.keys()
    assert world.store.clear(world.session, world.known.id) > 0
    assert world.match(b, peek=True).cold == 0
    world.settle()
    assert not world.catalogue.stored
    world.check()


@pytest.mark.parametrize("steps", range(6))
def test_a_chunk_that_is_deleted_while_it_is_written_or_read_does_not_come_back(steps: int) -> None:
    world = World(seed=steps, write_through=True)
    keys = chain("a", 2)
    world.publish(keys)
    world.ssd.turn()
    for _ in range(steps):
        world.lanes.step()
    world.store.delete(world.session, world.known.id, b"".join(keys))
    world.settle()
    assert not world.catalogue.stored and world.pull(keys) == 0
    world.publish(keys)
    world.flood()
    match = world.match(keys)
    world.store.load(world.session, match.lease)
    for _ in range(steps):
        world.lanes.step()
    world.store.delete(world.session, world.known.id, b"".join(keys))
    world.store.release(world.session, match.lease)
    world.settle()
    assert world.pull(keys) == 0
    world.check()


def test_second_touch_writes_only_what_was_used_again() -> None:
    world = World(policy="phz", admission="second_touch")
    once, twice = chain("a", 3), chain("b", 3)
    world.publish(once)
    world.publish(twice)
    world.pull(twice)
    for name in range(20):
        world.clock.now += 1
        world.publish(chain(f"flood{name}", 1))
        world.settle()
    assert world.match(once, peek=True).cold == 0
    match = world.match(twice, peek=True)
    assert match.hits + match.cold == 3
    declined = world.ssd.demotion.declined_chunks
    world.settle()
    assert declined == world.ssd.demotion.declined_chunks > 0, "each is asked about once"
    world.check()


def test_key_pages_list_each_chunk_once_wherever_it_is() -> None:
    world = World(write_through=True)
    keys = [chain(name, 4) for name in "abcd"]
    for one in keys:
        world.publish(one)
        world.settle()
    listed, cursor = [], 0
    while True:
        page, spaces, cursor = world.store.keys(world.session, cursor=cursor, limit=3)
        assert len(spaces) == len(page) // 32 <= 3
        listed += [page[at : at + 32] for at in range(0, len(page), 32)]
        if not cursor:
            break
    assert sorted(listed) == sorted(key for one in keys for key in one)


def test_a_publish_below_what_is_only_on_the_ssd_is_busy_until_that_is_loaded() -> None:
    world = World(room=12)
    keys = chain("a", 6)
    world.publish(keys[:5])
    world.flood(30)
    assert world.in_memory(keys) == 0
    reserved = world.store.reserve(world.session, world.known.id, keys[4], keys[5])
    assert reserved.outcomes.tolist() == [[Outcome.BUSY]] and not reserved.lease
    assert "on the SSD" in reserved.text
    assert world.publish(keys[5:], parent=keys[4]) == [Outcome.OK], "there is room below it"
    assert world.store.explain(world.session, world.known.id, keys[5])[0].outcome is Outcome.MISS, (
        "but what is committed before it came is not kept"
    )
    world.settle()
    assert world.tier.counters.read_chunks == 5, "and it is asked for once"
    assert world.publish(keys[5:], parent=keys[4]) == [Outcome.OK]
    assert world.pull(keys) == 6
    world.check()


def test_a_publish_below_what_is_damaged_on_the_ssd_has_no_parent() -> None:
    world = World(room=12)
    keys = chain("a", 4)
    world.publish(keys[:3])
    world.flood(30)
    shelf = world.ssd.shelf
    (extent,) = shelf.extents(shelf.find(world.known, keys[1]), (0,))
    world.disk.flip(extent.address + 300)
    assert world.publish(keys[3:], parent=keys[2]) == [Outcome.BUSY]
    world.settle()
    assert world.publish(keys[3:], parent=keys[2]) == [Outcome.NO_PARENT]
    world.check()


def test_a_publish_below_what_a_dead_device_has_is_told_that_it_has_no_parent() -> None:
    world = World(room=12)
    keys = chain("a", 4)
    world.publish(keys[:3])
    world.flood(30)
    world.disk.faults.reading = OSError(5, "Input/output error")
    assert world.publish(keys[3:], parent=keys[2]) == [Outcome.BUSY]
    world.settle()
    assert "is down" in world.ssd.trouble()
    assert world.publish(keys[3:], parent=keys[2]) == [Outcome.NO_PARENT]
    world.disk.faults.reading = None
    world.clock.now += 60
    world.check()


# ---- damage and failure


def test_damage_at_rest_is_a_miss_that_is_counted_quarantined_and_republished() -> None:
    world = World()
    keys = chain("a", 5)
    world.publish(keys)
    world.flood()
    shelf = world.ssd.shelf
    (extent,) = shelf.extents(shelf.find(world.known, keys[2]), (0,))
    world.disk.flip(extent.address + 300)
    match = world.match(keys)
    loading = world.load(match)
    assert (loading.chunks, loading.outcome) == (2, Outcome.CORRUPT)
    world.store.release(world.session, match.lease)
    assert world.pull(keys) == 2, "a second request sees the shorter prefix"
    assert world.tier.counters.corrupt_chunks == 1
    assert world.tier.space.quarantined_bytes == 3 * 4096
    world.settle()
    assert keys[2] not in world.catalogue.stored
    world.publish(keys)
    assert world.pull(keys) == 5


def test_a_device_that_cannot_be_read_is_a_miss_and_the_tier_comes_back() -> None:
    world = World()
    keys = chain("a", 3)
    world.publish(keys)
    world.flood()
    match = world.match(keys)
    world.disk.faults.reading = OSError(5, "Input/output error")
    assert world.load(match).outcome is Outcome.UNREACHABLE
    world.store.release(world.session, match.lease)
    assert world.match(keys, peek=True).cold == 0, "what cannot be read is no hit"
    assert "is down" in world.ssd.trouble()
    world.disk.faults.reading = None
    world.clock.now += 60
    world.settle()
    assert not world.ssd.trouble()
    assert world.pull(keys) == 3
    world.check()


@pytest.mark.parametrize("where", ["writing", "syncing", "committing"])
def test_a_dead_disk_never_blocks_publishes(where: str) -> None:
    world = World()
    setattr(world.disk.faults, where, OSError(28, "No space left on device"))
    for name in range(30):
        assert world.publish(chain(f"c{name}", 2)) == [Outcome.OK] * 2
        world.settle()
    assert "No space left" in world.ssd.trouble()
    assert world.ssd.status()["counters"]["unsaved_chunks"] > 40, "and what is lost is counted"
    setattr(world.disk.faults, where, None)
    world.clock.now += 60
    world.settle()
    keys = chain("a", 3)
    world.publish(keys)
    world.flood()
    assert world.pull(keys) == 3
    world.check()


def test_a_hung_disk_never_blocks_publishes() -> None:
    world = World()
    world.tier.queue_bytes = 3 * 8392
    for name in range(40):
        world.clock.now += 1
        assert world.publish(chain(f"c{name}", 1)) == [Outcome.OK]
        world.ssd.turn()  # and no lane ever answers
    assert world.clock.now > HANG_S and "no answer" in world.ssd.trouble()
    assert world.tier.writing_bytes <= world.tier.queue_bytes
    world.lanes.run()
    world.clock.now += 60
    world.settle()
    assert not world.ssd.trouble()
    world.check()


def test_what_was_to_be_written_through_while_the_device_is_down_is_given_up_and_counted() -> None:
    world = World(write_through=True)
    world.disk.faults.writing = OSError(5, "Input/output error")
    world.publish([key_of("first")])
    world.settle()
    assert "is down" in world.ssd.trouble()
    refused = world.tier.counters.refused_writes
    keys = chain("a", 3)
    world.publish(keys)
    world.ssd.turn()
    assert world.ssd.demotion.waiting == 0, "a dead device is not queued for"
    assert world.tier.counters.refused_writes == refused + 3
    assert world.pull(keys) == 3, "memory has them"
    world.disk.faults.writing = None
    world.clock.now += 60
    world.settle()
    world.flood()
    assert world.match(keys, peek=True).cold == 3, "and writes them before they leave it"


# ---- load or recompute


def test_what_computes_faster_than_it_loads_is_not_matched_and_counted() -> None:
    world = World()
    keys = chain("a", 4)
    world.publish(keys)
    world.flood()
    world.tier.speed = type(world.tier.speed)(10e6)  # a disk of 10 MB/s: 0.84 ms a chunk
    fast, slow = world.match(keys, prefill_tokens_s=1e5), world.match(keys, prefill_tokens_s=1e3)
    assert (fast.cold, fast.skipped, fast.reason) == (0, 4, Reason.SLOW_TIER)
    assert (slow.cold, slow.skipped) == (4, 0)
    assert world.ssd.skipped_chunks == 4
    world.store.release(world.session, slow.lease)
    world.check()


def test_a_reader_may_let_the_speed_that_publishes_have_shown_decide() -> None:
    world = World(segments=20)
    keys = chain("a", 4)
    for name in range(8):  # each is computed in 4 ms: four tokens, 1,000 in a second
        world.compute(chain(f"b{name}", 1), 0.004)
    world.publish(keys)
    world.flood()
    world.tier.speed = type(world.tier.speed)(10e6)  # 0.84 ms a chunk
    assert world.match(keys, prefill_tokens_s=-1.0, peek=True).cold == 4, (
        "computing takes 4 ms a chunk"
    )
    for name in range(32):
        world.compute(chain(f"c{name}", 1), 0.0004)
    assert world.ssd.prefill_tokens_s(world.known) == pytest.approx(10_000)
    match = world.match(keys, prefill_tokens_s=-1.0)
    assert (match.cold, match.skipped, match.reason) == (0, 4, Reason.SLOW_TIER)
    assert world.ssd.status()["counters"]["learned_skipped_chunks"] == 4
    assert world.match(keys, prefill_tokens_s=1e3, peek=True).cold == 4, "what is given counts"
    assert world.match(keys, peek=True).cold == 4, "who says nothing gets what is stored"
    assert world.store.counters.corrupt_chunks == 0
    world.check()


def test_a_tier_that_is_only_written_is_warned_about() -> None:
    world = World()
    world.tier.counters.written_chunks = 1000
    assert "write-only" in world.ssd.warnings()[0]
    keys = chain("a", 2)
    world.publish(keys)
    world.flood()
    world.pull(keys)
    assert not world.ssd.warnings()


# ---- restart


def test_a_restart_serves_what_the_ssd_had_at_once_and_verified() -> None:
    world = World()
    chains = [chain(name, 4) for name in "abc"]
    for keys in chains:
        world.publish(keys)
        world.flood(8)
    before = [world.match(keys, peek=True).cold for keys in chains]
    again = world.after_crash()
    assert [again.match(keys, peek=True).cold for keys in chains] == before == [4, 4, 4]
    for keys in chains:
        assert again.pull(keys) == 4
    assert again.tier.counters.corrupt_chunks == 0
    again.publish([key_of("more")], parent=chains[2][3])
    again.check()


def test_of_two_shapes_the_chunk_that_was_not_used_for_longest_goes() -> None:
    world = World(room=20, write_through=True)
    shelf = world.ssd.shelf
    places = []
    for name, space in (("a", SPACE), ("b", namespace(16388, model="larger"))):
        world.switch(space)
        world.publish([key_of(name)])
        world.settle()
        places.append((world.known, shelf.index.find(world.known.id, key_of(name)).rows))
        world.clock.now += 1
    shelf.use(*places[0])
    assert len(shelf.policies) == 2 and shelf.evict(1) == 1
    assert [
        shelf.index.find_one(known.id, key_of(n)) >= 0
        for (known, _), n in zip(places, "ab", strict=True)
    ] == [True, False]
    assert shelf.evict(5) == 1, "all there is"
    shelf.check_integrity()


def test_what_was_learned_of_the_ssd_is_kept_apart_from_what_was_learned_of_memory() -> None:
    policy = make_policy("phz", 10, lambda rows: rows < 0)
    assert isinstance(policy, Learns)
    learned = {"ssd/phz/12288": policy.dump()}
    world = World(policy="phz", write_through=True, learned=learned)
    world.publish([key_of("a")])
    world.settle()
    (above,), (below,) = world.store.policies.values(), world.ssd.shelf.policies.values()
    assert (above.statistics()["trusted"], below.statistics()["trusted"]) == (0, 1)
    assert world.store.learned().keys() == learned.keys()
    again = World(
        policy="phz", catalogue=world.catalogue, disk=world.disk, learned=world.store.learned()
    )
    (below,) = again.ssd.shelf.policies.values()
    assert below.statistics()["trusted"] == 1


def test_what_an_earlier_life_left_goes_from_the_ends_of_its_chains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.store.ssd.shelf.ADMIT_ROWS", 4)
    world = World(room=20, write_through=True)
    long, short = chain("long", 9), chain("short", 3)
    for keys in (long[:5], short, long[5:]):
        world.publish(keys, parent=long[4] if keys[0] == long[5] else b"")
        world.settle()
    again = World(catalogue=world.catalogue, disk=world.disk)
    shelf = again.ssd.shelf
    gone: list[bytes] = []
    while shelf.index.count:
        before = {shelf.index.key_bytes(row) for row in shelf.index.linked_rows().tolist()}
        assert shelf.evict(1) == 1
        gone += before - {shelf.index.key_bytes(row) for row in shelf.index.linked_rows().tolist()}
    assert [key for key in gone if key in long] == long[::-1]
    assert gone[:6] == long[:2:-1], "the deepest first"


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    operations=st.integers(0, 400),
    write_through=st.booleans(),
    policy=st.sampled_from(("lru", "s3fifo")),
)
def test_under_any_traffic_and_crash_every_pull_is_right_and_nothing_looks_damaged(
    seed: int, operations: int, write_through: bool, policy: str
) -> None:
    dice = random.Random(seed)
    world = World(segments=3, seed=seed, write_through=write_through, policy=policy)
    chains = [chain(str(name), 5) for name in range(8)]
    world.disk.faults.operations_left = operations
    with contextlib.suppress(Crash):
        for _ in range(60):
            keys = dice.choice(chains)
            action = dice.randrange(6)
            if action < 3:
                have = world.pull(keys[: dice.randrange(1, 6)])
                at = min(have, 4)
                world.publish(keys[at:], parent=keys[at - 1] if at else b"")
            elif action == 3:
                world.store.delete(world.session, world.known.id, dice.choice(keys))
            elif action == 4:
                match = world.match(keys)
                if match.lease:
                    world.store.load(world.session, match.lease, dice.randrange(6))
                    world.store.release(world.session, match.lease)
            world.ssd.turn()
            for _ in range(dice.randrange(8)):
                world.lanes.step()
            world.clock.now += dice.random()
            world.store.reap()
        world.check()
    again = world.after_crash()
    for keys in chains:
        again.pull(keys)
    assert again.tier.counters.corrupt_chunks == 0
    again.check()
