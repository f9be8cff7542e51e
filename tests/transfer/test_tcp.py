"""Peers that stall, lie, close halfway or die cost their deadline and never bring wrong bytes."""

import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.proto import frames
from kvpool.proto.errors import DeniedError, ProtocolError, UnreachableError
from kvpool.transfer.base import EndpointState, Item, Region, Status, encode_descriptor
from kvpool.transfer.copying import Bytes
from kvpool.transfer.sockets import address_of, listen
from kvpool.transfer.stream import Stream, dial
from kvpool.transfer.tcp import TWO_FROM, TcpEndpoint, TcpTransport

LONG = 20.0
SHORT = 0.05
NBYTES = 10_000
OK = bytes([Status.OK])


def numbered(nbytes: int) -> Bytes:
    return (np.arange(nbytes) % 251).astype(np.uint8)


def whole(region: Region) -> Item:
    return Item(region.id, region.generation, 0, region.nbytes)


@pytest.fixture
def owner() -> Iterator[TcpTransport]:
    transport = TcpTransport()
    yield transport
    transport.close()


class FakeOwner:
    """Welcomes peers and then answers each request as told."""

    def __init__(self, answer: Callable[[Stream, bytes], None]) -> None:
        self._listener = listen("tcp://127.0.0.1:0")
        self._streams: list[Stream] = []
        self._threads: list[threading.Thread] = []
        self._answer = answer
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()
        self.transport = TcpTransport()
        descriptor = encode_descriptor(
            "tcp", address=address_of(self._listener), token=bytes(16).hex()
        )
        self.endpoint = self.transport.connect(descriptor)

    def _accept(self) -> None:
        while True:
            try:
                stream = Stream(self._listener.accept()[0])
            except OSError:
                return
            self._streams.append(stream)
            self._threads.append(threading.Thread(target=self._serve, args=(stream,)))
            self._threads[-1].start()

    def _serve(self, stream: Stream) -> None:
        try:
            stream.receive(deadline=LONG)
            stream.send(b"\0", deadline=LONG)
            while True:
                self._answer(stream, stream.receive(deadline=LONG))
        except UnreachableError:
            return

    def __enter__(self) -> TcpEndpoint:
        return self.endpoint

    def __exit__(self, *_: object) -> None:
        self.transport.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for stream, thread in zip(self._streams, self._threads, strict=True):
            stream.abort()
            thread.join()
            stream.close()


def raw(stream: Stream, data: bytes) -> None:
    stream.sock.sendall(data)


Step = Callable[[Stream], None]


def sending(body: bytes, payload: int = 0) -> Step:
    return lambda stream: stream.send(body, [bytes(payload)], deadline=LONG)


def half_close(stream: Stream) -> None:
    stream.sock.shutdown(socket.SHUT_WR)


def reset(stream: Stream) -> None:
    linger = struct.pack("ii", 1, 0)
    stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    stream.close()


