"""Frames come out whole and in order however the stream is cut; strangers are told at once."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto import frames
from kvpool.proto.errors import ProtocolError, TooLargeError
from kvpool.proto.frames import MAX_FRAME, PING, FrameDecoder
from tests.proto.samples import pieces

MIB = 1 << 20

bodies = st.lists(st.binary(max_size=40), max_size=8)


def test_a_frame_is_its_length_in_big_endian_and_its_body() -> None:
    assert frames.encode(b"abc") == b"\0\0\0\3abc"
    assert frames.encode(bytes(0x10203))[:4] == b"\0\1\2\3"
    assert frames.encode(b"") == PING == bytes(4)


@given(bodies, st.lists(st.integers(0, 400), max_size=12))
def test_bodies_come_out_in_order_whatever_the_boundaries(
    sent: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(frames.encode, sent))
    decoder = FrameDecoder()
    received = [body for piece in pieces(stream, cuts) for body in decoder.feed(piece)]
    assert received == sent
    assert decoder.buffered == 0


@given(bodies)
def test_byte_by_byte_a_body_comes_with_its_last_byte(sent: list[bytes]) -> None:
    decoder = FrameDecoder()
    for body in sent:
        frame = frames.encode(body)
        for i, byte in enumerate(frame):
            out = decoder.feed(bytes([byte]))
            assert out == ([body] if i == len(frame) - 1 else [])
            assert decoder.buffered == (0 if out else i + 1)


@given(bodies, st.integers(0, 44))
def test_what_is_buffered_is_what_waits_for_the_rest_of_its_frame(
    sent: list[bytes], missing: int
) -> None:
    stream = b"".join(map(frames.encode, sent))
    last = len(frames.encode(sent[-1])) if sent else 0
    missing = min(missing, last)
    decoder = FrameDecoder()
    decoder.feed(stream[: len(stream) - missing])
    assert decoder.buffered == (last - missing if missing else 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_taken_and_not_kept(kind: type) -> None:
    source = bytearray(frames.encode(b"abc") + b"\0\0")
    decoder = FrameDecoder()
    [body] = decoder.feed(kind(source))
    source[:] = bytes(len(source))
    assert body == b"abc"
    assert type(body) is bytes
    assert decoder.buffered == 2


def test_frames_are_taken_one_by_one_under_a_limit_of_the_moment() -> None:
    decoder = FrameDecoder()
    decoder.push(frames.encode(b"12") + frames.encode(b"345") + b"\0")
    assert decoder.take(limit=2) == b"12"
    assert decoder.buffered == 8
    assert decoder.take(limit=3) == b"345"
    assert decoder.take(limit=0) is None
    assert decoder.take() is None
    assert decoder.buffered == 1
    decoder.push(b"\0\0\1")
    with pytest.raises(ProtocolError, match="0x1 exceeds 0x0"):
        decoder.take(limit=0)


# Pings


def test_a_ping_is_an_empty_frame_and_comes_out_as_an_empty_body() -> None:
    assert FrameDecoder().feed(PING + frames.encode(b"x") + PING) == [b"", b"x", b""]


# The largest frame


def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    body = bytes(MAX_FRAME)
    frame = frames.encode(body)
    assert FrameDecoder().feed(frame) == [body]
    assert frames.body_length(frame[:4]) == MAX_FRAME
    with pytest.raises(TooLargeError, match=f"{MAX_FRAME + 1} bytes exceeds .* {MAX_FRAME}"):
        frames.encode(body + b"x")
    with pytest.raises(ProtocolError, match="exceeds"):
        FrameDecoder().feed((MAX_FRAME + 1).to_bytes(4, "big"))


def test_the_limit_is_64_mib() -> None:
    assert MAX_FRAME == 64 * MIB


# Strangers


@pytest.mark.parametrize(
    ("opening", "hint"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "looks like HTTP"),
        (b"POST /v1 HTTP/1.1\r\n", "looks like HTTP"),
        (b"OPTIONS * HTTP/1.1\r\n", "looks like HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "looks like HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "looks like HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "looks like TLS"),
        (b"\x16\x03\x03\x00\x7a", "looks like TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak kvpool"),
        (b"*1\r\n$4\r\nPING\r\n", "does not speak kvpool"),
        (b"\xff\xff\xff\xff", "0xffffffff exceeds 0x4000000"),
    ],
    ids=lambda value: str(value[:4]),
)
def test_a_stranger_is_refused_at_its_first_four_bytes(opening: bytes, hint: str) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(opening[:3]) == []
    with pytest.raises(ProtocolError, match=hint):
        decoder.feed(opening[3:4])
    with pytest.raises(ProtocolError, match=hint):
        FrameDecoder().feed(opening * 1000)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_garbage_gives_frames_or_a_protocol_error_and_nothing_else(
    garbage: bytes, cuts: list[int]
) -> None:
    decoder, broken = FrameDecoder(), False
    for piece in pieces(garbage, cuts):
        try:
            decoder.feed(piece)
        except ProtocolError:
            broken = True
        assert decoder.buffered <= len(garbage)
        assert not broken or decoder.buffered == 0


@pytest.mark.parametrize("length", [0, 3, 5])
def test_a_prefix_of_another_size_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"4 bytes of length, not {length}"):
        frames.body_length(bytes(length))


def test_a_broken_stream_stays_broken() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"\xff\xff\xff\xff" + frames.encode(b"good"))
    for data in (b"", PING, frames.encode(b"good")):
        with pytest.raises(ProtocolError, match="broken"):
            decoder.feed(data)
    with pytest.raises(ProtocolError, match="broken"):
        decoder.take()


# Memory


def traced_peak(decoder: FrameDecoder, stream: list[bytes]) -> int:
    tracemalloc.start()
    try:
        for piece in stream:
            decoder.feed(piece)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_announced_length_reserves_no_memory() -> None:
    decoder = FrameDecoder()
    assert traced_peak(decoder, [MAX_FRAME.to_bytes(4, "big") + bytes(1000)]) < 10_000
    assert decoder.buffered == 1004


def test_memory_is_bounded_by_what_waits_not_by_what_passed() -> None:
    frame = frames.encode(bytes(1000))
    assert traced_peak(FrameDecoder(), [frame] * 2000) < 50_000
    # Frames that never end together with their piece.
    stream = frame * 2000
    cut = [stream[i : i + 1009] for i in range(0, len(stream), 1009)]
    decoder = FrameDecoder()
    assert traced_peak(decoder, cut) < 50_000
    assert decoder.buffered == 0


def test_a_large_frame_leaves_no_memory_behind() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        assert len(decoder.feed(frames.encode(bytes(4 * MIB)))) == 1
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_a_stranger_leaves_no_memory_behind() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(b"GET " + bytes(MIB))
    assert decoder.buffered == 0
