"""Streams carry frames and payload whole, or say why not, within the deadline."""

import itertools
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto import frames
from kvpool.proto.errors import (
    DeadlineError,
    InvalidError,
    ProtocolError,
    TooLargeError,
    UnreachableError,
)
from kvpool.transfer import stream as stream_module
from kvpool.transfer.sockets import address_of, listen
from kvpool.transfer.stream import IOV_MAX, READ_AHEAD, Stream, dial

LONG = 20.0
"""Seconds that no passing test waits."""

SHORT = 0.03
"""Seconds for waits that must end by their deadline."""


def unix_pair() -> tuple[Stream, Stream]:
    left, right = socket.socketpair()
    return Stream(left), Stream(right)


def tcp_pair() -> tuple[Stream, Stream]:
    with listen("tcp://127.0.0.1:0") as listener:
        client = dial(address_of(listener), LONG)
        return client, Stream(listener.accept()[0])


@pytest.fixture(params=[unix_pair, tcp_pair])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Stream, Stream]]:
    left, right = request.param()
    with left, right:
        yield left, right


@pytest.fixture
def half_raw() -> Iterator[tuple[socket.socket, Stream]]:
    """A bare socket and the stream at its other end."""
    left, right = socket.socketpair()
    with left, Stream(right) as stream:
        yield left, stream


class Dribbling(socket.socket):
    """A socket that moves at most so many bytes per call, as `limits` say in turn."""

    limits: Iterator[int]

    def send(self, data: Any, *args: Any) -> int:
        return super().send(memoryview(data)[: next(self.limits)], *args)

    def sendmsg(self, buffers: Any, *args: Any) -> int:
        return self.send(b"".join(bytes(buffer) for buffer in buffers))

    def recv(self, size: int, *args: Any) -> bytes:
        return super().recv(min(size, next(self.limits)), *args)

    def recvmsg_into(self, buffers: Any, *args: Any) -> Any:
        got = super().recv_into(memoryview(buffers[0])[: next(self.limits)])
        return got, [], 0, None


def dribbling_pair(limits: list[int], exact: bool) -> tuple[Stream, Stream]:
    ends = []
    for end in socket.socketpair():
        dribbling = Dribbling(end.family, end.type, end.proto, end.detach())
        dribbling.limits = itertools.cycle(limits)
        ends.append(Stream(dribbling, exact=exact))
    return ends[0], ends[1]


