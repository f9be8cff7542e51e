"""Layout arithmetic against NumPy, which slices the same bytes by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto.errors import InvalidError, NamespaceError
from kvpool.proto.layout import (
    NBYTES_MAX,
    PLANES_MAX,
    HeadShard,
    Part,
    Piece,
    Plane,
    head_shards,
    native,
    portable,
    reshard,
    token_ranges,
)

Bytes = npt.NDArray[np.uint8]

TOKENS, DIM, ITEMSIZE = 4, 3, 2


def kv(kv_heads: int, tokens: int = TOKENS, dim: int = DIM) -> npt.NDArray[np.uint16]:
    """A plane's elements, all different: head → K/V → token → dim."""
    shape = (kv_heads, 2, tokens, dim)
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def raw(array: npt.NDArray[np.uint16]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def gather(plane: bytes, ranges: Any) -> bytes:
    return b"".join(plane[offset : offset + nbytes] for offset, nbytes in ranges)


# Sizes


def test_a_portable_part_has_a_plane_per_layer_and_two_runs_per_head() -> None:
    part = portable("tp0", layers=("l0", "l1"), kv_heads=8, head_dim=128, itemsize=2, tokens=256)
    assert part.planes == (Plane("l0", 1 << 20, 16), Plane("l1", 1 << 20, 16))
    assert part.nbytes == 2 << 20
    assert part.offsets() == (0, 1 << 20, 2 << 20)
    assert part.window is None


def test_a_native_part_is_opaque_unless_its_runs_are_told() -> None:
    assert native("all", layers=("a", "b"), nbytes=96) == Part(
        "all", (Plane("a", 96, 0), Plane("b", 96, 0))
    )
    assert native("all", layers=("a",), nbytes=96, runs=2).planes == (Plane("a", 96, 2),)


def test_planes_of_mixed_sizes_lie_one_after_another() -> None:
    # fp8 attention, fp16 attention, its scales, recurrent state: no size is taken from layer 0
    sizes = [512, 1024, 16, 40]
    part = Part("all", tuple(Plane(f"l{i}", n, 0) for i, n in enumerate(sizes)))
    assert part.offsets() == (0, 512, 1536, 1552, 1592)
    assert part.nbytes == 1592
    assert [end - start for start, end in pairwise(part.offsets())] == sizes


def test_planes_are_found_by_name_and_a_missing_layer_is_an_error() -> None:
    # A pipeline stage holds layers 2 and 3 in its own order: positions say nothing.
    stage = Part("pp1", (Plane("l3", 8, 0), Plane("l2", 4, 0)))
    assert [stage.plane_index(name) for name in ("l2", "l3")] == [1, 0]
    with pytest.raises(NamespaceError, match="part 'pp1' has no plane 'l0'; it has l3, l2"):
        stage.plane_index("l0")


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_layers_spread_over_other_stages_keep_their_bytes_when_matched_by_name(stages: int) -> None:
    layers = {f"l{i}": bytes([i]) * (i + 1) for i in range(8)}  # every layer another size
    names = list(layers)

    def split(count: int) -> list[Part]:
        each = len(names) // count
        groups = [names[i * each : (i + 1) * each] for i in range(count)]
        return [
            Part(f"pp{i}", tuple(Plane(name, len(layers[name]), 0) for name in group))
            for i, group in enumerate(groups)
        ]

    stored = {part.name: b"".join(layers[plane.name] for plane in part.planes) for part in split(4)}
    for wanted in split(stages):
        payload = b""
        for plane in wanted.planes:
            [source] = [p for p in split(4) if plane.name in {q.name for q in p.planes}]
            at = source.plane_index(plane.name)
            start, end = source.offsets()[at : at + 2]
            payload += stored[source.name][start:end]
        assert payload == b"".join(layers[plane.name] for plane in wanted.planes)


# Windows


def test_a_part_is_needed_for_the_whole_prefix_or_for_the_last_tokens() -> None:
    planes = (Plane("l0", 8, 0),)
    assert Part("full", planes).window is None
    assert Part("sliding", planes, window=1).window == 1
    assert Part("sliding", planes, window=2**32 - 1).window == 2**32 - 1


@pytest.mark.parametrize("window", [0, -1, 2**32, True, 4.0, "4"])
def test_a_window_that_cannot_be_is_refused(window: Any) -> None:
    with pytest.raises(InvalidError, match="part 'p': window"):
        Part("p", (Plane("l0", 8, 0),), window=window)


# Token ranges


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("first", range(TOKENS))
def test_token_ranges_of_a_portable_plane_cover_the_bytes_that_numpy_slices(
    kv_heads: int, first: int
) -> None:
    part = portable(
        "p", layers=("l",), kv_heads=kv_heads, head_dim=DIM, itemsize=ITEMSIZE, tokens=TOKENS
    )
    [plane] = part.planes
    array = kv(kv_heads)
    for last in range(first + 1, TOKENS + 1):
        ranges = list(token_ranges(plane, TOKENS, first, last))
        wanted = array[:, :, first:last]
        assert gather(raw(array), ranges) == raw(wanted)
        assert sum(nbytes for _, nbytes in ranges) == wanted.nbytes


@pytest.mark.parametrize("runs", [1, 2])
def test_token_ranges_of_a_native_plane_with_tokens_outermost(runs: int) -> None:
    # runs = 1: token → K/V → head → dim; runs = 2: K/V → token → head → dim
    shape = (TOKENS, 2, 2, DIM) if runs == 1 else (2, TOKENS, 2, DIM)
    array = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    [plane] = native("p", layers=("l",), nbytes=array.nbytes, runs=runs).planes
    for first in range(TOKENS):
        for last in range(first + 1, TOKENS + 1):
            wanted = array[first:last] if runs == 1 else array[:, first:last]
            assert gather(raw(array), token_ranges(plane, TOKENS, first, last)) == raw(wanted)


@given(
    runs=st.integers(1, 6),
    tokens=st.integers(1, 9),
    token_bytes=st.integers(1, 5),
    cuts=st.sets(st.integers(1, 8)),
)
def test_ranges_of_adjacent_tokens_cover_a_plane_exactly_once(
    runs: int, tokens: int, token_bytes: int, cuts: set[int]
) -> None:
    plane = Plane("l", runs * tokens * token_bytes, runs)
    seen = np.zeros(plane.nbytes, np.uint8)
    edges = [0, *sorted(cut for cut in cuts if cut < tokens), tokens]
    for first, last in pairwise(edges):
        for offset, nbytes in token_ranges(plane, tokens, first, last):
            assert 0 <= offset < offset + nbytes <= plane.nbytes
            seen[offset : offset + nbytes] += 1
    assert (seen == 1).all()


def test_a_whole_plane_is_one_range_even_if_opaque() -> None:
    assert list(token_ranges(Plane("l", 40, 0), 4, 0, 4)) == [(0, 40)]
    assert list(token_ranges(Plane("l", 40, 2), 4, 0, 4)) == [(0, 40)]


@pytest.mark.parametrize("plane", [Plane("state", 64, 0), Plane("packed", 6, 1)])
def test_an_opaque_plane_refuses_to_be_cut_at_once(plane: Plane) -> None:
    # Before the first range is asked for: nobody may see half of an answer.
    with pytest.raises(InvalidError, match=f"plane '{plane.name}' is opaque"):
        token_ranges(plane, 4, 0, 3)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 2), (3, 2), (-1, 2), (0, 5), (4, 5)])