ANSWERS: dict[str, tuple[list[Step], Status]] = {
    "stalled": ([], Status.DEADLINE),
    "stalled within the frame": ([lambda stream: raw(stream, b"\0\0")], Status.DEADLINE),
    "stalled within the bytes": ([sending(OK, 100)], Status.DEADLINE),
    "all bytes but no verdict": ([sending(OK, NBYTES)], Status.DEADLINE),
    "closed halfway": ([sending(OK, 100), half_close], Status.UNREACHABLE),
    "closed before the verdict": ([sending(OK, NBYTES), half_close], Status.UNREACHABLE),
    "reset": ([reset], Status.UNREACHABLE),
    "garbage": ([lambda stream: raw(stream, b"HTTP/1.1 400\r\n")], Status.UNREACHABLE),
    "too few statuses": ([sending(b"")], Status.UNREACHABLE),
    "an unknown status": ([sending(b"\xee")], Status.UNREACHABLE),
    "an unknown verdict": ([sending(OK, NBYTES), sending(b"\xee")], Status.UNREACHABLE),
    "refused, then allowed": ([sending(bytes([Status.STALE])), sending(OK)], Status.STALE),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_bad_answer_is_a_status_in_time(case: str) -> None:
    steps, expected = ANSWERS[case]

    def answer(stream: Stream, _: bytes) -> None:
        for step in steps:
            step(stream)

    with FakeOwner(answer) as endpoint:
        deadline = 0.15 if expected is Status.DEADLINE else LONG
        transfer = endpoint.read([Item(0, 1, 0, NBYTES)], [bytearray(NBYTES)], deadline)
        assert transfer.wait(LONG)
        assert list(transfer.statuses) == [expected]


def test_a_late_answer_is_never_taken_for_another() -> None:
    """The first request times out; its answer comes while the second one waits."""
    requests: list[int] = []

    def answer(stream: Stream, _: bytes) -> None:
        requests.append(1)
        if len(requests) == 1:
            late.wait(LONG)
            stream.send(OK, [b"\1" * 10], deadline=LONG)
            stream.send(OK, deadline=LONG)
            return
        stream.send(OK, [b"\2" * 10], deadline=LONG)
        stream.send(OK, deadline=LONG)

    late = threading.Event()
    with FakeOwner(answer) as endpoint:
        first = endpoint.read([Item(0, 1, 0, 10)], [bytearray(10)], SHORT)
        assert first.wait(LONG)
        target = bytearray(10)
        states = [endpoint.state]
        late.set()
        second = endpoint.read([Item(0, 1, 0, 10)], [target], LONG)
        assert second.wait(LONG)
        states.append(endpoint.state)
    assert list(first.statuses) == [Status.DEADLINE]
    assert list(second.statuses) == [Status.OK]
    assert target == b"\2" * 10
    assert states == [EndpointState.BROKEN, EndpointState.OPEN]


def test_cancel_ends_a_transfer_that_waits() -> None:
    asked = threading.Event()
    with FakeOwner(lambda stream, body: asked.set()) as endpoint:
        transfer = endpoint.read([Item(0, 1, 0, 10)], [bytearray(10)], LONG)
        assert asked.wait(LONG)
        transfer.cancel()
        assert transfer.done()
        assert list(transfer.statuses) == [Status.CANCELLED]


def test_close_ends_a_transfer_that_waits() -> None:
    asked = threading.Event()
    with FakeOwner(lambda stream, body: asked.set()) as endpoint:
        transfer = endpoint.read([Item(0, 1, 0, 10)], [bytearray(10)], LONG)
        assert asked.wait(LONG)
        endpoint.close()
        assert list(transfer.statuses) == [Status.CANCELLED]


def test_the_owner_looks_at_each_item_after_its_bytes_were_sent() -> None:
    memory = numbered(4 * NBYTES)
    seen: list[int] = []

    def check(item: Item) -> bool:
        seen.append(item.offset)
        return item.offset != NBYTES

    owner, peer = TcpTransport(check=check), TcpTransport()
    region = owner.register(memory)
    endpoint = peer.connect(owner.descriptor())
    items = [Item(region.id, region.generation, n * NBYTES, NBYTES) for n in range(3)]
    transfer = endpoint.read(items, [bytearray(NBYTES) for _ in items], LONG)
    assert transfer.wait(LONG)
    assert list(transfer.statuses) == [Status.OK, Status.REJECTED, Status.OK]
    assert seen == [0, NBYTES, 2 * NBYTES]
    before = memory.copy()
    transfer = endpoint.write(items, [bytes(NBYTES) for _ in items], LONG)
    assert transfer.wait(LONG)
    assert list(transfer.statuses) == [Status.OK, Status.REJECTED, Status.OK]
    assert np.array_equal(memory[NBYTES : 2 * NBYTES], before[NBYTES : 2 * NBYTES])
    assert not memory[:NBYTES].any()
    peer.close()
    owner.close()


@pytest.mark.parametrize(("nbytes", "connections"), [(TWO_FROM - 1, 1), (TWO_FROM, 2)])
def test_large_batches_take_two_connections(nbytes: int, connections: int) -> None:
    rows: list[int] = []
    both = threading.Barrier(connections)

    def answer(stream: Stream, body: bytes) -> None:
        *_, take = struct.unpack_from("<IQQQQQ", body, 9)
        rows.append(take)
        both.wait(LONG)
        stream.send(OK, [bytes(take)], deadline=LONG)
        stream.send(OK, deadline=LONG)

    with FakeOwner(answer) as endpoint:
        transfer = endpoint.read([Item(0, 1, 0, nbytes)], [bytearray(nbytes)], LONG)
        assert transfer.wait(LONG)
        assert list(transfer.statuses) == [Status.OK]
    assert sum(rows) == nbytes
    assert len(rows) == connections


@pytest.mark.parametrize("first_fails", [True, False])
def test_an_item_needs_both_of_its_halves(first_fails: bool) -> None:
    """The half that succeeds must not cover up the other, whichever ends first."""
    refused = threading.Event()

    def answer(stream: Stream, body: bytes) -> None:
        *_, skip, take = struct.unpack_from("<IQQQQQ", body, 9)
        if (skip == 0) == first_fails:
            stream.send(bytes([Status.STALE]), deadline=LONG)
            stream.send(bytes([Status.STALE]), deadline=LONG)
            refused.set()
            return
        refused.wait(LONG)
        stream.send(OK, [bytes(take)], deadline=LONG)
        stream.send(OK, deadline=LONG)

    with FakeOwner(answer) as endpoint:
        transfer = endpoint.read([Item(0, 1, 0, TWO_FROM)], [bytearray(TWO_FROM)], LONG)
        assert transfer.wait(LONG)
        assert list(transfer.statuses) == [Status.STALE]


def test_an_item_that_is_cut_in_two_is_judged_as_a_whole(owner: TcpTransport) -> None:
    """Half of an item that leaves the region lies within it. It was written once."""
    memory = np.zeros(TWO_FROM, np.uint8)
    region = owner.register(memory)
    endpoint = TcpTransport().connect(owner.descriptor())
    outside = Item(region.id, region.generation, TWO_FROM // 4, TWO_FROM)
    transfer = endpoint.write([outside], [np.ones(TWO_FROM, np.uint8)], LONG)
    assert transfer.wait(LONG)
    assert list(transfer.statuses) == [Status.OUT_OF_RANGE]
    assert not memory.any()
    endpoint.close()


def test_the_wrong_token_is_denied(owner: TcpTransport) -> None:
    owner.register(bytearray(10))
    address = owner._serve().address
    with pytest.raises(DeniedError):
        TcpTransport().connect(encode_descriptor("tcp", address=address, token="00" * 16))
    with pytest.raises(ProtocolError):
        TcpTransport().connect(encode_descriptor("tcp", address=address, token="no"))


REQUEST = struct.Struct("<Bd")
ROW = struct.Struct("<IQQQQQ")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        REQUEST.pack(2, 1.0),
        REQUEST.pack(0, -1.0),
        REQUEST.pack(0, float("nan")),
        REQUEST.pack(0, 1.0) + b"\0",
        REQUEST.pack(0, 1.0) + ROW.pack(0, 1, 0, 10, 5, 6),
        REQUEST.pack(0, 1.0) + ROW.pack(0, 1, 0, 10, (1 << 64) - 1, 2),
    ],
)
def test_an_owner_ends_the_connection_of_a_peer_that_makes_no_sense(
    owner: TcpTransport, body: bytes
) -> None:
    region = owner.register(numbered(10))
    server = owner._serve()
    with dial(server.address, LONG) as stream:
        stream.send(struct.pack("<4sB16s", b"KVTX", 1, server.token), deadline=LONG)
        assert stream.receive(deadline=LONG) == b"\0"
        stream.send(body, deadline=LONG)
        with pytest.raises(UnreachableError):
            stream.receive(deadline=LONG)
    peer = TcpTransport()
    transfer = peer.connect(owner.descriptor()).read([whole(region)], [bytearray(10)], LONG)
    assert transfer.wait(LONG)
    assert list(transfer.statuses) == [Status.OK]
    peer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 8,
        frames.encode(b"short"),
        frames.encode(struct.pack("<4sB16s", b"KVTX", 9, bytes(16))),
    ],
)
def test_strangers_are_hung_up_on(owner: TcpTransport, data: bytes) -> None:
    owner.register(bytearray(10))
    with dial(owner._serve().address, LONG) as stream:
        raw(stream, data)
        with pytest.raises(UnreachableError):
            stream.receive(deadline=LONG)


