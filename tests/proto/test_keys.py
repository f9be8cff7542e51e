"""A chunk's key commits to every token and every extra before it, and to nothing else.

The frozen chains are in test_golden.py.
"""

from __future__ import annotations

import array
import hashlib
from collections import deque
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import (
    KEY_BYTES,
    TOKEN_MAX,
    Extra,
    as_tokens,
    chain_keys,
    foreign_keys,
    shareable_chunks,
)

ROOT = hashlib.sha256(b"root").digest()
CHUNK = 4
TOKENS = list(range(100, 118))  # 4 chunks and a tail of 2


def chain(tokens: Any, extras: Any = None, *, root: bytes = ROOT, first: int = 0) -> list[bytes]:
    raw = chain_keys(root, tokens, CHUNK, extras, first_token=first)
    assert len(raw) % KEY_BYTES == 0
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


PLAIN = chain(TOKENS)


class Token(IntEnum):
    ONE = 1


# Tokens


@pytest.mark.parametrize("dtype", [*"bBhHiIlLqQ", ">u4", "<u4", ">i8"])
def test_equal_tokens_have_equal_keys_whatever_holds_them(dtype: str) -> None:
    values = np.array(TOKENS, dtype)
    strided = np.repeat(values, 2)[::2]
    read_only = values.copy()
    read_only.flags.writeable = False
    for tokens in (values, strided, read_only, list(values), tuple(values)):
        assert chain(tokens) == PLAIN


@pytest.mark.parametrize(
    "tokens",
    [tuple(TOKENS), range(100, 118), deque(TOKENS), array.array("Q", TOKENS)],
    ids=lambda tokens: type(tokens).__name__,
)
def test_any_sequence_of_integers_will_do(tokens: Any) -> None:
    assert chain(tokens) == PLAIN


def test_the_whole_range_of_tokens_is_kept() -> None:
    assert as_tokens([0, TOKEN_MAX]).tolist() == [0, TOKEN_MAX]
    assert as_tokens(np.array([0, TOKEN_MAX])).tolist() == [0, TOKEN_MAX]
    mixed: list[Any] = [Token.ONE, np.uint64(TOKEN_MAX), 3]
    assert as_tokens(mixed).tolist() == [1, TOKEN_MAX, 3]
    assert as_tokens([0]).dtype == np.uint32


@pytest.mark.parametrize("tokens", [[], (), np.array([]), np.empty(0, np.int64)])
def test_no_tokens_have_no_keys(tokens: Any) -> None:
    assert as_tokens(tokens).shape == (0,)
    assert as_tokens(tokens).dtype == np.uint32
    assert chain(tokens) == []


def test_tokens_that_are_uint32_already_are_not_copied() -> None:
    tokens = np.arange(8, dtype=np.uint32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, True], "True is bool"),
        ([False], "False is bool"),
        ([1, np.True_], "bool"),
        ([1, 2.0], r"2\.0 is float"),
        ([1, np.float32(2)], "float32"),
        ([1, None], "None is NoneType"),
        ([1, "2"], "'2' is str"),
        ([1, b"2"], "b'2' is bytes"),
        ([1, np.array(True)], "ndarray"),
        ([1, -1], "-1 is outside"),
        ([1, np.int8(-1)], "-1 is outside"),
        ([1, TOKEN_MAX + 1], f"{TOKEN_MAX + 1} is outside"),
        ([2**63, -1], f"{2**63} is outside"),
        ([2**70], f"{2**70} is outside"),
        ([[1, 2], [3, 4]], r"\[1, 2\] is list"),
        ([[1], [1, 2]], r"\[1\] is list"),
        ([[]], r"\[\] is list"),
        (np.array([True, False]), "bool"),
        (np.array([1.0]), "float64"),
        (np.array([1, 2], object), "object"),
        (np.array(["1"]), "not <U1"),
        (np.array([1, -1]), "-1 is outside"),
        (np.array([1, TOKEN_MAX + 1]), f"{TOKEN_MAX + 1} is outside"),
        (np.array([2**64 - 1], np.uint64), f"{2**64 - 1} is outside"),
        (np.zeros((2, 2), np.uint32), r"shape \(2, 2\)"),
        (np.zeros((0, 2), np.uint32), r"shape \(0, 2\)"),
        (np.uint32(1), r"shape \(\)"),
        (1, r"shape \(\)"),
        (None, r"shape \(\)"),
        ({1, 2}, r"shape \(\)"),
        ("12", "not str"),
        (b"\1\0\0\0", "not bytes"),
        (bytearray(4), "not bytearray"),
    ],
)
def test_what_is_no_token_is_refused_by_name(tokens: Any, named: str) -> None:
    with pytest.raises(InvalidError, match=named):
        as_tokens(tokens)


