"""What every transport must do. Each backend passes the same class."""

import asyncio
import itertools
import json
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.proto.errors import ConfigError, InvalidError, ProtocolError, UnreachableError
from kvpool.transfer import TRANSPORTS, make_transport
from kvpool.transfer.base import Endpoint, EndpointState, Item, Region, Status, Transport
from kvpool.transfer.copying import PIECE, Bytes
from kvpool.transfer.shm import SharedMemory

LONG = 20.0
PAGE = mmap.PAGESIZE
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, PIECE - 1, PIECE, PIECE + 1]


def numbered(nbytes: int, start: int = 0) -> Bytes:
    """Words that count from `start`: a byte at the wrong place shows."""
    words = np.arange(start, start + nbytes // 4 + 1, dtype=np.uint32)
    return (words * np.uint32(2654435761)).view(np.uint8)[:nbytes]


@dataclass
class World:
    """An owner, its memory, and how a peer sees it."""

    owner: Transport
    peer: Transport
    allocate: Callable[[int], Bytes]
    """Memory that the owner can register."""

    def region(self, nbytes: int) -> tuple[Region, Bytes]:
        memory = self.allocate(nbytes)
        return self.owner.register(memory), memory

    def connect(self) -> Endpoint:
        return self.peer.connect(self.owner.descriptor())


def inproc_world(folder: Path, memory: SharedMemory) -> World:
    return World(make_transport("inproc"), make_transport("inproc"), zeros)


def tcp_world(folder: Path, memory: SharedMemory) -> World:
    return World(make_transport("tcp"), make_transport("tcp"), zeros)


def shm_world(folder: Path, memory: SharedMemory) -> World:
    owner = make_transport("shm", memory=memory, address=f"unix:{folder}/s", writable=True)
    return World(owner, make_transport("shm"), lambda n: memory.create_region(n).array)


def zeros(nbytes: int) -> Bytes:
    return np.zeros(nbytes, np.uint8)


WORLDS = {"inproc": inproc_world, "shm": shm_world, "tcp": tcp_world}


@pytest.fixture(params=TRANSPORTS)
def world(request: pytest.FixtureRequest, socket_folder: Path) -> Iterator[World]:
    with SharedMemory() as memory:
        made = WORLDS[request.param](socket_folder, memory)
        yield made
        made.peer.close()
        made.owner.close()


def item(region: Region, offset: int = 0, nbytes: int | None = None) -> Item:
    size = region.nbytes - offset if nbytes is None else nbytes
    return Item(region.id, region.generation, offset, size)


def read(endpoint: Endpoint, items: list[Item], buffers: list[Any]) -> list[Status]:
    transfer = endpoint.read(items, buffers, LONG)
    assert transfer.wait(LONG)
    return list(transfer.statuses)


def write(endpoint: Endpoint, items: list[Item], buffers: list[Any]) -> list[Status]:
    transfer = endpoint.write(items, buffers, LONG)
    assert transfer.wait(LONG)
    return list(transfer.statuses)


class TestConformance:
    def test_reads_fill_buffers_of_any_size_from_any_offset(self, world: World) -> None:
        region, memory = world.region(PIECE + 2 * PAGE)
        memory[:] = numbered(memory.size)
        endpoint = world.connect()
        for nbytes in SIZES:
            for offset in (0, 1, PAGE + 3):
                guarded = np.full(nbytes + 2, 0xEE, np.uint8)
                assert read(endpoint, [item(region, offset, nbytes)], [guarded[1:-1]]) == [0]
                assert np.array_equal(guarded[1:-1], memory[offset : offset + nbytes])
                assert guarded[0] == guarded[-1] == 0xEE

    def test_writes_land_at_any_offset_and_nowhere_else(self, world: World) -> None:
        region, memory = world.region(PIECE + 2 * PAGE)
        endpoint = world.connect()
        for nbytes in SIZES:
            for offset in (0, PAGE + 3):
                memory[:] = 0xEE
                source = numbered(nbytes, start=nbytes)
                assert write(endpoint, [item(region, offset, nbytes)], [source]) == [0]
                assert np.array_equal(memory[offset : offset + nbytes], source)
                assert (memory[:offset] == 0xEE).all()
                assert (memory[offset + nbytes :] == 0xEE).all()

    def test_a_region_can_be_used_to_its_last_byte(self, world: World) -> None:
        region, memory = world.region(PAGE + 1)
        memory[-1] = 9
        target = bytearray(1)
        endpoint = world.connect()
        assert read(endpoint, [item(region, PAGE)], [target]) == [Status.OK]
        assert target == b"\t"
        assert read(endpoint, [item(region, PAGE + 1)], [bytearray()]) == [Status.OK]

    def test_an_empty_batch_is_done(self, world: World) -> None:
        world.region(PAGE)
        assert read(world.connect(), [], []) == []

    def test_many_items_of_several_regions_in_one_batch(self, world: World) -> None:
        regions = [world.region(100 * PAGE) for _ in range(3)]
        for number, (_, memory) in enumerate(regions):
            memory[:] = numbered(memory.size, start=number << 20)
        endpoint = world.connect()
        items, expected = [], []
        for number in range(3000):
            region, memory = regions[number % 3]
            offset, nbytes = (number * 7919) % (99 * PAGE), (number * 31) % 500
            items.append(item(region, offset, nbytes))
            expected.append(memory[offset : offset + nbytes])
        buffers = [np.zeros(len(one), np.uint8) for one in expected]
        assert set(read(endpoint, items, buffers)) == {Status.OK}
        assert all(np.array_equal(*pair) for pair in zip(buffers, expected, strict=True))

    def test_large_batches_arrive_whole(self, world: World) -> None:
        region, memory = world.region(9 << 20)
        memory[:] = numbered(memory.size)
        cuts = [0, 5, 1 << 20, (7 << 20) + 1, 9 << 20]
        items = [item(region, a, b - a) for a, b in itertools.pairwise(cuts)]
        target = np.zeros_like(memory)
        buffers = [target[a:b] for a, b in itertools.pairwise(cuts)]
        endpoint = world.connect()
        assert set(read(endpoint, items, buffers)) == {Status.OK}
        assert np.array_equal(target, memory)
        target[:] = numbered(target.size, start=77)
        assert set(write(endpoint, items, buffers)) == {Status.OK}
        assert np.array_equal(target, memory)

    @pytest.mark.parametrize("operation", [read, write])
    def test_a_failing_item_never_taints_the_others(self, world: World, operation: Any) -> None:
        region, memory = world.region(8 << 20)
        memory[:] = numbered(memory.size)
        before = memory.copy()
        good = item(region, 64, 3 << 20)
        bad = [
            (good._replace(generation=region.generation + 1), Status.STALE),
            (good._replace(generation=-1), Status.STALE),
            (good._replace(region=region.id + 7), Status.UNKNOWN_REGION),
            (good._replace(region=1 << 40), Status.UNKNOWN_REGION),
            (good._replace(offset=6 << 20), Status.OUT_OF_RANGE),
            (good._replace(offset=-64), Status.OUT_OF_RANGE),
            (good._replace(offset=(1 << 64) - 1), Status.OUT_OF_RANGE),
            (good._replace(offset=1 << 70), Status.OUT_OF_RANGE),
            (good._replace(nbytes=good.nbytes - 1), Status.LENGTH),
            (good._replace(nbytes=-1), Status.LENGTH),
        ]
        items, expected = [good], [Status.OK]
        for wrong, status in bad:
            items += [wrong, good]
            expected += [status, Status.OK]
        same = before[64 : 64 + good.nbytes]
        buffers = [same.copy() if operation is write else np.zeros_like(same) for _ in items]
        assert operation(world.connect(), items, buffers) == expected
        for buffer, status in zip(buffers, expected, strict=True):
            assert status is not Status.OK or np.array_equal(buffer, same)
        assert np.array_equal(memory, before)

    def test_memory_that_is_registered_anew_refuses_old_items(self, world: World) -> None:
        region, _ = world.region(PAGE)
        world.owner.deregister(region)
        again, _ = world.region(PAGE)
        assert again.id == region.id
        endpoint = world.connect()
        assert read(endpoint, [item(region)], [bytearray(PAGE)]) == [Status.STALE]
        assert read(endpoint, [item(again)], [bytearray(PAGE)]) == [Status.OK]
        with pytest.raises(InvalidError):
            world.owner.deregister(region)

    def test_a_batch_that_is_wrong_is_refused_before_any_byte_moves(self, world: World) -> None:
        region, memory = world.region(PAGE)
        memory[:] = 1
        endpoint = world.connect()
        one, fine = item(region), np.zeros(PAGE, np.uint8)
        for bad in (bytes(PAGE), np.zeros((PAGE, 2), np.uint8)[:, 0], "text"):
            with pytest.raises(InvalidError):
                endpoint.read([one, one], [fine, bad], LONG)
        with pytest.raises(InvalidError):
            endpoint.read([one], [], LONG)
        many = world.owner.capabilities().max_batch + 1
        with pytest.raises(InvalidError):
            endpoint.read([one] * many, [fine] * many, LONG)
        assert not fine.any()
        assert write(endpoint, [one], [bytes(PAGE)]) == [Status.OK]

    @pytest.mark.parametrize("deadline", [0.0, -1.0])
    def test_no_time_left_is_a_status(self, world: World, deadline: float) -> None:
        region, _ = world.region(PAGE)
        transfer = world.connect().read([item(region)] * 2, [bytearray(PAGE)] * 2, deadline)
        assert transfer.wait(LONG)
        assert list(transfer.statuses) == [Status.DEADLINE] * 2

    def test_transfers_can_be_awaited(self, world: World) -> None:
        region, memory = world.region(PAGE)
        memory[:] = 3
        endpoint = world.connect()
        target = bytearray(PAGE)

        async def go() -> list[Status]:
            return list(await endpoint.read([item(region)], [target], LONG))

        assert asyncio.run(go()) == [Status.OK]
        assert target == b"\3" * PAGE

    def test_cancelling_what_is_done_changes_nothing(self, world: World) -> None:
        region, _ = world.region(PAGE)
        transfer = world.connect().read([item(region)], [bytearray(PAGE)], LONG)
        assert transfer.wait(LONG)
        transfer.cancel()
        assert transfer.done()
        assert list(transfer.statuses) == [Status.OK]

    def test_after_cancel_nothing_lands(self, world: World) -> None:
        region, memory = world.region(32 << 20)
        memory[:] = 1
        endpoint = world.connect()
        target = np.zeros(memory.size, np.uint8)
        transfer = endpoint.read([item(region)], [target], LONG)
        transfer.cancel()
        assert transfer.done()
        after = target.copy()
        assert transfer.statuses[0] in (Status.OK, Status.CANCELLED)
        if transfer.statuses[0] is Status.OK:
            assert target.all()
        assert read(endpoint, [item(region, 0, 100)], [bytearray(100)]) == [Status.OK]
        assert np.array_equal(target, after)

    def test_close_while_in_flight_ends_everything(self, world: World) -> None:
        region, memory = world.region(8 << 20)
        memory[:] = numbered(memory.size)
        endpoint = world.connect()
        started = threading.Barrier(3)
        seen: list[Status] = []

        def work() -> None:
            target = np.zeros(memory.size, np.uint8)
            halves = [target[: 4 << 20], target[4 << 20 :]]
            items = [item(region, 0, 4 << 20), item(region, 4 << 20)]
            started.wait()
            while True:
                target[:] = 0
                try:
                    transfer = endpoint.read(items, halves, LONG)
                except UnreachableError:
                    return
                assert transfer.wait(LONG)
                seen.extend(transfer.statuses)
                for one, half, status in zip(items, halves, transfer.statuses, strict=True):
                    whole = np.array_equal(half, memory[one.offset :][: one.nbytes])
                    assert whole or status is not Status.OK

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        endpoint.close()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
        assert set(seen) <= {Status.OK, Status.CANCELLED, Status.UNREACHABLE}

    def test_a_closed_endpoint_says_so(self, world: World) -> None:
        region, _ = world.region(PAGE)
        endpoint = world.connect()
        states = [endpoint.state]
        endpoint.close()
        endpoint.close()
        states.append(endpoint.state)
        assert states == [EndpointState.OPEN, EndpointState.CLOSED]
        with pytest.raises(UnreachableError):
            endpoint.read([item(region)], [bytearray(PAGE)], LONG)

    def test_endpoints_can_be_used_by_many_threads(self, world: World) -> None:
        region, memory = world.region(1 << 20)
        memory[:] = numbered(memory.size)
        endpoint = world.connect()
        wrong: list[int] = []

        def work(seed: int) -> None:
            for number in range(20):
                offset, nbytes = (seed * 4099 + number * 8191) % 500_000, 300_000
                target = np.zeros(nbytes, np.uint8)
                if read(endpoint, [item(region, offset, nbytes)], [target]) != [Status.OK]:
                    wrong.append(number)
                if not np.array_equal(target, memory[offset : offset + nbytes]):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_costs_are_assumed_and_then_measured(self, world: World) -> None:
        region, _ = world.region(1 << 20)
        endpoint = world.connect()
        assert endpoint.estimate(1 << 20).basis == "assumed"
        for _ in range(3):
            read(endpoint, [item(region)], [np.zeros(1 << 20, np.uint8)])
        small, large = endpoint.estimate(1), endpoint.estimate(1 << 30)
        assert small.basis == large.basis == "measured"
        assert 0 < small.seconds < large.seconds
        assert small.cpu_seconds < large.cpu_seconds

    @pytest.mark.parametrize("foreign", [b"", b"\xff", b"[]", b"{}", b'{"transport": "other"}'])
    def test_foreign_descriptors_are_refused(self, world: World, foreign: bytes) -> None:
        with pytest.raises(ProtocolError):
            world.peer.connect(foreign)
        incomplete = b'{"transport": "%s"}' % world.peer.name.encode()
        with pytest.raises(ProtocolError):
            world.peer.connect(incomplete)

    def test_a_dead_owner_is_unreachable(self, world: World) -> None:
        world.region(PAGE)
        descriptor = world.owner.descriptor()
        world.owner.close()
        world.owner.close()
        with pytest.raises(UnreachableError):
            world.peer.connect(descriptor)


def test_an_unknown_transport_is_named() -> None:
    with pytest.raises(ConfigError, match="'rdma'"):
        make_transport("rdma")


FORK = """
    import os, sys, warnings
    import numpy as np
    from kvpool.proto.errors import KvpoolError
    from kvpool.transfer import make_transport
    from kvpool.transfer.base import Item
    from kvpool.transfer.shm import SharedMemory

    warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: on purpose
    name, folder = sys.argv[1:]
    memory = SharedMemory()
    if name == "shm":
        owner = make_transport("shm", memory=memory, address=f"unix:{folder}/s")
        array = memory.create_region(100).array
    else:
        owner, array = make_transport(name), np.zeros(100, np.uint8)
    region = owner.register(array)
    peer = make_transport(name)
    endpoint = peer.connect(owner.descriptor())
    items = [Item(region.id, region.generation, 0, 100)]
    pid = os.fork()
    if not pid:
        try:
            endpoint.read(items, [bytearray(100)], 5)
        except KvpoolError as error:
            print(type(error).__name__, flush=True)
        endpoint.close()
        peer.close()
        owner.close()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for user in (endpoint, peer.connect(owner.descriptor())):
        transfer = user.read(items, [bytearray(100)], 5)
        assert transfer.wait(5)
        print(transfer.statuses[0].name)
    peer.close()
    owner.close()
    """


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_fork_child_is_refused_and_disturbs_nothing(
    spawn: Any, socket_folder: Path, name: str
) -> None:
    process = spawn(FORK, name, str(socket_folder))
    output, _ = process.communicate(timeout=LONG)
    assert output.split() == ["StaleError", "0", "OK", "OK"]


OWNER = """
    import json, sys
    import numpy as np
    from kvpool.transfer import make_transport
    from kvpool.transfer.shm import SharedMemory

    name, folder = sys.argv[1:]
    memory = SharedMemory()
    if name == "shm":
        transport = make_transport("shm", memory=memory, address=f"unix:{folder}/s", writable=True)
        array = memory.create_region(5 << 20).array
    else:
        transport, array = make_transport(name), np.zeros(5 << 20, np.uint8)
    array[:] = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)[: 5 << 20]
    region = transport.register(array)
    print(json.dumps([transport.descriptor().decode(), region.id, region.generation]), flush=True)
    for line in sys.stdin:
        print(array[int(line)], flush=True)
    """


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_two_processes_share_bytes(spawn: Any, socket_folder: Path, name: str) -> None:
    owner = spawn(OWNER, name, str(socket_folder))
    descriptor, id, generation = json.loads(owner.stdout.readline())
    transport = make_transport(name)
    endpoint = transport.connect(descriptor.encode())
    target = np.zeros(5 << 20, np.uint8)
    whole = Item(id, generation, 0, target.size)
    assert read(endpoint, [whole], [target]) == [Status.OK]
    assert np.array_equal(target, np.arange(5 << 20, dtype=np.uint32).view(np.uint8)[: target.size])
    assert write(endpoint, [Item(id, generation, 12345, 3)], [b"\1\2\3"]) == [Status.OK]
    for offset, value in ((12345, 1), (12347, 3)):
        owner.stdin.write(f"{offset}\n")
        owner.stdin.flush()
        assert int(owner.stdout.readline()) == value
    owner.kill()
    owner.wait()
    [status] = read(endpoint, [whole], [target])
    assert status is (Status.OK if name == "shm" else Status.UNREACHABLE)
    transport.close()