def test_the_owner_listens_on_loopback_unless_told_otherwise(owner: TcpTransport) -> None:
    owner.register(bytearray(1))
    assert owner._serve().address.startswith("tcp://127.0.0.1:")


def test_an_idle_connection_that_the_owner_closed_is_replaced(owner: TcpTransport) -> None:
    region = owner.register(numbered(10))
    peer = TcpTransport()
    endpoint = peer.connect(owner.descriptor())
    for stream in list(owner._serve()._connections):
        stream.abort()
    # The end may be on its way still: then it is noticed in the exchange.
    end = time.monotonic() + LONG
    status = None
    while status is not Status.OK:
        assert time.monotonic() < end
        transfer = endpoint.read([whole(region)], [bytearray(10)], LONG)
        assert transfer.wait(LONG)
        [status] = transfer.statuses
        assert status in (Status.OK, Status.UNREACHABLE)
    peer.close()


def test_deregister_waits_for_exchanges_under_way() -> None:
    checking, resume = threading.Event(), threading.Event()

    def check(item: Item) -> bool:
        checking.set()
        return resume.wait(LONG)

    owner, peer = TcpTransport(check=check), TcpTransport()
    region = owner.register(numbered(10))
    transfer = peer.connect(owner.descriptor()).read([whole(region)], [bytearray(10)], LONG)
    assert checking.wait(LONG)
    withdrawn = threading.Event()

    def withdraw() -> None:
        owner.deregister(region)
        withdrawn.set()

    thread = threading.Thread(target=withdraw)
    thread.start()
    assert not withdrawn.wait(SHORT)
    resume.set()
    assert withdrawn.wait(LONG)
    assert transfer.wait(LONG)
    assert list(transfer.statuses) == [Status.OK]
    thread.join()
    peer.close()
    owner.close()


