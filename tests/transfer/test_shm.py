"""Shared memory: rights, lifetimes, forks and deaths, with real processes."""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.proto.errors import (
    DeadlineError,
    InvalidError,
    KvpoolError,
    ProtocolError,
    StaleError,
    UnreachableError,
)
from kvpool.transfer.base import Item, Region, Status, encode_descriptor
from kvpool.transfer.paging import HUGE
from kvpool.transfer.shm import (
    MappedRegion,
    PassedRegion,
    SharedMemory,
    SharedRegion,
    ShmEndpoint,
    ShmTransport,
    map_regions,
    receive_descriptors,
    send_descriptors,
)

LONG = 20.0
SHORT = 0.03
PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory() as memory:
        yield memory


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == before


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_regions() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvpool")


def passed(shared: SharedRegion, writable: bool = False) -> PassedRegion:
    return PassedRegion(shared.region, shared.descriptor(writable), writable)


def opened(shared: SharedRegion, writable: bool = False) -> MappedRegion:
    return map_regions([passed(shared, writable)])[0]


def whole(region: Region) -> Item:
    return Item(region.id, region.generation, 0, region.nbytes)


def test_a_reader_sees_what_the_owner_writes(memory: SharedMemory) -> None:
    shared = memory.create_region(2 * PAGE)
    mapped = opened(shared)
    shared.array[PAGE:] = 7
    assert mapped.view(PAGE - 1, 2).tobytes() == b"\0\x07"
    mapped.close()


def test_a_writer_is_seen_by_the_owner(memory: SharedMemory) -> None:
    shared = memory.create_region(PAGE)
    mapped = opened(shared, writable=True)
    mapped.view(3, 2)[:] = 9
    assert shared.array[2:6].tolist() == [0, 9, 9, 0]
    mapped.close()


