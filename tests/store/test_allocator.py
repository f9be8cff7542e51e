"""The slab allocator: against a reference that keeps every extent in plain dicts and sets."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.proto.errors import InvalidError, TooLargeError
from kvpool.store.allocator import SlabAllocator, segment_size

KIB = 1024
MIB = 1024 * KIB
SEGMENT = 64 * KIB
REGION = 4 * SEGMENT


def slabs(
    regions: int = 1, region_bytes: int = REGION, segment_bytes: int = SEGMENT
) -> SlabAllocator:
    allocator = SlabAllocator(region_bytes, segment_bytes)
    for _ in range(regions):
        allocator.add_region()
    return allocator


# Classes


@given(st.integers(1, 64 * MIB))
def test_a_slot_holds_what_it_is_for_and_wastes_less_than_an_eighth(nbytes: int) -> None:
    slot = SlabAllocator(64 * MIB, 64 * MIB).slot_bytes(nbytes)
    assert slot >= nbytes
    assert slot - nbytes < max(4096 if nbytes > 1 << 16 else 64, nbytes / 32)


@given(st.integers(1, 64 * MIB))
def test_slots_are_aligned_to_cache_lines_and_large_ones_to_pages(nbytes: int) -> None:
    slot = SlabAllocator(64 * MIB, 64 * MIB).slot_bytes(nbytes)
    assert slot % (64 if slot < 64 * KIB else 4096) == 0


@given(st.integers(513, 64 * MIB))
def test_the_step_to_the_next_class_is_at_most_an_eighth(nbytes: int) -> None:
    allocator = SlabAllocator(128 * MIB, 128 * MIB)
    slot = allocator.slot_bytes(nbytes)
    assert allocator.slot_bytes(slot) == slot
    assert slot < allocator.slot_bytes(slot + 1) <= slot * 9 / 8


def test_what_exceeds_a_segment_is_too_large_and_the_text_says_what_to_do() -> None:
    allocator = slabs()
    for ask in (allocator.slot_bytes, lambda n: allocator.allocate(n, 1), allocator.free_slots):
        with pytest.raises(TooLargeError, match=r"65537 bytes .* 65536: use smaller chunks, or"):
            ask(SEGMENT + 1)


def test_what_fits_a_segment_is_accepted_even_if_its_class_would_not_fit() -> None:
    allocator = slabs(region_bytes=17 * 4096, segment_bytes=17 * 4096)
    assert allocator.slot_bytes(16 * 4096 + 1) == 17 * 4096
    assert allocator.allocate(17 * 4096, 2).tolist() == [0]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_there_is_no_slot_for_nothing(nbytes: int) -> None:
    with pytest.raises(ValueError, match="no slot"):
        slabs().slot_bytes(nbytes)


# Geometry


@given(st.integers(4096, 1 << 40), st.integers(4096, 1 << 34))
def test_a_region_is_split_into_equal_segments_and_loses_less_than_a_page_each(
    region: int, ideal: int
) -> None:
    segment = segment_size(region, ideal)
    assert segment % 4096 == 0
    count = region // segment
    assert region - count * segment < 4096 * count
    assert segment >= min(ideal, region) - 4095
    SlabAllocator(count * segment, segment)


def test_a_segment_is_the_ideal_where_that_divides_the_region() -> None:
    assert segment_size(1024 * MIB, 64 * MIB) == 64 * MIB
    assert segment_size(1024 * MIB, 100 * MIB) == 1024 * MIB // 10 // 4096 * 4096
    assert segment_size(48 * MIB, 64 * MIB) == 48 * MIB


def test_a_region_below_a_page_is_refused() -> None:
    with pytest.raises(InvalidError, match="below one page"):
        segment_size(4095, 4096)


@pytest.mark.parametrize(("region", "segment"), [(REGION + 4096, SEGMENT), (0, SEGMENT), (64, 64)])
def test_a_geometry_with_remainders_is_refused(region: int, segment: int) -> None:
    with pytest.raises(ValueError, match="is no multiple"):
        SlabAllocator(region, segment)


def test_without_a_region_there_is_no_room_and_with_more_there_is_more() -> None:
    allocator = SlabAllocator(REGION, SEGMENT)
    assert allocator.allocate(SEGMENT, 1).tolist() == []
    assert [allocator.add_region(), allocator.add_region()] == [0, 1]
    assert allocator.allocate(SEGMENT, 9).tolist() == [i * SEGMENT for i in range(8)]
    assert allocator.add_region() == 2
    assert allocator.allocate(SEGMENT, 1).tolist() == [8 * SEGMENT]


# Room


def test_a_batch_fills_partly_used_segments_before_it_takes_free_ones() -> None:
    allocator = slabs()
    first = allocator.allocate(16 * KIB, 3)
    assert first.tolist() == [0, 16 * KIB, 32 * KIB]
    assert allocator.allocate(16 * KIB, 3).tolist() == [48 * KIB, SEGMENT, SEGMENT + 16 * KIB]
    allocator.free(first[1:2])
    assert allocator.allocate(16 * KIB, 1).tolist() == [16 * KIB]


def test_a_full_class_returns_fewer_and_leaves_other_classes_alone() -> None:
    allocator = slabs()
    other = allocator.allocate(1 * KIB, 1)
    got = allocator.allocate(32 * KIB, 100)
    assert len(got) == 6 == len(np.unique(got // (32 * KIB)))
    assert len(allocator.allocate(32 * KIB, 1)) == 0
    assert len(allocator.allocate(1 * KIB, 100)) == 63
    assert not np.isin(other, got).any()


def test_a_slot_that_held_1_kib_accepts_another_class_again() -> None:
    allocator = slabs(region_bytes=SEGMENT)
    small = allocator.allocate(1 * KIB, 64)
    assert len(allocator.allocate(48 * KIB, 1)) == 0
    allocator.free(small[1:])
    assert len(allocator.allocate(48 * KIB, 1)) == 0
    allocator.free(small[:1])
    assert allocator.allocate(48 * KIB, 1).tolist() == [0]


def test_emptying_a_segment_of_another_class_makes_room_for_this_one() -> None:
    allocator = slabs()
    held = allocator.allocate(8 * KIB, 32)
    assert allocator.free_slots(20 * KIB) == 0
    assert allocator.used_segments(except_class=20 * KIB).tolist() == [0, 1, 2, 3]
    assert allocator.used_segments(except_class=8 * KIB).tolist() == []
    start, end = allocator.segment_range(2)
    inside = held[(held >= start) & (held < end)]
    assert np.array_equal(allocator.segments_of(inside), np.full(8, 2))
    allocator.free(inside)
    assert allocator.free_slots(20 * KIB) == 3
    got = allocator.allocate(20 * KIB, 4)
    assert got.tolist() == [start, start + 20 * KIB, start + 40 * KIB]


def test_one_batch_may_span_segments_in_whatever_order_the_class_got_them() -> None:
    allocator = slabs()
    first = allocator.allocate(2 * KIB, 3 * 32)
    allocator.free(first[: 2 * 32])
    held = np.concatenate([first[2 * 32 :], allocator.allocate(2 * KIB, 3 * 32)])
    assert len(np.unique(held)) == 4 * 32
    allocator.free(held[np.arange(len(held)) % 3 > 0])
    allocator.check_integrity()
    kept = held[::3]
    again = allocator.allocate(2 * KIB, 4 * 32)
    assert np.array_equal(np.unique(np.append(kept, again)), np.sort(held))


def test_memory_per_slot_stays_small_even_for_the_smallest_slots() -> None:
    allocator = slabs(region_bytes=64 * MIB, segment_bytes=MIB)
    tracemalloc.start()
    try:
        held = allocator.allocate(64, MIB)
        assert tracemalloc.get_traced_memory()[0] - held.nbytes <= 8 * MIB
        allocator.free(held[MIB // 16 :])
        assert tracemalloc.get_traced_memory()[0] - held.nbytes <= 8 * MIB / 16 + 64 * KIB
    finally:
        tracemalloc.stop()


# Our own bugs must show


@pytest.mark.parametrize(
    ("what", "addresses"),
    [
        ("freed twice in one call", [0, 0]),
        ("a free slot of a used segment", [0, 20 * KIB]),
        ("inside a slot", [64]),
        ("the tail of a segment", [60 * KIB]),
        ("a free segment", [3 * SEGMENT]),
        ("behind the space", [REGION]),
        ("below the space", [-20 * KIB]),
    ],
)
@pytest.mark.parametrize("others", [0, 30], ids=["few", "many"])
def test_freeing_what_is_not_in_use_raises_and_changes_nothing(
    what: str, addresses: list[int], others: int
) -> None:
    allocator = slabs()
    allocator.free(allocator.allocate(20 * KIB, 3)[1:2])
    rest = allocator.allocate(1 * KIB, others).tolist()
    before = allocator.statistics()
    with pytest.raises(ValueError, match=r"not in use|outside"):
        allocator.free(np.array(rest + addresses))
    assert allocator.statistics() == before, what
    allocator.check_integrity()


def test_freeing_twice_raises() -> None:
    allocator = slabs()
    keep, gone = allocator.allocate(20 * KIB, 2)
    allocator.free(np.array([gone]))
    with pytest.raises(ValueError, match=f"address {gone} is not in use"):
        allocator.free(np.array([gone]))
    allocator.free(np.array([keep]))
    with pytest.raises(ValueError, match=f"address {keep} is not in use"):
        allocator.free(np.array([keep]))


def test_a_segment_that_does_not_exist_has_no_range() -> None:
    with pytest.raises(ValueError, match="no segment 4"):
        slabs().segment_range(4)


# Figures


def test_the_figures_add_up_and_name_the_largest_hole() -> None:
    allocator = slabs()
    held = allocator.allocate(20 * KIB, 11)
    figures = allocator.statistics()
    assert (figures.capacity_bytes, figures.used_bytes) == (REGION, 220 * KIB)
    assert figures.segments_by_class == {20 * KIB: 4}
    assert (figures.free_bytes, figures.largest_hole_bytes) == (20 * KIB, 20 * KIB)
    allocator.free(held[:3])
    figures = allocator.statistics()
    assert figures.free_segments == 1
    assert (figures.free_bytes, figures.largest_hole_bytes) == (SEGMENT + 20 * KIB, SEGMENT)


class Allocations(RuleBasedStateMachine):
    """The reference knows each extent's address, size and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlabAllocator(REGION, SEGMENT)
        self.extents: dict[int, int] = {}  # address -> slot bytes

    @initialize(regions=st.integers(0, 2))
    def start(self, regions: int) -> None:
        for _ in range(regions):
            self.allocator.add_region()

    @precondition(lambda self: self.allocator.regions < 4)
    @rule()
    def grow(self) -> None:
        self.allocator.add_region()

    @rule(nbytes=st.integers(1, SEGMENT) | st.integers(8 * KIB, 32 * KIB), count=st.integers(0, 40))
    def allocate(self, nbytes: int, count: int) -> None:
        size = self.allocator.slot_bytes(nbytes)
        room = self.room(size)
        assert self.allocator.free_slots(nbytes) == room
        got = self.allocator.allocate(nbytes, count)
        assert got.dtype == np.int64 and len(got) == min(count, room)
        for address in got.tolist():
            assert address >= 0 and address + size <= self.allocator.regions * REGION
            assert address // REGION == (address + size - 1) // REGION
            assert address not in self.extents
            self.extents[address] = size

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.extents)), unique=True))
        self.free(chosen)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def empty_a_segment(self, data: st.DataObject) -> None:
        size = data.draw(st.sampled_from(sorted(set(self.extents.values()))))
        others = self.allocator.used_segments(except_class=size).tolist()
        serving = {a // SEGMENT for a, other in self.extents.items() if other != size}
        assert others == sorted(serving)
        if others:
            start, end = self.allocator.segment_range(data.draw(st.sampled_from(others)))
            self.free([a for a in self.extents if start <= a < end])
            assert len(self.allocator.allocate(size, 0)) == 0
            assert self.room(size) > 0

    @rule(data=st.data(), nbytes=st.integers(1, SEGMENT))
    def free_everything(self, data: st.DataObject, nbytes: int) -> None:
        self.free(data.draw(st.permutations(sorted(self.extents))))
        figures = self.allocator.statistics()
        segments = self.allocator.regions * (REGION // SEGMENT)
        assert (figures.used_bytes, figures.free_segments) == (0, segments)
        assert self.allocator.free_slots(SEGMENT) == segments
        per_segment = SEGMENT // self.allocator.slot_bytes(nbytes)
        assert self.allocator.free_slots(nbytes) == segments * per_segment

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def a_wrong_free_changes_nothing(self, data: st.DataObject) -> None:
        good = data.draw(st.sampled_from(sorted(self.extents)))
        before = self.allocator.statistics()
        for bad in (good + 1, good + 63, -64, self.allocator.capacity_bytes, good):
            for others in ([], [a for a in self.extents if a != good]):
                with pytest.raises(ValueError, match=r"not in use|outside"):
                    self.allocator.free(np.array([*others, good, bad]))
        with pytest.raises(TooLargeError):
            self.allocator.allocate(SEGMENT + 1, 1)
        assert self.allocator.statistics() == before

    @invariant()
    def extents_never_overlap(self) -> None:
        ordered = sorted(self.extents.items())
        for (address, size), (following, _) in pairwise(ordered):
            assert address + size <= following

    @invariant()
    def the_figures_are_the_reference(self) -> None:
        figures = self.allocator.statistics()
        assert figures.used_bytes == sum(self.extents.values())
        by_segment = {a // SEGMENT: size for a, size in self.extents.items()}
        assert figures.segments_by_class == dict(Counter(by_segment.values()))
        holes = [size for size in set(by_segment.values()) if self.room(size)]
        whole = len(by_segment) < self.allocator.regions * (REGION // SEGMENT)
        assert figures.largest_hole_bytes == (SEGMENT if whole else max(holes, default=0))
        self.allocator.check_integrity()

    def free(self, addresses: list[int]) -> None:
        self.allocator.free(np.array(addresses, np.int64))
        for address in addresses:
            del self.extents[address]

    def room(self, size: int) -> int:
        """Slots of this size in segments that serve it or nothing, by counting extents."""
        used = Counter(address // SEGMENT for address in self.extents)
        sizes = {address // SEGMENT: size for address, size in self.extents.items()}
        return sum(
            SEGMENT // size - used[segment]
            for segment in range(self.allocator.regions * (REGION // SEGMENT))
            if sizes.get(segment, size) == size
        )


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.data())
def test_slots_that_were_claimed_are_as_if_they_had_been_allocated(data: st.DataObject) -> None:
    sizes = (64, 200, 4096, 5000)
    first, again = SlabAllocator(1 << 16, 1 << 14), SlabAllocator(1 << 16, 1 << 14)
    first.add_region(), again.add_region()
    held: dict[int, list[int]] = {}
    for size in data.draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=40)):
        held.setdefault(size, []).extend(first.allocate(size, 3).tolist())
    for size, addresses in held.items():
        drop = data.draw(st.sets(st.sampled_from(addresses))) if addresses else set()
        first.free(np.array(sorted(drop), np.int64))
        held[size] = [address for address in addresses if address not in drop]
    for size, addresses in held.items():
        assert again.claim(np.array(addresses, np.int64), size).all()
    again.check_integrity()
    assert again.statistics() == first.statistics()
    for addresses in held.values():
        again.free(np.array(addresses, np.int64))
    again.check_integrity()
    assert again.statistics().used_bytes == 0


def test_claims_that_cannot_be_are_refused_and_take_nothing() -> None:
    slabs = SlabAllocator(1 << 16, 1 << 14)
    slabs.add_region()
    wanted = np.array([0, 0, 4096, 100, 1 << 16, -64, 1 << 14], np.int64)
    assert slabs.claim(wanted, 4096).tolist() == [True, False, True, False, False, False, True]
    assert slabs.claim(np.array([0, 64], np.int64), 64).tolist() == [False, False]
    assert slabs.claim(np.array([4096, 8192], np.int64), 4096).tolist() == [False, True]
    slabs.check_integrity()
    assert slabs.statistics().used_bytes == 4 * 4096
