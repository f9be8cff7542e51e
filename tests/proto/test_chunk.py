"""A stored chunk proves itself: what is not exactly what was asked for is never served.

The frozen bytes of a prologue are in test_golden.py.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto import chunk
from kvpool.proto.errors import InvalidError
from kvpool.proto.layout import Part, Plane, native
from tests.proto import samples
from tests.proto.examples import examples

Bytes = npt.NDArray[np.uint8]

PART = samples.PORTABLE.parts[0]
KEY = hashlib.sha256(b"key").digest()
ASKED: dict[str, Any] = {
    "namespace": samples.PORTABLE.digest(samples.TENANT),
    "key": KEY,
    "part": 0,
    "generation": 7,
    "nbytes": PART.nbytes,
    "layout_id": samples.PORTABLE.layout_id,
    "planes": len(PART.planes),
}
PROLOGUE = chunk.prologue_bytes(PART)
SUMS_END = chunk.HEADER_BYTES + 8 * len(PART.planes)


def extent(**values: Any) -> Bytes:
    """A whole stored chunk, in memory that was not clean."""
    target = np.full(chunk.extent_bytes(PART), 0xEE, np.uint8)
    target[PROLOGUE:] = samples.payload()
    asked = {**ASKED, **values}
    if "sums" not in asked:
        seed = chunk.sum_seed(asked["key"], asked["part"])
        asked["sums"] = chunk.plane_sums(target[PROLOGUE:], PART.offsets(), seed)
    chunk.write_prologue(target, **asked)
    return target


def bad_planes(stored: Bytes, **asked: Any) -> list[int] | str | None:
    """What a reader does: the planes that fail, None without sums, or what is wrong."""
    asked = {**ASKED, **asked}
    sums = chunk.read_prologue(stored, **asked)
    if sums is None or isinstance(sums, str):
        return sums
    seed = chunk.sum_seed(asked["key"], asked["part"])
    found = chunk.plane_sums(stored[PROLOGUE:], PART.offsets(), seed)
    return [i for i, (a, b) in enumerate(zip(sums.tolist(), found, strict=True)) if a != b]


def flipped(stored: Bytes, bit: int) -> Bytes:
    broken = stored.copy()
    broken[bit // 8] ^= 1 << bit % 8
    return broken


# What is intact is served


def test_what_was_written_is_read_and_verified() -> None:
    stored = extent()
    assert bad_planes(stored) == []
    assert bad_planes(stored, generation=None) == []
    sums = chunk.read_prologue(stored, **ASKED)
    assert isinstance(sums, np.ndarray)
    assert sums.dtype == np.uint64


def test_nothing_of_the_memory_before_stays_in_a_prologue() -> None:
    target = np.full(chunk.extent_bytes(PART), 0xEE, np.uint8)
    chunk.write_prologue(target, **ASKED, sums=[1, 2])
    assert not target[SUMS_END:PROLOGUE].any()
    assert (target[PROLOGUE:] == 0xEE).all()


u64 = st.integers(0, 2**64 - 1)


@given(
    st.fixed_dictionaries(
        {
            "namespace": st.binary(min_size=32, max_size=32),
            "key": st.binary(min_size=32, max_size=32),
            "part": st.integers(0, 63),
            "generation": u64,
            "nbytes": st.integers(1, 2**48),
            "layout_id": u64,
        }
    ),
    st.lists(u64, min_size=1, max_size=70),
)
def test_any_header_survives(values: dict[str, Any], sums: list[int]) -> None:
    target = np.full(4096, 0xEE, np.uint8)
    chunk.write_prologue(target, **values, planes=len(sums), sums=sums)
    read = chunk.read_prologue(target, **values, planes=len(sums))
    assert isinstance(read, np.ndarray)
    assert read.tolist() == sums


def test_a_chunk_without_sums_is_an_answer_of_its_own() -> None:
    stored = extent(sums=None)
    assert chunk.read_prologue(stored, **ASKED) is None
    assert not stored[chunk.HEADER_BYTES : SUMS_END].any()
    # Sums that happen to be zero are sums.
    zero = chunk.read_prologue(extent(sums=[0, 0]), **ASKED)
    assert isinstance(zero, np.ndarray)
    assert bad_planes(extent(sums=[0, 0])) == [0, 1]


def test_the_same_chunk_is_the_same_bytes_whatever_held_it() -> None:
    assert extent().tobytes() == extent().tobytes()
    assert extent()[:8].tobytes() == b"KVPOOL\r\n"


# What is not intact, or not what was asked for, is not served


@pytest.mark.parametrize("sums", [True, False], ids=["with sums", "without"])
def test_every_flipped_bit_of_a_header_is_detected(sums: bool) -> None:
    stored = extent() if sums else extent(sums=None)
    for bit in range(8 * chunk.HEADER_BYTES):
        assert isinstance(bad_planes(flipped(stored, bit)), str), f"bit {bit}"


def test_every_flipped_bit_of_a_sum_fails_its_plane() -> None:
    stored = extent()
    for bit in range(8 * chunk.HEADER_BYTES, 8 * SUMS_END):
        assert bad_planes(flipped(stored, bit)) == [(bit // 8 - chunk.HEADER_BYTES) // 8]


def test_every_flipped_bit_of_a_payload_fails_its_plane_and_no_other() -> None:
    stored = extent()
    for bit in range(8 * PART.nbytes):
        broken = flipped(stored, 8 * PROLOGUE + bit)
        assert bad_planes(broken) == [bit // 8 // PART.planes[0].nbytes]


def test_padding_carries_nothing_and_is_not_looked_at() -> None:
    stored = extent()
    stored[SUMS_END:PROLOGUE] = 0xEE
    assert bad_planes(stored) == []


def test_every_truncation_is_detected() -> None:
    stored = extent()
    for length in range(SUMS_END):
        assert isinstance(bad_planes(stored[:length]), str), f"{length} bytes"
    for length in range(PROLOGUE, len(stored)):
        assert bad_planes(stored[:length]), f"{length} bytes"


def test_swapped_planes_are_detected() -> None:
    stored = extent()
    half = PART.planes[0].nbytes
    stored[PROLOGUE:] = np.roll(stored[PROLOGUE:], half)
    assert bad_planes(stored) == [0, 1]


def test_a_zeroed_page_is_detected() -> None:
    part = native("all", layers=("l0", "l1"), nbytes=64 << 10)
    payload = np.ones(part.nbytes, np.uint8)
    sums = chunk.plane_sums(payload, part.offsets(), 1)
    payload[68 << 10 : 72 << 10] = 0
    found = chunk.plane_sums(payload, part.offsets(), 1)
    assert [a == b for a, b in zip(sums, found, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("namespace", samples.PORTABLE.digest("another tenant")),
        ("namespace", samples.NATIVE.digest(samples.TENANT)),
        ("key", hashlib.sha256(b"another").digest()),
        ("key", KEY[:-1] + bytes([KEY[-1] ^ 1])),
        ("part", 1),
        ("generation", 8),
        ("generation", 0),
        ("nbytes", PART.nbytes + 1),
        ("layout_id", samples.PORTABLE.layout_id ^ 1),
        ("planes", 1),
        ("planes", 3),
    ],
)
def test_an_intact_chunk_that_is_not_the_one_asked_for_is_refused(name: str, value: Any) -> None:
    assert isinstance(bad_planes(extent(), **{name: value}), str)


def test_the_payload_of_another_chunk_or_part_fails_every_plane() -> None:
    stored = extent()
    for other in (extent(key=hashlib.sha256(b"another").digest()), extent(part=1)):
        stored[:PROLOGUE] = other[:PROLOGUE]
        # As if the header had been forged to match, with the other's sums.
        sums = other[chunk.HEADER_BYTES : SUMS_END].copy()
        forged = extent()
        forged[chunk.HEADER_BYTES : SUMS_END] = sums
        assert bad_planes(forged) == [0, 1]
        assert isinstance(bad_planes(stored), str)


def test_the_seed_of_the_sums_differs_by_key_and_by_part() -> None:
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(64)]
    seeds = {chunk.sum_seed(key, part) for key in keys for part in range(64)}
    assert len(seeds) == 64 * 64
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert chunk.sum_seed(bytes(32), 0) == 0x9E3779B97F4A7C15
    assert chunk.sum_seed(bytes(32), 1) == 0x9E3779B97F4A7C15 * 2 % 2**64


def header(version: int = 1, flags: int = 0, reserved: bytes = bytes(16)) -> Bytes:
    """The header that was asked for, in another version's hand; its sum is right."""
    head = b"KVPOOL\r\n" + struct.pack("<HHI", version, 0, 2) + ASKED["namespace"][:24] + KEY
    head += struct.pack("<QQQQ", 7, PART.nbytes, ASKED["layout_id"], flags)
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + reserved + bytes(16)
    return np.frombuffer(head, np.uint8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "another chunk"),
        ({"version": 0}, "another chunk"),
        ({"flags": 2}, "flags 0x2"),
        ({"flags": 3}, "flags 0x3"),
        ({"flags": 1 << 63}, "flags 0x8"),
        ({"reserved": bytes(15) + b"\1"}, "reserved"),
    ],
    ids=str,
)
def test_a_header_of_a_newer_version_is_refused_and_not_half_understood(
    change: dict[str, Any], says: str
) -> None:
    assert isinstance(chunk.read_prologue(header(), **ASKED), np.ndarray)
    answer = chunk.read_prologue(header(**change), **ASKED)
    assert isinstance(answer, str)
    assert says in answer