STOPPABLE = """
    import sys
    import numpy as np
    from kvpool.transfer.tcp import TcpTransport
    owner = TcpTransport()
    region = owner.register(np.zeros(64 << 20, np.uint8))
    print(owner.descriptor().decode(), flush=True)
    sys.stdin.read()
    """


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGSTOP, Status.DEADLINE), (signal.SIGKILL, Status.UNREACHABLE)],
)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_an_owner_that_stops_or_dies_is_noticed(
    spawn: Any, number: signal.Signals, expected: Status, operation: str
) -> None:
    process = spawn(STOPPABLE)
    peer = TcpTransport()
    endpoint = peer.connect(process.stdout.readline().encode())
    process.send_signal(number)
    if number is signal.SIGKILL:
        process.wait()
    items, buffers = [Item(0, 1, 0, 64 << 20)], [np.zeros(64 << 20, np.uint8)]
    started = time.monotonic()
    transfer = getattr(endpoint, operation)(items, buffers, 0.3)
    assert transfer.wait(LONG)
    assert time.monotonic() - started < LONG / 2
    assert list(transfer.statuses) == [expected]
    peer.close()


FORK = """
    import os
    from kvpool.proto.errors import KvpoolError
    from kvpool.transfer.base import Item
    from kvpool.transfer.stream import Stream
    from kvpool.transfer.tcp import TcpTransport
    import socket

    left, right = (Stream(end) for end in socket.socketpair())
    pid = os.fork()
    if not pid:
        try:
            left.send(b"from the child", deadline=1)
        except KvpoolError as error:
            print(type(error).__name__, "fork" in str(error), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    left.send(b"from the parent", deadline=5)
    print(right.receive(deadline=5).decode(), flush=True)
    done = os.pipe()
    if not os.fork():
        os.read(done[0], 1)
        os._exit(0)
    left.close()
    try:
        right.receive(deadline=5)
    except KvpoolError:
        print(right.ended)
    os.write(done[1], b"x")
    """


def test_a_fork_child_cannot_use_the_streams_of_its_parent(spawn: Any) -> None:
    output, _ = spawn(FORK).communicate(timeout=LONG)
    assert output.splitlines() == ["UnreachableError True", "from the parent", "True"]