def test_a_reader_can_neither_write_nor_map_for_writing(memory: SharedMemory) -> None:
    shared = memory.create_region(PAGE)
    fd = shared.descriptor(writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    with pytest.raises(InvalidError, match="cannot map"):
        MappedRegion(shared.region, os.dup(fd), writable=True)
    mapped = MappedRegion(shared.region, fd, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        mapped.view()[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        mapped.view().flags.writeable = True
    mapped.close()


def test_nobody_can_resize_a_region(memory: SharedMemory) -> None:
    fd = memory.create_region(PAGE).descriptor(writable=True)
    for nbytes in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    os.close(fd)


def test_a_descriptor_without_seals_or_of_other_size_is_refused(memory: SharedMemory) -> None:
    loose = os.memfd_create("loose")
    os.ftruncate(loose, PAGE)
    with pytest.raises(ProtocolError, match="sealed"):
        MappedRegion(Region(0, 1, PAGE), loose, writable=False)
    pipe, other = os.pipe()
    os.close(other)
    with pytest.raises(ProtocolError, match="sealed"):
        MappedRegion(Region(0, 1, PAGE), pipe, writable=False)
    shared = memory.create_region(PAGE)
    with pytest.raises(ProtocolError, match="should have"):
        MappedRegion(Region(0, 1, 2 * PAGE), shared.descriptor(False), writable=False)


def test_populate_takes_memory_step_by_step_and_keeps_content(memory: SharedMemory) -> None:
    nbytes = 10 * PAGE + 1
    shared = memory.create_region(nbytes)
    shared.array[5 * PAGE] = 3
    fd = shared.descriptor(writable=False)
    taken = [os.fstat(fd).st_blocks * 512]
    done = []
    for bytes_done in shared.populate(4 * PAGE - 5):
        done.append(bytes_done)
        taken.append(os.fstat(fd).st_blocks * 512)
    os.close(fd)
    assert done == [4 * PAGE, 8 * PAGE, nbytes]
    assert taken == sorted(taken)
    assert taken[-1] == 11 * PAGE
    assert taken[1] < taken[-1]
    assert shared.array[5 * PAGE] == 3


def test_populate_works_on_kernels_that_cannot_prefault(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = memory.create_region(3 * PAGE)
    monkeypatch.setattr("kvpool.transfer.paging._MADV_POPULATE_WRITE", 9999)
    assert list(shared.populate(2 * PAGE)) == [2 * PAGE, 3 * PAGE]
    fd = shared.descriptor(writable=False)
    assert os.fstat(fd).st_blocks * 512 == 3 * PAGE
    os.close(fd)


def faults(work: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def kernel_has_huge_pages() -> bool:
    """Those that a program may ask for: since Linux 6.1, unless they are denied."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def test_maps_begin_where_huge_pages_do(memory: SharedMemory) -> None:
    shared = memory.create_region(2 * HUGE + PAGE + 1)
    mapped = opened(shared)
    for view in (shared.array, mapped.view()):
        assert view.ctypes.data % HUGE == 0
    shared.array[-1] = 7
    assert mapped.view()[-1] == 7


def test_what_was_populated_costs_a_peer_hardly_a_fault(memory: SharedMemory) -> None:
    shared = memory.create_region(3 * HUGE + 3 * PAGE)
    shared.array[HUGE + 5 * PAGE] = 3
    assert list(shared.populate(2 * HUGE))[-1] == shared.region.nbytes
    fd = shared.descriptor(writable=False)
    assert os.fstat(fd).st_blocks * 512 == shared.region.nbytes
    os.close(fd)
    assert shared.array[HUGE + 5 * PAGE] == 3
    assert shared.array.sum(dtype=np.int64) == 3
    view = opened(shared, writable=True).view()
    most = 20 if kernel_has_huge_pages() else 3 * 512 + 20
    assert faults(lambda: view.fill(1)) < most


def test_an_id_that_is_used_again_has_a_new_generation(memory: SharedMemory) -> None:
    first, second = memory.create_region(PAGE).region, memory.create_region(PAGE).region
    assert (first.id, second.id) == (0, 1)
    memory.drop_region(first)
    again = memory.create_region(PAGE).region
    assert again.id == first.id
    assert again.generation > first.generation
    with pytest.raises(InvalidError):
        memory.drop_region(first)


def test_views_outlive_whatever_is_closed(memory: SharedMemory) -> None:
    before = mapped_regions()
    shared = memory.create_region(PAGE)
    shared.array[:] = 5
    endpoint = ShmEndpoint([opened(shared)])
    borrowed = endpoint.borrow(whole(shared.region))
    own = shared.array
    endpoint.close()
    endpoint.close()
    memory.close()
    assert borrowed.tobytes() == own.tobytes() == b"\5" * PAGE
    assert not borrowed.flags.writeable
    assert mapped_regions() == before + 2
    del borrowed, own
    assert mapped_regions() == before


def test_what_is_closed_says_so(memory: SharedMemory) -> None:
    shared = memory.create_region(PAGE)
    mapped = opened(shared)
    endpoint = ShmEndpoint([mapped])
    endpoint.close()
    shared.close()
    calls: list[Callable[[], object]] = [
        lambda: shared.array,
        lambda: shared.descriptor(False),
        lambda: list(shared.populate(PAGE)),
        mapped.view,
    ]
    for call in calls:
        with pytest.raises(StaleError, match="closed"):
            call()
    with pytest.raises(UnreachableError, match="closed"):
        endpoint.read([], [], LONG)


def test_views_out_of_range_are_refused(memory: SharedMemory) -> None:
    mapped = opened(memory.create_region(PAGE))
    for offset, nbytes in ((-1, 2), (0, PAGE + 1), (PAGE, 1), (2, -1), (PAGE + 1, None)):
        with pytest.raises(InvalidError):
            mapped.view(offset, nbytes)
    mapped.close()


def test_a_borrowed_item_is_checked(memory: SharedMemory) -> None:
    region = memory.create_region(PAGE).region
    endpoint = ShmEndpoint([opened(memory.regions[0], writable=True)])
    assert not endpoint.borrow(whole(region)).flags.writeable
    with pytest.raises(StaleError):
        endpoint.borrow(Item(region.id, region.generation + 1, 0, 1))
    with pytest.raises(StaleError):
        endpoint.borrow(Item(region.id + 1, region.generation, 0, 1))
    with pytest.raises(InvalidError):
        endpoint.borrow(Item(region.id, region.generation, 1, PAGE))
    endpoint.close()


def test_an_endpoint_takes_regions_that_come_later(memory: SharedMemory) -> None:
    first = memory.create_region(PAGE)
    endpoint = ShmEndpoint([opened(first)])
    memory.drop_region(first.region)
    again = memory.create_region(PAGE)
    again.array[:] = 2
    endpoint.add([opened(again)])
    target = bytearray(PAGE)
    assert endpoint.read([whole(again.region)], [target], LONG).statuses == [Status.OK]
    assert endpoint.read([whole(first.region)], [target], LONG).statuses == [Status.STALE]
    assert target == b"\2" * PAGE
    endpoint.close()


def test_close_waits_for_the_copy_of_another_thread(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = memory.create_region(PAGE)
    endpoint = ShmEndpoint([opened(shared)])
    copying, resume, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(target: Any, source: Any) -> None:
        copying.set()
        resume.wait(LONG)

    def close() -> None:
        endpoint.close()
        closed.set()

    monkeypatch.setattr("kvpool.transfer.shm.move", slow)
    statuses: list[Status] = []
    items = [whole(shared.region)] * 2
    reader = threading.Thread(
        target=lambda: statuses.extend(
            endpoint.read(items, [bytearray(PAGE) for _ in items], LONG).statuses
        )
    )
    closer = threading.Thread(target=close)
    reader.start()
    assert copying.wait(LONG)
    closer.start()
    assert not closed.wait(SHORT)
    resume.set()
    reader.join()
    closer.join()
    assert statuses == [Status.OK, Status.CANCELLED]


def test_a_read_only_endpoint_denies_writes(memory: SharedMemory) -> None:
    shared = memory.create_region(PAGE)
    endpoint = ShmEndpoint([opened(shared)])
    assert endpoint.write([whole(shared.region)], [bytes(PAGE)], LONG).statuses == [Status.DENIED]
    endpoint.close()


@pytest.mark.parametrize("count", [0, 1, 250, 251, 300])
def test_descriptors_pass_a_socket(
    memory: SharedMemory, pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    left, right = pair
    for number in range(count):
        memory.create_region(PAGE + number).array[0] = number % 256
    thread = threading.Thread(target=send_descriptors, args=(left, memory.regions, False, LONG))
    thread.start()
    received = receive_descriptors(right, LONG)
    thread.join()
    left.sendall(b"next")
    assert right.recv(100) == b"next"
    assert [one.region for one in received] == [shared.region for shared in memory.regions]
    for number, mapped in enumerate(map_regions(received)):
        assert mapped.view(0, 1)[0] == number % 256
        mapped.close()


def message(
    count: int, later: int = 0, magic: bytes = b"KVFD", version: int = 1, writable: int = 0
) -> bytes:
    header = struct.pack(">4sBBHI", magic, version, writable, count, later)
    return header + b"".join(struct.pack(">IQQ", n, 1, PAGE) for n in range(count))


@pytest.mark.parametrize(
    ("data", "fds"),
    [
        (b"", 0),
        (b"KVF", 0),
        (message(1)[:-1], 1),
        (message(1), 0),
        (message(1), 2),
        (message(2), 1),
        (message(1, magic=b"HTTP"), 1),
        (message(1, version=2), 1),
        (message(1, writable=2), 1),
        (message(1, later=1), 1),
        (message(0, later=1), 0),
        (message(1, later=1 << 31), 1),
    ],
)
def test_other_messages_are_refused_and_leave_no_descriptor(
    memory: SharedMemory, pair: tuple[socket.socket, socket.socket], data: bytes, fds: int
) -> None:
    left, right = pair
    shared = memory.create_region(PAGE)
    descriptors = [shared.descriptor(False) for _ in range(fds)]
    if data:
        socket.send_fds(left, [data], descriptors)
    for fd in descriptors:
        os.close(fd)
    left.shutdown(socket.SHUT_WR)
    before = open_descriptors()
    with pytest.raises(ProtocolError):
        receive_descriptors(right, LONG)
    assert open_descriptors() == before


def test_the_limit_of_open_files_is_named(
    memory: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    for _ in range(3):
        memory.create_region(PAGE)
    send_descriptors(left, memory.regions, False, LONG)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        with pytest.raises(ProtocolError, match="limit of open files"):
            receive_descriptors(right, LONG)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_passing_descriptors_ends_at_the_deadline(
    memory: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    left, right = pair
    with pytest.raises(DeadlineError):
        receive_descriptors(right, SHORT)
    left.sendall(b"KVFD")
    with pytest.raises(DeadlineError):
        receive_descriptors(right, SHORT)
    assert right.gettimeout() is None
    memory.create_region(PAGE)
    left.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            left.send(bytes(1 << 16))
    left.setblocking(True)
    with pytest.raises(DeadlineError):
        send_descriptors(left, memory.regions, False, SHORT)


def test_sending_to_a_closed_peer_is_unreachable(
    memory: SharedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    memory.create_region(PAGE)
    pair[1].close()
    with pytest.raises(UnreachableError):
        send_descriptors(pair[0], memory.regions, False, LONG)


def test_a_failed_map_takes_the_others_with_it(memory: SharedMemory) -> None:
    before = mapped_regions()
    good, bad = memory.create_region(PAGE), memory.create_region(PAGE)
    wrong = passed(bad)._replace(region=Region(1, 1, 2 * PAGE))
    with pytest.raises(KvpoolError):
        map_regions([passed(good), wrong, passed(good)])
    assert mapped_regions() == before + 2


FORK = """
    import gc, os, socket, sys
    from kvpool.proto.errors import StaleError
    from kvpool.transfer.base import Item
    from kvpool.transfer.shm import *

    memory = SharedMemory()
    shared = memory.create_region(1 << 20)
    shared.array[:] = 1
    def opened():
        return map_regions([PassedRegion(shared.region, shared.descriptor(False), False)])
    mapped = opened()
    endpoint = ShmEndpoint(mapped)
    kept = endpoint.borrow(Item(0, 1, 0, 100))
    def child(work):
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        work()
        sys.stdout.flush()
        os._exit(0)
    """


def run(spawn: Any, source: str) -> list[str]:
    process = spawn(FORK + source)
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0
    return str(output).split()


def test_a_fork_child_has_neither_maps_nor_descriptors_but_lives(spawn: Any) -> None:
    source = """
    def work():
        for call in (lambda: shared.array, mapped[0].view, lambda: shared.descriptor(False),
                     lambda: endpoint.read([Item(0, 1, 0, 9)], [bytearray(9)], 1)):
            try:
                call()
                print("usable")
            except StaleError as error:
                print("refused" if "fork" in str(error) else error)
        text = open("/proc/self/maps").read()
        print("mapped" if "memfd:kvpool" in text else "unmapped")
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{fd}")]
        print("held" if any("memfd" in link for link in links) else "free")
    print(child(work), int(shared.array[0]), int(kept[0]))
    """
    assert run(spawn, source) == [*["refused"] * 4, "unmapped", "free", "0", "1", "1"]


def test_an_old_region_never_unmaps_what_a_fork_child_has_at_its_address(spawn: Any) -> None:
    """A hook that runs first can fill the addresses that were not inherited. The destructor of the
    old map must leave them alone, or the child crashes far away from the cause."""
    source = """
    def work():
        global shared, mapped, endpoint, kept
        del shared, mapped, endpoint, kept
        memory.close()
        gc.collect()
        for one in fresh:
            one[:] = bytes(1 << 20)
        print("alive", len(fresh))
    print(child(work))
    """
    hook = """
    import mmap, os
    fresh = []
    def fill():
        fresh.extend(mmap.mmap(-1, 1 << 20) for _ in range(50))
    os.register_at_fork(after_in_child=fill)
    """
    process = spawn(hook + FORK + source)
    output, _ = process.communicate(timeout=LONG)
    assert output.split() == ["alive", "50", "0"]


def test_a_view_kept_across_a_fork_faults_and_never_shows_other_memory(spawn: Any) -> None:
    source = """
    import mmap, faulthandler
    def work():
        fresh = [mmap.mmap(-1, 1 << 20) for _ in range(50)]
        for one in fresh:
            one[:] = b"x" * (1 << 20)
        print(bytes(kept))
    print(child(work))
    """
    assert run(spawn, source) == [str(-signal.SIGSEGV)]


def test_a_fork_child_can_open_regions_of_its_own(spawn: Any) -> None:
    source = """
    def work():
        with SharedMemory() as own:
            own.create_region(4096).array[:] = 3
            print(own.regions[0].array.sum())
        def grandchild():
            print("nothing left")
        print(child(grandchild))
    print(child(work))
    """
    assert run(spawn, source) == [str(3 * 4096), "nothing", "left", "0", "0"]


OWNER = """
    import os, sys
    from kvpool.transfer.shm import *
    memory = SharedMemory()
    memory.create_region(1 << 20).array[:] = 7
    transport = ShmTransport(memory, sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        print(len(os.listdir("/proc/self/fd")), flush=True)
    """

READER = """
    import sys
    from kvpool.transfer.base import encode_descriptor
    from kvpool.transfer.shm import *
    endpoint = ShmTransport().connect(encode_descriptor("shm", address=sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.read()
    """


def started(spawn: Any, source: str, address: str) -> Any:
    process = spawn(source, address)
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_killed_owner_leaves_its_readers_their_maps_and_nothing_else(
    spawn: Any, socket_folder: Path
) -> None:
    shm_before = os.listdir("/dev/shm")
    address = f"unix:{socket_folder}/s"
    owner = started(spawn, OWNER, address)
    transport = ShmTransport()
    endpoint = transport.connect(encode_descriptor("shm", address=address))
    owner.kill()
    owner.wait()
    target = bytearray(1 << 20)
    assert endpoint.read([Item(0, 1, 0, 1 << 20)], [target], LONG).statuses == [Status.OK]
    assert target == b"\7" * (1 << 20)
    with pytest.raises(UnreachableError):
        transport.connect(encode_descriptor("shm", address=address))
    transport.close()
    assert os.listdir("/dev/shm") == shm_before
    started(spawn, OWNER, address)


def test_a_killed_reader_leaves_nothing_with_the_owner(spawn: Any, socket_folder: Path) -> None:
    shm_before = os.listdir("/dev/shm")
    address = f"unix:{socket_folder}/s"
    owner = started(spawn, OWNER, address)

    def descriptors_of_owner() -> int:
        owner.stdin.write("\n")
        owner.stdin.flush()
        return int(owner.stdout.readline())

    before = descriptors_of_owner()
    for _ in range(3):
        reader = started(spawn, READER, address)
        reader.kill()
        reader.wait()
    transport = ShmTransport()
    endpoint = transport.connect(encode_descriptor("shm", address=address))
    assert endpoint.borrow(Item(0, 1, 0, 1))[0] == 7
    transport.close()
    # The owner may still be closing the connection that has just been served.
    end = time.monotonic() + LONG
    while descriptors_of_owner() != before:
        assert time.monotonic() < end
    assert os.listdir("/dev/shm") == shm_before


def test_a_transport_registers_only_its_own_memory(memory: SharedMemory) -> None:
    shared = memory.create_region(PAGE)
    transport = ShmTransport(memory)
    assert transport.register(shared.array) == shared.region
    with pytest.raises(InvalidError):
        transport.register(shared.array[1:])
    with pytest.raises(InvalidError):
        transport.register(bytearray(PAGE))
    with pytest.raises(InvalidError):
        transport.descriptor()
    transport.close()
