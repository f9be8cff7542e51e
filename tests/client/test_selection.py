"""Any layers, any token range, any shape of destination: as a NumPy index would have it."""

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.extents import RUN, PartFormat, copy_and_sum
from kvpool.client.selection import cut, destinations, scatter, select_chunks
from kvpool.proto.chunk import sum_seed
from kvpool.proto.errors import InvalidError
from kvpool.proto.layout import Part, Plane
from kvpool.proto.outcomes import Outcome
from tests.client.samples import namespace

TOKENS = 8
KEY = bytes(range(32))


@st.composite
def cuts(draw: Any) -> tuple[Part, list[str], int, int]:
    """A part whose planes differ in size and runs, some of its layers, and a range of 3 chunks."""
    runs = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4))
    planes = tuple(
        Plane(f"p{i}", count * width * TOKENS, count) for i, (count, width) in enumerate(runs)
    )
    layers = draw(st.lists(st.sampled_from([p.name for p in planes]), min_size=1, max_size=5))
    start = draw(st.integers(0, 3 * TOKENS - 1))
    end = draw(st.integers(start + 1, 3 * TOKENS))
    return Part("part", planes), layers, start, end


def expected(part: Part, payload: Any, layers: list[str], first: int, last: int) -> list[Any]:
    out = []
    for name in layers:
        i = part.plane_index(name)
        plane = payload[part.offsets()[i] : part.offsets()[i + 1]]
        runs = plane.reshape(part.planes[i].runs, TOKENS, -1)
        out.append(runs[:, first:last].reshape(-1))
    return out


@given(cuts(), st.sampled_from(["one", "per chunk", "per plane"]), st.booleans())
def test_a_selection_delivers_what_an_index_would(
    asked: tuple[Part, list[str], int, int], shape: str, checksum: bool
) -> None:
    part, layers, start, end = asked
    space = namespace(part, layout="native:test", chunk_tokens=TOKENS)
    form = PartFormat.of(space, space.digest("t"), 0)
    selections = select_chunks(part, TOKENS, layers, start, end)
    rng = np.random.default_rng(0)
    wanted, extents = [], []
    for chunk, _ in enumerate(selections, start // TOKENS):
        payload = rng.integers(0, 256, part.nbytes, np.uint8)
        low, high = max(start - chunk * TOKENS, 0), min(end - chunk * TOKENS, TOKENS)
        wanted.append(expected(part, payload, layers, low, high))
        extent = np.zeros(form.extent_bytes, np.uint8)
        sums = form.write_payload(extent, KEY, [payload], checksum)
        form.write_head(extent, KEY, 7, sums)
        extents.append(extent)
    into: Any = [[np.zeros(plane.size, np.uint8) for plane in chunk] for chunk in wanted]
    flat = np.zeros(sum(plane.size for chunk in wanted for plane in chunk), np.uint8)
    if shape == "one":
        targets = destinations(flat, selections)
    elif shape == "per chunk":
        into = [np.zeros(s.nbytes, np.uint8) for s in selections]
        targets = destinations(into, selections)
    else:
        targets = destinations(into, selections)
    for extent, selection, target in zip(extents, selections, targets, strict=True):
        assert form.deliver(extent, KEY, 7, selection, target, True) == (Outcome.HIT, checksum)
        again = [np.zeros_like(view) for view in target]
        scatter(extent[form.prologue :], selection, again)
        assert all(np.array_equal(a, b) for a, b in zip(again, target, strict=True))
    if shape == "one":
        landed = [flat]
    else:
        landed = into if shape == "per chunk" else [plane for chunk in into for plane in chunk]
    assert np.array_equal(
        np.concatenate(landed), np.concatenate([plane for chunk in wanted for plane in chunk])
    )


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [RUN - 1],
        [RUN, 1, RUN + 1],
        [3 * RUN + 17, 5, 7],
        [RUN // 3] * 7,
        [1, 2 * RUN - 1, 1, RUN // 2, RUN // 2 - 1, 9],
    ],
)
def test_the_sums_of_a_copy_are_those_of_its_planes(sizes: list[int]) -> None:
    source = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    target = np.zeros_like(source)
    seed = sum_seed(KEY, 3)
    landed = copy_and_sum(target, source, sizes, seed)
    assert landed == [xxhash.xxh3_64_intdigest(plane, seed) for plane in cut(source, sizes)]
    assert np.array_equal(source, target)


def test_a_plane_count_of_buffers_is_needed_where_planes_are_given() -> None:
    part = Part("part", (Plane("a", 8, 1), Plane("b", 16, 1)))
    selections = select_chunks(part, TOKENS, None, 0, TOKENS)
    with pytest.raises(InvalidError, match=r"2 buffers of 16, 8 bytes .* 2 buffers of 8, 16 bytes"):
        destinations([[bytearray(16), bytearray(8)]], selections)
    assert destinations([(bytearray(8), bytearray(16))], selections)
    with pytest.raises(InvalidError, match="1 bytes was given for 24"):
        destinations(bytearray(1), selections)