def test_a_refusal_stays_short() -> None:
    nested: list[Any] = [list(range(100_000))]
    with pytest.raises(InvalidError) as caught:
        as_tokens(nested)
    assert len(str(caught.value)) < 200


# The chain


def test_partial_tails_have_no_key() -> None:
    for n in range(len(TOKENS) + 1):
        assert chain(TOKENS[:n]) == PLAIN[: n // CHUNK]


@given(st.integers(0, len(TOKENS) - 1), st.integers(0, TOKEN_MAX))
def test_a_changed_token_changes_its_key_and_all_later_and_none_earlier(at: int, new: int) -> None:
    changed = [*TOKENS[:at], new, *TOKENS[at + 1 :]]
    keys, same = chain(changed), new == TOKENS[at]
    assert [a == b for a, b in zip(keys, PLAIN, strict=True)] == [
        same or i < at // CHUNK for i in range(4)
    ]


def test_another_root_or_chunk_size_shares_no_key() -> None:
    assert not set(chain(TOKENS, root=hashlib.sha256(b"other").digest())) & set(PLAIN)
    by_two = chain_keys(ROOT, TOKENS, 2)
    assert not {by_two[i : i + 32] for i in range(0, len(by_two), 32)} & set(PLAIN)


def test_equal_chunks_at_different_places_have_different_keys() -> None:
    assert len(set(chain([7] * 40))) == 10


extras = st.lists(
    st.builds(Extra, st.integers(0, 30), st.one_of(st.none(), st.binary(min_size=1, max_size=3))),
    max_size=4,
)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 8), extras)
@example([1] * 16, 2, [Extra(3, b"x"), Extra(9, None)])
def test_continuing_a_chain_in_pieces_gives_the_keys_of_doing_it_at_once(
    tokens: list[int], cut: int, found: list[Extra]
) -> None:
    whole = chain(tokens, found)
    cut = min(cut, len(tokens) // CHUNK)
    head = chain(tokens[: cut * CHUNK], found)
    assert head == whole[:cut]
    root = PLAIN[0] if len(head) < cut else [ROOT, *head][-1]  # ended by an extra: any will do
    assert head + chain(tokens[cut * CHUNK :], found, root=root, first=cut * CHUNK) == whole
    assert len(whole) == shareable_chunks(len(tokens), CHUNK, found)


@pytest.mark.parametrize("count", [np.int64(4), np.uint8(4)])
def test_counts_may_be_of_any_integer_type(count: Any) -> None:
    assert chain_keys(ROOT, TOKENS, count) == b"".join(PLAIN)
    assert chain_keys(PLAIN[0], TOKENS[4:], 4, [Extra(2, b"x")], first_token=count) == b"".join(
        PLAIN[1:]
    )
    assert shareable_chunks(count, count) == 1


@pytest.mark.parametrize("chunk", [0, -4, True, 4.0, "4", None, 2**32])
def test_an_impossible_chunk_size_is_refused(chunk: Any) -> None:
    with pytest.raises(InvalidError, match="chunk_tokens"):
        chain_keys(ROOT, TOKENS, chunk)
    with pytest.raises(InvalidError, match="chunk_tokens"):
        shareable_chunks(8, chunk)


@pytest.mark.parametrize("first", [-4, -1, 1, 3, 6, 4.0, True])
def test_a_first_token_off_the_boundary_is_refused(first: Any) -> None:
    with pytest.raises(InvalidError, match="first_token"):
        chain_keys(ROOT, TOKENS, CHUNK, first_token=first)


@pytest.mark.parametrize("root", [b"", ROOT[:-1], ROOT + b"x", None, "x" * 32, 32])
def test_a_root_that_is_no_key_is_refused(root: Any) -> None:
    with pytest.raises(InvalidError, match="previous key must be 32 bytes"):
        chain_keys(root, TOKENS, CHUNK)
    with pytest.raises(InvalidError, match="namespace digest must be 32 bytes"):
        foreign_keys(root, [b"page"])


# Extras


def test_no_extras_are_no_extras_however_they_are_said() -> None:
    assert chain(TOKENS, None) == chain(TOKENS, ()) == chain(TOKENS, []) == PLAIN


@pytest.mark.parametrize("start", range(16))
def test_an_extra_changes_the_chunk_it_starts_in_and_all_later_and_none_earlier(start: int) -> None:
    keys = chain(TOKENS, [Extra(start, b"image")])
    assert [a == b for a, b in zip(keys, PLAIN, strict=True)] == [
        i < start // CHUNK for i in range(4)
    ]


@pytest.mark.parametrize("start", [16, 17, 18, 1000])
def test_an_extra_behind_the_last_full_chunk_changes_nothing(start: int) -> None:
    assert chain(TOKENS, [Extra(start, b"image")]) == PLAIN


@pytest.mark.parametrize("bits", [16, 32, 64, 128, 248])
def test_digests_that_agree_in_their_last_or_first_bits_give_different_keys(bits: int) -> None:
    common = bytes(range(bits // 8))
    rest = 32 - len(common)
    for one, two in (
        (b"\1" * rest + common, b"\2" * rest + common),
        (common + b"\1" * rest, common + b"\2" * rest),
    ):
        assert len(one) == len(two) == 32
        a, b = chain(TOKENS, [Extra(5, one)]), chain(TOKENS, [Extra(5, two)])
        assert a[0] == b[0]
        assert not set(a[1:]) & set(b[1:])


def test_the_place_of_an_extra_inside_its_chunk_matters() -> None:
    assert len({chain(TOKENS, [Extra(start, b"image")])[0] for start in range(CHUNK)}) == CHUNK


def test_the_order_in_which_extras_are_listed_does_not_matter() -> None:
    one, two = Extra(6, b"a"), Extra(5, b"b")
    assert chain(TOKENS, [one, two]) == chain(TOKENS, (two, one))
    assert chain(TOKENS, [one, two]) != chain(TOKENS, [one])


@given(
    *[st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=10)), max_size=3)] * 2
)
@example([(0, b"a\1\0\0\0\1\0\0\0b")], [(0, b"a"), (1, b"b")])
def test_different_extras_in_a_chunk_give_different_keys(
    one: list[tuple[int, bytes]], two: list[tuple[int, bytes]]
) -> None:
    keys = [chain(TOKENS[:4], [Extra(*extra) for extra in found]) for found in (one, two)]
    assert (keys[0] == keys[1]) is (sorted(one) == sorted(two))


