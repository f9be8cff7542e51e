"""The fake: faults come from the seed, time from the injected clock."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto.errors import InvalidError
from kvpool.transfer.base import Item, Region, Status
from kvpool.transfer.copying import Bytes
from kvpool.transfer.inproc import Faults, InprocEndpoint, InprocTransport

NBYTES = 1000


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class World:
    """An owner with faults and one registered region of numbered bytes."""

    def __init__(self, faults: Faults) -> None:
        self.clock = Clock()
        self.transport = InprocTransport(faults, self.clock, self.clock.sleep)
        self.memory = (np.arange(NBYTES) % 251).astype(np.uint8)
        self.region: Region = self.transport.register(self.memory)
        self.endpoint: InprocEndpoint = self.transport.connect(self.transport.descriptor())

    def items(self, count: int) -> list[Item]:
        return [Item(self.region.id, self.region.generation, 0, NBYTES)] * count

    def read(self, count: int) -> tuple[Sequence[Status], list[Bytes]]:
        buffers = [np.full(NBYTES, 255, np.uint8) for _ in range(count)]
        transfer = self.endpoint.read(self.items(count), buffers, 5.0)
        assert transfer.wait(5.0)
        return transfer.statuses, buffers


@given(st.integers(0, 1000))
def test_the_same_seed_gives_the_same_faults(seed: int) -> None:
    faults = Faults(seed, fail=0.2, short=0.2, corrupt=0.2, delay=0.2)
    runs = [World(faults).read(30) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    assert all(np.array_equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))


def test_another_kind_of_fault_leaves_the_others_where_they_were() -> None:
    alone, _ = World(Faults(3, fail=0.3)).read(50)
    both, _ = World(Faults(3, fail=0.3, short=0.5)).read(50)
    failed = [index for index, status in enumerate(alone) if status is Status.FAILED]
    assert failed
    assert failed == [index for index, status in enumerate(both) if status is Status.FAILED]


def test_a_failed_item_moves_nothing() -> None:
    statuses, buffers = World(Faults(fail=1.0)).read(3)
    assert set(statuses) == {Status.FAILED}
    assert all((buffer == 255).all() for buffer in buffers)


def test_a_short_item_moves_a_first_part() -> None:
    world = World(Faults(short=1.0))
    statuses, [buffer] = world.read(1)
    assert statuses == [Status.SHORT]
    moved = int((buffer != 255).sum())
    assert 0 < moved < NBYTES
    assert np.array_equal(buffer[:moved], world.memory[:moved])


def test_corruption_is_one_bit_that_no_status_tells() -> None:
    world = World(Faults(corrupt=1.0))
    statuses, buffers = world.read(20)
    assert set(statuses) == {Status.OK}
    for buffer in buffers:
        assert int(np.bitwise_count(buffer ^ world.memory).sum()) == 1


def test_a_corrupt_write_lands_in_the_region() -> None:
    world = World(Faults(corrupt=1.0))
    before = world.memory.copy()
    transfer = world.endpoint.write(world.items(1), [before], 1.0)
    assert list(transfer.statuses) == [Status.OK]
    assert int(np.bitwise_count(before ^ world.memory).sum()) == 1


def test_late_items_land_when_their_time_has_come() -> None:
    world = World(Faults(delay=1.0, delay_s=2.0))
    buffer = np.zeros(NBYTES, np.uint8)
    transfer = world.endpoint.read(world.items(1), [buffer], 5.0)
    assert not transfer.done()
    with pytest.raises(InvalidError):
        _ = transfer.statuses
    assert not transfer.wait(1.5)
    assert not buffer.any()
    assert transfer.wait(1.0)
    assert world.clock.now == pytest.approx(102.0)
    assert list(transfer.statuses) == [Status.OK]
    assert np.array_equal(buffer, world.memory)


def test_what_is_later_than_the_deadline_never_lands() -> None:
    world = World(Faults(delay=1.0, delay_s=2.0))
    buffer = np.zeros(NBYTES, np.uint8)
    transfer = world.endpoint.read(world.items(1), [buffer], 1.0)
    assert transfer.wait(10.0)
    assert world.clock.now == pytest.approx(101.0)
    world.clock.sleep(10)
    assert list(transfer.statuses) == [Status.DEADLINE]
    assert not buffer.any()


def test_a_cancelled_item_never_lands() -> None:
    world = World(Faults(delay=1.0, delay_s=2.0))
    buffer = np.zeros(NBYTES, np.uint8)
    cancelled = world.endpoint.read(world.items(1), [buffer], 5.0)
    cancelled.cancel()
    closed = world.endpoint.read(world.items(1), [buffer], 5.0)
    world.endpoint.close()
    world.clock.sleep(10)
    assert list(cancelled.statuses) == list(closed.statuses) == [Status.CANCELLED]
    assert not buffer.any()


def test_a_late_item_finds_its_region_gone() -> None:
    world = World(Faults(delay=1.0, delay_s=2.0))
    transfer = world.endpoint.read(world.items(1), [bytearray(NBYTES)], 5.0)
    world.transport.deregister(world.region)
    assert transfer.wait(5.0)
    assert list(transfer.statuses) == [Status.UNKNOWN_REGION]


def test_a_late_item_finds_its_owner_gone() -> None:
    world = World(Faults(delay=1.0, delay_s=2.0))
    peer = InprocTransport(clock=world.clock, sleep=world.clock.sleep)
    endpoint = peer.connect(world.transport.descriptor())
    transfer = endpoint.read(world.items(1), [bytearray(NBYTES)], 5.0)
    world.transport.close()
    assert transfer.wait(5.0)
    assert list(transfer.statuses) == [Status.UNREACHABLE]


def test_a_late_transfer_can_be_awaited() -> None:
    transport = InprocTransport(Faults(delay=1.0, delay_s=0.02))
    region = transport.register(np.ones(NBYTES, np.uint8))
    endpoint = transport.connect(transport.descriptor())
    buffer = bytearray(NBYTES)

    async def go() -> Sequence[Status]:
        items = [Item(region.id, region.generation, 0, NBYTES)]
        return await endpoint.read(items, [buffer], 5.0)

    assert list(asyncio.run(go())) == [Status.OK]
    assert buffer == b"\1" * NBYTES
    transport.close()


def test_read_only_memory_is_denied_to_writers() -> None:
    transport = InprocTransport()
    region = transport.register(bytes(NBYTES))
    endpoint = transport.connect(transport.descriptor())
    items = [Item(region.id, region.generation, 0, NBYTES)]
    assert list(endpoint.write(items, [bytes(NBYTES)], 1.0).statuses) == [Status.DENIED]
    assert list(endpoint.read(items, [bytearray(NBYTES)], 1.0).statuses) == [Status.OK]