@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_told_from_a_header_without_an_exception(garbage: bytes, magic: bool) -> None:
    source = np.frombuffer((chunk.MAGIC if magic else b"") + garbage, np.uint8)
    assert isinstance(chunk.read_prologue(source, **ASKED), str)


@given(st.lists(st.tuples(st.integers(0, SUMS_END - 1), st.integers(1, 255)), min_size=1))
def test_damage_at_several_places_is_detected(damage: list[tuple[int, int]]) -> None:
    stored = extent()
    whole = stored.tobytes()
    for at, mask in damage:
        stored[at] ^= mask
    assert (bad_planes(stored) == []) is (stored.tobytes() == whole)


# Where the payload starts


@pytest.mark.parametrize(
    ("nbytes", "planes", "prologue"),
    [
        (1, 1, 192),
        (64, 8, 192),
        (90, 9, 256),
        ((64 << 10) - 1, 1, 192),
        (64 << 10, 1, 4096),
        (1 << 20, 32, 4096),
        (496 << 10, 496, 4096),
        (497 << 10, 497, 8192),
    ],
)
def test_the_payload_starts_at_a_page_if_it_is_large_and_else_at_64_bytes(
    nbytes: int, planes: int, prologue: int
) -> None:
    part = Part("p", tuple(Plane(str(i), nbytes // planes, 0) for i in range(planes)))
    assert part.nbytes == nbytes
    assert chunk.prologue_bytes(part) == prologue
    assert chunk.extent_bytes(part) == prologue + nbytes


@given(st.integers(1, 600), st.integers(1, 256))
@examples(0.3)
def test_a_prologue_holds_its_header_and_sums_and_little_more(planes: int, each: int) -> None:
    part = Part("p", tuple(Plane(str(i), each, 0) for i in range(planes)))
    align = 4096 if planes * each >= 65536 else 64
    spare = chunk.prologue_bytes(part) - 128 - 8 * planes
    assert 0 <= spare < align
    assert chunk.prologue_bytes(part) % align == 0


# What a writer cannot say


@pytest.mark.parametrize(
    "change",
    [
        {"key": KEY[:-1]},
        {"key": KEY + b"x"},
        {"key": b""},
        {"namespace": bytes(23)},
        {"part": 1 << 16},
        {"part": -1},
        {"generation": 1 << 64},
        {"generation": -1},
        {"layout_id": 1 << 64},
        {"sums": [1]},
        {"sums": [1, 2, 3]},
        {"sums": []},
        {"sums": [1, 1 << 64]},
        {"sums": [1, -1]},
        {"nbytes": 1 << 64},
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_the_header_is_refused(change: dict[str, Any]) -> None:
    target = np.full(4096, 0xEE, np.uint8)
    with pytest.raises(InvalidError):
        chunk.write_prologue(target, **{**ASKED, "sums": [1, 2], **change})
    assert (target == 0xEE).all()


def test_a_target_too_small_for_the_prologue_is_refused() -> None:
    with pytest.raises(InvalidError, match="192 bytes does not fit into 191"):
        chunk.write_prologue(np.zeros(191, np.uint8), **ASKED, sums=[1, 2])