@pytest.mark.parametrize(
    ("start", "chunks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (99, 4)]
)
def test_content_without_identity_ends_the_chain_but_the_text_before_is_shared(
    start: int, chunks: int
) -> None:
    nameless = [Extra(start, None)]
    assert shareable_chunks(len(TOKENS), CHUNK, nameless) == chunks
    assert chain(TOKENS, nameless) == PLAIN[:chunks]
    assert (
        chain(TOKENS, [Extra(2**31, None), *nameless, Extra(14, b"x")])
        == PLAIN[:chunks][:3] + (chain(TOKENS, [Extra(14, b"x")])[3:chunks])
    )


def test_nothing_continues_behind_content_without_identity() -> None:
    assert chain(TOKENS[4:], [Extra(0, None)], root=PLAIN[0], first=4) == []
    assert chain(TOKENS[4:], [Extra(5, None)], root=PLAIN[0], first=4) == []
    assert chain(TOKENS[4:], [Extra(9, None)], root=PLAIN[0], first=4) == PLAIN[1:2]


@pytest.mark.parametrize(
    "extra",
    [
        Extra(-1, b"x"),
        Extra(True, b"x"),
        Extra(1, b""),
        Extra(-1, None),
        *(Extra(start, b"x") for start in (1.0, None, "1")),  # type: ignore[arg-type]
        *(Extra(1, digest) for digest in ("x", 7, bytearray(1))),  # type: ignore[arg-type]
    ],
)
def test_an_extra_that_cannot_be_is_refused(extra: Extra) -> None:
    for tokens in (TOKENS, []):
        with pytest.raises(InvalidError, match="extra"):
            chain(tokens, [extra])
    with pytest.raises(InvalidError, match="extra"):
        shareable_chunks(8, CHUNK, [extra])


def test_a_prompt_shorter_than_a_chunk_shares_nothing() -> None:
    assert [shareable_chunks(n, CHUNK) for n in (0, 1, 3, 4, 5, 8)] == [0, 0, 0, 1, 1, 2]
    with pytest.raises(InvalidError, match="tokens -1"):
        shareable_chunks(-1, CHUNK)


# Foreign page hashes


def test_foreign_keys_commit_to_namespace_and_page_hash() -> None:
    pages = [b"a", b"aa", b"\0" * 8]
    raw = foreign_keys(ROOT, pages)
    assert raw == b"".join(hashlib.sha256(ROOT + page).digest() for page in pages)
    assert foreign_keys(ROOT, pages[::-1]) == b"".join(raw[i : i + 32] for i in (64, 32, 0))
    assert foreign_keys(hashlib.sha256(b"other").digest(), pages) != raw
    assert foreign_keys(ROOT, []) == b""


@pytest.mark.parametrize("page", [b"", None, "hash", 7, bytearray(8)])
def test_a_foreign_page_without_a_hash_is_refused(page: Any) -> None:
    with pytest.raises(InvalidError, match="page hash"):
        foreign_keys(ROOT, [b"good", page])