def test_a_token_range_outside_the_chunk_is_refused(first: int, last: int) -> None:
    with pytest.raises(InvalidError, match="token range"):
        token_ranges(Plane("l", 64, 2), 4, first, last)


# Heads


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "shards"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 4, [(0, 1)] * 4),
    ],
)
def test_heads_are_split_over_ranks_and_replicated_if_there_are_too_few(
    kv_heads: int, ranks: int, shards: list[tuple[int, int]]
) -> None:
    assert head_shards(kv_heads, ranks) == tuple(HeadShard(*shard) for shard in shards)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 3), (3, 8), (6, 4), (0, 1), (1, 0), (-8, -2)])
def test_heads_that_do_not_divide_are_refused(kv_heads: int, ranks: int) -> None:
    with pytest.raises(InvalidError, match="cannot be split"):
        head_shards(kv_heads, ranks)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("sources", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_resharding_gives_every_rank_the_bytes_that_numpy_slices(
    kv_heads: int, sources: int, ranks: int
) -> None:
    array = kv(kv_heads)
    # Who holds what, said once more without the code under test.
    held, wanted = (
        [
            array[rank * kv_heads // count : -(-(rank + 1) * kv_heads // count)]
            for rank in range(count)
        ]
        for count in (sources, ranks)
    )
    head_bytes = array[0].nbytes
    for rank in range(ranks):
        target = np.full(wanted[rank].nbytes, 0xEE, np.uint8)
        covered = np.zeros(target.nbytes, np.uint8)
        for piece in reshard(kv_heads, head_bytes, sources, rank, ranks):
            stored = raw(held[piece.source])
            assert piece.source_offset + piece.nbytes <= len(stored)
            moved = stored[piece.source_offset : piece.source_offset + piece.nbytes]
            target[piece.offset : piece.offset + piece.nbytes] = np.frombuffer(moved, np.uint8)
            covered[piece.offset : piece.offset + piece.nbytes] += 1
        assert (covered == 1).all()
        assert target.tobytes() == raw(wanted[rank])


def test_resharding_moves_whole_runs_of_heads_not_single_ones() -> None:
    assert reshard(8, 10, 2, 0, 1) == [Piece(0, 0, 0, 40), Piece(1, 0, 40, 40)]
    assert reshard(8, 10, 1, 1, 2) == [Piece(0, 40, 0, 40)]
    assert reshard(2, 10, 8, 3, 4) == [Piece(4, 0, 0, 10)]


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(InvalidError):
        reshard(8, 16, 2, rank, ranks)


@pytest.mark.parametrize("head_bytes", [0, -16])
def test_a_head_without_bytes_is_refused(head_bytes: int) -> None:
    with pytest.raises(InvalidError, match="head"):
        reshard(8, head_bytes, 2, 0, 2)


# What is refused


@pytest.mark.parametrize("name", ["", None, 7, b"l0", "\ud800"])
def test_a_plane_or_part_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidError, match="a plane needs a name"):
        Plane(name, 8, 0)
    with pytest.raises(InvalidError, match="a part needs a name"):
        Part(name, (Plane("l0", 8, 0),))


@pytest.mark.parametrize("nbytes", [0, -8, 8.0, True, None, np.int64(8), NBYTES_MAX + 1])
def test_a_plane_of_impossible_size_is_refused(nbytes: Any) -> None:
    with pytest.raises(InvalidError, match="plane 'l0' has"):
        Plane("l0", nbytes, 0)


@pytest.mark.parametrize("runs", [-1, 3, 16, 1.0, True, None, 2**32])
def test_runs_that_do_not_divide_a_plane_are_refused(runs: Any) -> None:
    with pytest.raises(InvalidError, match="plane 'l0'"):
        Plane("l0", 8, runs)


@pytest.mark.parametrize(
    ("planes", "text"),
    [
        ((), "has 0 planes"),
        ([Plane("a", 1, 0)], "must be a tuple"),
        (None, "must be a tuple"),
        ((Plane("a", 1, 0), Plane("a", 2, 0)), "names a plane twice"),
        ((Plane("a", NBYTES_MAX, 0), Plane("b", 1, 0)), "bytes, over"),
        (tuple(Plane(str(i), 1, 0) for i in range(PLANES_MAX + 1)), "planes; 1 to"),
    ],
    ids=["none", "a list", "None", "a name twice", "too large", "too many"],
)
def test_planes_that_make_no_part_are_refused(planes: Any, text: str) -> None:
    with pytest.raises(InvalidError, match=text):
        Part("p", planes)


@pytest.mark.parametrize("field", ["kv_heads", "head_dim", "itemsize", "tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_portable_part_without_heads_or_tokens_is_refused_by_name(field: str, value: int) -> None:
    sizes = {"kv_heads": 1, "head_dim": 1, "itemsize": 1, "tokens": 1, field: value}
    with pytest.raises(InvalidError, match=field):
        portable("p", layers=("l",), **sizes)
