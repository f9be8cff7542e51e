"""Chunks of a chain reach the disk in any order; each is written once and none is lost."""

from __future__ import annotations

from tests.ssd.samples import key_of
from tests.ssd.world import World, chain


def test_a_chain_is_written_once_whatever_order_its_chunks_are_announced_in() -> None:
    for seed in range(40):
        world = World(room=30, write_through=True, seed=seed)
        world.publish(chain("a", 12))
        world.settle()
        counters = world.tier.counters
        assert (counters.written_chunks, counters.deleted_chunks) == (12, 0), f"seed {seed}"
        world.check()


def test_a_long_chain_is_begun_chunk_by_chunk_from_its_start() -> None:
    world = World(room=16, write_through=False)
    keys = chain("a", 16)
    world.publish(keys)  # what is next to go is its end
    demotion = world.ssd.demotion
    world.ssd.turn()
    assert demotion.chunks == 1 and demotion.waiting
    assert demotion.advance() is bool(demotion.waiting)
    assert demotion.chunks == 2
    world.lanes.run()
    index = world.ssd.shelf.index
    assert index.find(world.known.id, b"".join(keys[:2])).rows.min() >= 0
    world.settle()
    assert world.tier.counters.written_chunks == 16
    world.check()


def test_what_waits_below_a_chunk_that_is_deleted_leaves_with_it() -> None:
    for seed in range(40):
        world = World(room=30, write_through=True, seed=seed)
        keys = chain("a", 8)
        world.publish(keys)
        world.ssd.turn()
        for _ in range(seed):
            world.lanes.step()
        world.store.delete(world.session, world.known.id, keys[seed % 8])
        world.settle()
        match = world.match(keys, peek=True)
        assert match.hits == seed % 8 and match.cold == 0
        world.publish([key_of("b")])
        world.check()