def numbered(nbytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that tell where they belong: a wrong offset shows."""
    words = np.arange(seed * 1000003, seed * 1000003 + nbytes // 4 + 1, dtype=np.uint32)
    return words.view(np.uint8)[:nbytes]


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


messages = st.lists(
    st.tuples(st.binary(max_size=70), st.lists(st.integers(0, 90), max_size=4)), max_size=6
)


@given(
    messages,
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([0.0, LONG]),
)
def test_frames_and_payload_survive_any_splitting(
    batch: list[tuple[bytes, list[int]]], limits: list[int], exact: bool, awake: float
) -> None:
    left, right = dribbling_pair(limits, exact)

    def send_all() -> None:
        for body, sizes in batch:
            left.send(body, [numbered(n, n) for n in sizes], deadline=LONG)

    with left, right:
        sender = in_thread(send_all)
        for body, sizes in batch:
            assert right.receive(deadline=LONG, awake=awake) == body
            buffers = [np.zeros(n, np.uint8) for n in sizes]
            right.receive_into(buffers, deadline=LONG)
            for buffer in buffers:
                assert buffer.tobytes() == numbered(buffer.size, buffer.size).tobytes()
        sender.join()


@given(st.binary(min_size=4, max_size=200).filter(lambda data: data[0] > 4))
def test_garbage_is_refused_before_anything_is_awaited(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, Stream(right) as stream:
        left.sendall(data)
        with pytest.raises(ProtocolError, match="does not speak kvpool"):
            stream.receive(deadline=LONG)
        with pytest.raises(UnreachableError, match="broken"):
            stream.receive(deadline=LONG)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff\xff", "0xffffffff"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
    ],
)
def test_strangers_are_named(
    half_raw: tuple[socket.socket, Stream], data: bytes, words: str
) -> None:
    raw, stream = half_raw
    raw.sendall(data)
    with pytest.raises(ProtocolError, match=words):
        stream.receive(deadline=LONG)


def test_a_server_may_ask_for_less_than_the_largest_frame(
    half_raw: tuple[socket.socket, Stream],
) -> None:
    raw, stream = half_raw
    raw.sendall((101).to_bytes(4, "big"))  # the length alone: nothing is buffered for its body
    with pytest.raises(ProtocolError, match="exceeds 0x64"):
        stream.receive(deadline=LONG, limit=100)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, (4 << 20) - 1, (4 << 20) + 1])
def test_payload_of_any_size_arrives_in_place(pair: tuple[Stream, Stream], nbytes: int) -> None:
    left, right = pair
    source = numbered(nbytes)
    sender = in_thread(lambda: left.send(b"here", [source], deadline=LONG))
    assert right.receive(deadline=LONG) == b"here"
    target = np.zeros(nbytes + 2, np.uint8)
    right.receive_into([target[1:-1]], deadline=LONG)
    sender.join()
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


def test_more_buffers_than_one_system_call_takes(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    sizes = [(n * 37) % 300 for n in range(3 * IOV_MAX + 7)]
    sender = in_thread(lambda: left.send(b"many", [numbered(n, n) for n in sizes], deadline=LONG))
    assert right.receive(deadline=LONG) == b"many"
    buffers = [np.zeros(n, np.uint8) for n in sizes]
    right.receive_into(buffers, deadline=LONG)
    sender.join()
    assert all(np.array_equal(b, numbered(b.size, b.size)) for b in buffers)


def test_payload_can_follow_its_frame_later(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    left.send(b"soon", deadline=LONG)
    assert right.receive(deadline=LONG) == b"soon"
    left.send_buffers([b"ab", b"", b"c"], deadline=LONG)
    target = bytearray(3)
    right.receive_into([target], deadline=LONG)
    assert target == b"abc"


def test_a_large_body_arrives_whole(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    body = numbered(3 << 20).tobytes()
    sender = in_thread(lambda: left.send(body, deadline=LONG))
    assert right.receive(deadline=LONG) == body
    sender.join()


def test_small_frames_cost_one_recv(half_raw: tuple[socket.socket, Stream]) -> None:
    raw, stream = half_raw
    raw.sendall(frames.encode(b"a") + frames.encode(b"b"))
    assert stream.receive(deadline=LONG) == b"a"
    with pytest.raises(BlockingIOError):
        stream.sock.recv(1, socket.MSG_DONTWAIT)
    assert stream.receive(deadline=LONG) == b"b"


def test_an_exact_stream_leaves_what_follows_in_the_socket() -> None:
    left, right = socket.socketpair()
    with left, Stream(right, exact=True) as stream:
        left.sendall(frames.encode(b"body") + b"rest")
        assert stream.receive(deadline=LONG) == b"body"
        assert stream.sock.recv(100) == b"rest"


@pytest.mark.parametrize("awake", [0.0, LONG])
def test_a_deadline_between_frames_leaves_the_stream_whole(
    pair: tuple[Stream, Stream], awake: float
) -> None:
    left, right = pair
    for late in (SHORT, 0, -1):
        with pytest.raises(DeadlineError):
            right.receive(deadline=late, awake=awake)
    left.send(b"late", deadline=LONG)
    assert right.receive(deadline=LONG) == b"late"
    assert right.broken is None


@pytest.mark.parametrize("part", [b"\0", b"\0\0\0\x05", b"\0\0\0\x05abc"])
def test_a_deadline_within_a_frame_breaks_the_stream(
    half_raw: tuple[socket.socket, Stream], part: bytes
) -> None:
    raw, stream = half_raw
    raw.sendall(part)
    with pytest.raises(DeadlineError):
        stream.receive(deadline=SHORT)
    raw.sendall(b"more bytes that come too late")
    with pytest.raises(UnreachableError, match="broken: deadline passed"):
        stream.receive(deadline=LONG)
    with pytest.raises(UnreachableError, match="broken: deadline passed"):
        stream.send(b"", deadline=LONG)


def test_a_deadline_within_payload_breaks_the_stream(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    left.send(b"5", [b"abc"], deadline=LONG)
    right.receive(deadline=LONG)
    with pytest.raises(DeadlineError):
        right.receive_into([bytearray(5)], deadline=SHORT)
    assert right.broken is not None


def test_idle_time_does_not_count_against_a_frame(half_raw: tuple[socket.socket, Stream]) -> None:
    raw, stream = half_raw
    with pytest.raises(DeadlineError):
        stream.receive(deadline=LONG, idle=SHORT)
    raw.sendall(b"\0\0")
    with pytest.raises(DeadlineError):
        stream.receive(deadline=SHORT, idle=LONG)
    assert stream.broken is not None


def test_a_trickle_of_bytes_does_not_stretch_the_deadline(
    half_raw: tuple[socket.socket, Stream],
) -> None:
    raw, stream = half_raw
    raw.sendall(frames.PREFIX.pack(1 << 20))
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.001):
            raw.send(b"x", socket.MSG_DONTWAIT)

    thread = in_thread(trickle)
    with pytest.raises(DeadlineError):
        stream.receive(deadline=0.1)
    ended.set()
    thread.join()


def test_sending_to_a_peer_that_does_not_read_ends_at_the_deadline(
    pair: tuple[Stream, Stream],
) -> None:
    left, _ = pair
    with pytest.raises(DeadlineError):
        left.send(b"big", [np.zeros(64 << 20, np.uint8)], deadline=0.2)
    assert left.broken is not None


@pytest.mark.parametrize("awake", [0.0, LONG])
def test_an_end_between_frames_is_in_good_order(pair: tuple[Stream, Stream], awake: float) -> None:
    left, right = pair
    left.send(b"last", deadline=LONG)
    left.close()
    assert right.receive(deadline=LONG, awake=awake) == b"last"
    with pytest.raises(UnreachableError, match=r"closed the connection$"):
        right.receive(deadline=LONG, awake=awake)
    assert right.ended


def test_an_end_within_a_frame_is_not(half_raw: tuple[socket.socket, Stream]) -> None:
    raw, stream = half_raw
    raw.sendall(b"\0\0\0\x05ab")
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(UnreachableError, match="in mid-frame"):
        stream.receive(deadline=LONG)
    assert not stream.ended


def test_an_end_within_payload_is_not(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    left.send(b"5", [b"abc"], deadline=LONG)
    left.sock.shutdown(socket.SHUT_WR)
    right.receive(deadline=LONG)
    with pytest.raises(UnreachableError, match="in mid-frame"):
        right.receive_into([bytearray(5)], deadline=LONG)
    assert not right.ended


def test_sending_to_a_closed_peer_is_unreachable(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(UnreachableError):
        for _ in range(100):
            left.send(b"x", [bytes(100_000)], deadline=LONG)


def test_abort_ends_a_call_of_another_thread(pair: tuple[Stream, Stream]) -> None:
    _, right = pair
    raised: list[BaseException] = []

    def wait_for_a_frame() -> None:
        try:
            right.receive(deadline=LONG)
        except UnreachableError as error:
            raised.append(error)

    thread = in_thread(wait_for_a_frame)
    right.abort()
    thread.join(LONG)
    assert len(raised) == 1
    assert not right.ended


def test_a_ping_is_an_empty_frame_each_way(pair: tuple[Stream, Stream]) -> None:
    left, right = pair

    def answer() -> None:
        assert right.receive(deadline=LONG) == b""
        right.send(b"", deadline=LONG)

    thread = in_thread(answer)
    left.ping(deadline=LONG)
    thread.join()


def test_content_does_not_answer_a_ping(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    right.send(b"content", deadline=LONG)
    with pytest.raises(ProtocolError):
        left.ping(deadline=LONG)
    assert left.broken is not None


def test_wrong_arguments_leave_the_stream_whole(pair: tuple[Stream, Stream]) -> None:
    left, right = pair
    with pytest.raises(TooLargeError):
        left.send(bytes(frames.MAX_FRAME + 1), deadline=LONG)
    with pytest.raises(InvalidError):
        left.send(b"x", [np.zeros((4, 4), np.uint8)[:, 1]], deadline=LONG)
    with pytest.raises(InvalidError):
        right.receive_into([b"read-only"], deadline=LONG)
    left.send(b"fine", deadline=LONG)
    assert right.receive(deadline=LONG) == b"fine"


def test_a_call_that_a_signal_handler_interrupts_breaks_the_stream(
    half_raw: tuple[socket.socket, Stream],
) -> None:
    raw, stream = half_raw
    raw.sendall(b"\0\0\0\x05ab")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            stream.receive(deadline=LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(UnreachableError, match="interrupted"):
        stream.receive(deadline=LONG)


def test_timeouts_are_set_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Counting(socket.socket):
        def setsockopt(self, *args: Any) -> None:
            calls.append(args[1])
            super().setsockopt(*args)

    left, right = socket.socketpair()
    with left, Stream(Counting(right.family, right.type, 0, right.detach())) as stream:
        for _ in range(10):
            left.sendall(frames.encode(b"x"))
            stream.receive(deadline=5)
            stream.send(b"y", deadline=5)
    assert sorted(calls) == sorted([socket.SO_RCVTIMEO, socket.SO_SNDTIMEO])


def test_reading_ahead_takes_little_payload(half_raw: tuple[socket.socket, Stream]) -> None:
    raw, stream = half_raw
    raw.sendall(frames.encode(b"x") + bytes(READ_AHEAD + 100))
    stream.receive(deadline=LONG)
    assert len(stream.sock.recv(1 << 20)) == 100 + len(frames.encode(b"x"))


def test_dial_gives_a_stream(socket_folder: Any) -> None:
    address = f"unix:{socket_folder}/s"
    listener = stream_module.listen(address)
    with (
        listener,
        stream_module.dial(address, LONG) as client,
        Stream(listener.accept()[0]) as server,
    ):
        client.send(b"hello", deadline=LONG)
        assert server.receive(deadline=LONG) == b"hello"
