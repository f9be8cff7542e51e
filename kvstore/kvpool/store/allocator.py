"""Where extents of one tier may lie: a slab allocator over addresses, without bytes or I/O.

The space ``[0, regions * region_bytes)`` is cut into segments of equal size. A segment is free
or serves one size class; it is cut into slots of that class from its start, so that no slot ever
crosses a segment, and no segment a region. Emptying a segment is the caller's decision:

    region   |                 0                 |                 1                 |
    segment  |    0    |    1    |    2    |    3    |    4    |  ...
             |##..#.##-|  free   |#.#######|  # used slot  . free slot  - tail, too short
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from kvpool.proto.errors import InvalidError, TooLargeError
from kvpool.store.sorting import ascending, run_starts

ALIGN_BYTES = 64
"""Every address is a multiple of a cache line."""
PAGE_BYTES = 4096
"""Segments, and slots from `PAGED_FROM` on, are whole pages (direct I/O needs that)."""
PAGED_FROM = 64 << 10
_STEPS_LOG2 = 5
"""32 classes from one power of two to the next: steps of at most 1/32. Payloads are often a power
of two, and their extents lie just above it: coarser steps would waste most of a step on each."""
_FEW = 16
"""Up to here plain integers are faster than some thirty array operations (measured)."""

Integers = NDArray[np.int64]
Addresses = NDArray[np.int64]


def segment_size(region_bytes: int, ideal_bytes: int) -> int:
    """The segment, in bytes, that splits a region evenly: the ideal or somewhat more.

    Whole pages, so a region of ``region_bytes // segment * segment`` loses less than a page per
    segment. A region below the ideal becomes a single segment.
    Raises `InvalidError` for a region without a whole page.
    """
    if region_bytes < PAGE_BYTES:
        raise InvalidError(f"a region of {region_bytes} bytes is below one page of {PAGE_BYTES}")
    segments = max(1, region_bytes // ideal_bytes)
    return max(PAGE_BYTES, region_bytes // segments // PAGE_BYTES * PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class SlabStatistics:
    """Figures of one moment, in bytes unless the name says otherwise."""

    capacity_bytes: int
    """The whole space. What is neither used nor free is lost in the tails of segments."""
    used_bytes: int
    """Slots that are handed out, each with the full size of its class."""
    free_bytes: int
    """Free slots of segments that serve a class, and free segments."""
    largest_hole_bytes: int
    """The largest extent that `allocate` could return now."""
    free_segments: int
    segments_by_class: dict[int, int]
    """Number of segments by the slot size that they serve."""


class _SizeClass:
    """The segments that serve one slot size: a row each, so that batches need no loop.

    A row's free slots are a stack, ``stack[row, :free[row]]``. Its entries are kept as the
    difference from the first order (highest slot at the bottom): fresh zeroed memory is a valid,
    full stack, and taking a segment costs nothing however many slots it has.
    """

    __slots__ = (
        "free",
        "free_slots",
        "idle",
        "open",
        "segment",
        "slot_bytes",
        "slots",
        "stack",
        "used",
    )

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = slots  # in each segment
        self.free_slots = 0  # in all its segments
        # Segments with free slots, lowest first, each at most once. Full segments leave at once;
        # those given back linger until they come up, which is before the class takes another.
        self.open: list[int] = []
        self.idle: list[int] = []
        self.segment = np.empty(0, np.int64)  # by row; -1 where the row is idle
        self.free = np.empty(0, np.int32)
        self.stack = np.empty((0, slots), np.int32)
        self.used = np.empty((0, slots), np.bool_)

    def add(self, segment: int) -> int:
        """Serve an empty segment; returns its row."""
        if not self.idle:
            self._resize(len(self.segment) * 3 // 2 + 1)
        row = self.idle.pop()
        self.segment[row] = segment
        self.free[row] = self.slots
        self.free_slots += self.slots
        heappush(self.open, segment)
        return row

    def remove(self, rows: Integers) -> None:
        """Stop serving these rows' segments, which must be empty."""
        self.segment[rows] = -1
        self.idle.extend(rows.tolist())
        self.free_slots -= len(rows) * self.slots

    def shrink(self) -> bool:
        """Give memory back once half of the rows are idle; says whether rows moved."""
        in_use = len(self.segment) - len(self.idle)
        if 2 * in_use >= len(self.segment):
            return False
        self._resize(in_use)
        return True

    def take_one(self, row: int) -> int:
        """Hand out a slot of a row that has one; returns its number."""
        position = int(self.free[row]) - 1
        slot = self.slots - 1 - position - int(self.stack[row, position])
        self.used[row, slot] = True
        self.free[row] = position
        self.free_slots -= 1
        return slot

    def put_one(self, row: int, slot: int) -> None:
        """Take a slot back."""
        position = int(self.free[row])
        self.stack[row, position] = self.slots - 1 - position - slot
        self.used[row, slot] = False
        self.free[row] = position + 1
        self.free_slots += 1

    def claim(self, row: int, slots: Integers) -> None:
        """Hand out certain free slots of a row."""
        self.used[row, slots] = True
        free = np.flatnonzero(~self.used[row])[::-1]
        self.stack[row, : len(free)] = self.slots - 1 - np.arange(len(free)) - free
        self.free_slots -= int(self.free[row]) - len(free)
        self.free[row] = len(free)

    def take(self, rows: Integers, counts: Integers) -> Integers:
        """Hand out ``counts[i]`` slots of each row; returns their numbers."""
        row = np.repeat(rows, counts)
        position = self.free[row] - 1 - _ranks(counts)
        slot: Integers = self.slots - 1 - position - self.stack[row, position]
        self.used[row, slot] = True
        self.free[rows] -= counts.astype(np.int32)
        self.free_slots -= len(slot)
        return slot

    def put(self, row: Integers, slot: Integers) -> tuple[Integers, NDArray[np.bool_]]:
        """Take slots back, rows ascending; returns each row once, and whether it had been full."""
        rows, counts = np.unique(row, return_counts=True)
        position = self.free[row] + _ranks(counts)
        self.stack[row, position] = self.slots - 1 - position - slot
        self.used[row, slot] = False
        were_full = self.free[rows] == 0
        self.free[rows] += counts.astype(np.int32)
        self.free_slots += len(slot)
        return rows, were_full

    def check_integrity(self, rows: Integers) -> None:
        for row in rows.tolist():
            position = np.arange(self.free[row])
            slots = self.slots - 1 - position - self.stack[row, : self.free[row]]
            free = np.flatnonzero(~self.used[row])
            assert np.array_equal(np.sort(slots), free), f"stack of segment {self.segment[row]}"

    def _resize(self, rows: int) -> None:
        """Move the rows in use to the front of arrays of another size."""
        kept = np.flatnonzero(self.segment >= 0)
        segment, free = np.full(rows, -1, np.int64), np.zeros(rows, np.int32)
        stack, used = np.zeros((rows, self.slots), np.int32), np.zeros((rows, self.slots), np.bool_)
        segment[: len(kept)], free[: len(kept)] = self.segment[kept], self.free[kept]
        stack[: len(kept)], used[: len(kept)] = self.stack[kept], self.used[kept]
        self.segment, self.free, self.stack, self.used = segment, free, stack, used
        self.idle = list(range(rows - 1, len(kept) - 1, -1))


class SlabAllocator:
    """Hands out addresses of one tier's space; starts empty, grows by `add_region`.

    Not thread-safe. Memory: 5 bytes per slot of the segments in use (up to twice that while their
    number changes), and 16 to 100 bytes per segment.
    """

    def __init__(self, region_bytes: int, segment_bytes: int) -> None:
        """REQUIRES: segments are whole pages and a region is a whole number of segments."""
        if segment_bytes <= 0 or segment_bytes % PAGE_BYTES:
            raise ValueError(f"segment_bytes={segment_bytes} is no multiple of {PAGE_BYTES}")
        if region_bytes <= 0 or region_bytes % segment_bytes:
            raise ValueError(f"region_bytes={region_bytes} is no multiple of {segment_bytes=}")
        self.region_bytes = region_bytes
        self.segment_bytes = segment_bytes
        self.regions = 0
        self._slot_bytes = np.empty(0, np.int64)  # by segment; 0: free
        self._row = np.empty(0, np.int64)  # by segment: its row in its class
        self._free_segments: list[int] = []  # heap, lowest first
        self._classes: dict[int, _SizeClass] = {}  # by slot size; those with segments

    @property
    def capacity_bytes(self) -> int:
        return self.regions * self.region_bytes

    def add_region(self) -> int:
        """Append `region_bytes` of free space; returns the number of the new region."""
        first, added = len(self._slot_bytes), self.region_bytes // self.segment_bytes
        self._slot_bytes = np.concatenate([self._slot_bytes, np.zeros(added, np.int64)])
        self._row = np.concatenate([self._row, np.zeros(added, np.int64)])
        # Higher numbers than any before, in ascending order, at the end: still a heap.
        self._free_segments.extend(range(first, first + added))
        self.regions += 1
        return self.regions - 1

    def slot_bytes(self, nbytes: int) -> int:
        """The size class for `nbytes`: the smallest slot that holds them.

        Slots are multiples of 64 bytes, above 64 KiB of 4096, and exceed what they hold by less
        than 1/32 or one such multiple. Raises `TooLargeError` where no segment could hold one.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: there is no slot for nothing")
        if nbytes > self.segment_bytes:
            raise TooLargeError(
                f"{nbytes} bytes exceed a segment of {self.segment_bytes}: "
                "use smaller chunks, or give the tier a larger segment size"
            )
        align = PAGE_BYTES if nbytes > PAGED_FROM else ALIGN_BYTES
        step = max(align, 1 << max(0, (nbytes - 1).bit_length() - 1 - _STEPS_LOG2))
        return min(-(-nbytes // step) * step, self.segment_bytes)

    def allocate(self, nbytes: int, count: int) -> Addresses:
        """Up to `count` addresses of slots that hold `nbytes` each.

        Shape ``(k,)``, ``0 <= k <= count``; fewer than `count` when there is no room, and then
        every free slot of the class and every free segment has been used. Partly used segments
        come first, so that others stay free for other classes.
        Raises `TooLargeError` as `slot_bytes` does.
        """
        size = self.slot_bytes(nbytes)
        return self._allocate_few(size, count) if count <= _FEW else self._allocate(size, count)

    def free(self, addresses: Addresses) -> None:
        """Take slots back; a segment without used slots is free for any class at once.

        Raises `ValueError`, and changes nothing, for an address that is not in use or comes twice.
        """
        addresses = np.asarray(addresses, np.int64)
        if len(addresses) <= _FEW:
            self._free_few(addresses.tolist())
        else:
            self._free(addresses)

    def claim(self, addresses: Addresses, nbytes: int) -> NDArray[np.bool_]:
        """Hands out these addresses for `nbytes` each, as they were in an earlier life.

        False, and nothing changed, for those where it cannot be: not a slot of the class, in a
        segment that serves another class, taken, or named before in the same call.
        """
        size = self.slot_bytes(nbytes)
        inside = (addresses >= 0) & (addresses < self.capacity_bytes)
        segments, offsets = np.divmod(np.where(inside, addresses, 0), self.segment_bytes)
        slots, rest = np.divmod(offsets, size)
        good: NDArray[np.bool_] = inside & (rest == 0) & (slots < self.segment_bytes // size)
        classes = self._slot_bytes[segments]
        good &= (classes == 0) | (classes == size)
        chosen = np.flatnonzero(good)
        # By segment, with what is named twice side by side, and in the order of the call.
        numbers, places = ascending(addresses[chosen] // ALIGN_BYTES)
        chosen = chosen[places]
        again = np.flatnonzero(numbers[1:] == numbers[:-1]) + 1
        good[chosen[again]] = False
        chosen, numbers = np.delete(chosen, again), np.delete(numbers, again)
        if not len(chosen):
            return good
        kind = self._classes.get(size)
        if kind is None:
            kind = self._classes[size] = _SizeClass(size, self.segment_bytes // size)
        held = numbers * ALIGN_BYTES // self.segment_bytes
        starts = run_starts(held)
        for segment, mine in zip(held[starts].tolist(), np.split(chosen, starts[1:]), strict=True):
            if not self._slot_bytes[segment]:
                self._slot_bytes[segment] = size
                self._row[segment] = kind.add(segment)
            row = int(self._row[segment])
            taken = kind.used[row, slots[mine]]
            good[mine[taken]] = False
            kind.claim(row, slots[mine[~taken]])
        self._free_segments = np.flatnonzero(self._slot_bytes == 0).tolist()  # ascending: a heap
        in_use = np.sort(kind.segment[kind.segment >= 0])
        kind.open = in_use[kind.free[self._row[in_use]] > 0].tolist()
        return good

    def free_slots(self, nbytes: int) -> int:
        """How many slots for `nbytes` can be allocated without evicting anything."""
        size = self.slot_bytes(nbytes)
        kind = self._classes.get(size)
        in_class = kind.free_slots if kind else 0
        return in_class + len(self._free_segments) * (self.segment_bytes // size)

    def segments_of(self, addresses: Addresses) -> Integers:
        """The segment of each address, same shape. `ValueError` for one outside the space."""
        addresses = np.asarray(addresses, np.int64)
        outside = (addresses < 0) | (addresses >= self.capacity_bytes)
        if outside.any():
            raise ValueError(f"address {addresses[outside][0]} is outside the tier")
        return addresses // self.segment_bytes

    def used_segments(self, except_class: int) -> Integers:
        """Segments, ascending, that serve another class than the one for `except_class` bytes.

        Emptying any of them makes room for that class.
        """
        size = self.slot_bytes(except_class)
        return np.flatnonzero((self._slot_bytes != 0) & (self._slot_bytes != size))

    def used_slots(self) -> Integers:
        """By segment: how many of its slots are in use."""
        used = np.zeros(len(self._slot_bytes), np.int64)
        for kind in self._classes.values():
            rows = np.flatnonzero(kind.segment >= 0)
            used[kind.segment[rows]] = kind.slots - kind.free[rows]
        return used

    def segment_range(self, segment: int) -> tuple[int, int]:
        """First address of the segment, and the first behind it. `ValueError` if there is none."""
        if not 0 <= segment < len(self._slot_bytes):
            raise ValueError(f"there is no segment {segment}, only {len(self._slot_bytes)}")
        return segment * self.segment_bytes, (segment + 1) * self.segment_bytes

    def statistics(self) -> SlabStatistics:
        kinds = self._classes.values()
        in_class = {k.slot_bytes: len(k.segment) - len(k.idle) for k in kinds}
        free_bytes = sum(k.free_slots * k.slot_bytes for k in kinds)
        slots_bytes = sum(in_class[k.slot_bytes] * k.slots * k.slot_bytes for k in kinds)
        hole_bytes = max((k.slot_bytes for k in kinds if k.free_slots), default=0)
        return SlabStatistics(
            capacity_bytes=self.capacity_bytes,
            used_bytes=slots_bytes - free_bytes,
            free_bytes=free_bytes + len(self._free_segments) * self.segment_bytes,
            largest_hole_bytes=self.segment_bytes if self._free_segments else hole_bytes,
            free_segments=len(self._free_segments),
            segments_by_class=dict(sorted(in_class.items())),
        )

    def check_integrity(self) -> None:
        """`AssertionError` if the books contradict each other. Costs O(slots)."""
        free = np.flatnonzero(self._slot_bytes == 0).tolist()
        assert sorted(self._free_segments) == free, "free segments and segment table differ"
        assert len(self._slot_bytes) * self.segment_bytes == self.capacity_bytes
        for size, kind in self._classes.items():
            segments = kind.segment[kind.segment >= 0]
            rows = self._row[segments]
            assert size == kind.slot_bytes and kind.slots == self.segment_bytes // size
            assert len(segments) > 0, f"class {size} is empty but kept"
            assert sorted(kind.idle) == np.flatnonzero(kind.segment < 0).tolist()
            assert (kind.segment[rows] == segments).all(), f"rows of class {size} are mixed up"
            assert np.array_equal(np.sort(segments), np.flatnonzero(self._slot_bytes == size))
            assert kind.free_slots == kind.free[rows].sum(), f"free slots of class {size}"
            kind.check_integrity(rows)
            opened = [segment for segment in kind.open if self._slot_bytes[segment] == size]
            assert sorted(opened) == np.sort(segments[kind.free[rows] > 0]).tolist()

    def _open_segment(self, size: int) -> int | None:
        """The first segment with a free slot of this class; takes a free segment if it must."""
        kind = self._classes.get(size)
        while kind and kind.open:
            if self._slot_bytes[kind.open[0]] == size:
                return kind.open[0]
            heappop(kind.open)
        if not self._free_segments:
            return None
        if kind is None:
            kind = self._classes[size] = _SizeClass(size, self.segment_bytes // size)
        segment = heappop(self._free_segments)
        self._slot_bytes[segment] = size
        self._row[segment] = kind.add(segment)
        return segment

    def _allocate_few(self, size: int, count: int) -> Addresses:
        addresses: list[int] = []
        while len(addresses) < count and (segment := self._open_segment(size)) is not None:
            kind, row = self._classes[size], int(self._row[segment])
            addresses.append(segment * self.segment_bytes + kind.take_one(row) * size)
            if kind.free[row] == 0:
                heappop(kind.open)
        return np.array(addresses, np.int64)

    def _allocate(self, size: int, count: int) -> Addresses:
        segments, counts = [], []
        missing = count
        while missing > 0 and (segment := self._open_segment(size)) is not None:
            kind = self._classes[size]
            free = int(kind.free[self._row[segment]])
            taken = min(missing, free)
            if taken == free:
                heappop(kind.open)
            segments.append(segment)
            counts.append(taken)
            missing -= taken
        if not segments:
            return np.empty(0, np.int64)
        of_segment, per_segment = np.array(segments, np.int64), np.array(counts, np.int64)
        slots = self._classes[size].take(self._row[of_segment], per_segment)
        return np.repeat(of_segment * self.segment_bytes, per_segment) + slots * size

    def _free_few(self, addresses: list[int]) -> None:
        if len(set(addresses)) < len(addresses):
            raise _not_in_use(next(a for a in addresses if addresses.count(a) > 1))
        for segment, slot in [self._locate_one(address) for address in addresses]:
            kind, row = self._classes[int(self._slot_bytes[segment])], int(self._row[segment])
            if kind.free[row] == 0:
                heappush(kind.open, segment)
            kind.put_one(row, slot)
            if kind.free[row] == kind.slots:
                self._release(kind, self._row[[segment]])

    def _free(self, addresses: Addresses) -> None:
        # Sorted, so that neighbours show what comes twice and segments are visited in order.
        addresses = np.sort(addresses)
        segments, slots, sizes = self._locate(addresses)
        for size in np.unique(sizes).tolist():
            chosen = sizes == size
            self._put(self._classes[size], segments[chosen], slots[chosen])

    def _locate_one(self, address: int) -> tuple[int, int]:
        """Segment and slot of a used address; `ValueError` if it is not in use."""
        if not 0 <= address < self.capacity_bytes:
            raise _not_in_use(address)
        segment, offset = divmod(address, self.segment_bytes)
        kind = self._classes.get(int(self._slot_bytes[segment]))
        if kind is None:
            raise _not_in_use(address)
        slot, rest = divmod(offset, kind.slot_bytes)
        # The tail of a segment may begin where one more slot would.
        if rest or slot >= kind.slots or not kind.used[self._row[segment], slot]:
            raise _not_in_use(address)
        return segment, slot

    def _locate(self, addresses: Addresses) -> tuple[Integers, Integers, Integers]:
        """Segment, slot and slot size of used addresses; `ValueError` if one is not in use."""
        segments = self.segments_of(addresses)
        sizes = self._slot_bytes[segments]
        slots, rest = np.divmod(addresses - segments * self.segment_bytes, np.maximum(sizes, 1))
        good = (sizes > 0) & (rest == 0)
        good[1:] &= addresses[1:] != addresses[:-1]
        for size in np.unique(sizes[good]).tolist():
            kind, chosen = self._classes[size], np.flatnonzero(good & (sizes == size))
            slot = np.minimum(slots[chosen], kind.slots - 1)
            good[chosen] = kind.used[self._row[segments[chosen]], slot] & (slot == slots[chosen])
        if not good.all():
            raise _not_in_use(int(addresses[~good][0]))
        return segments, slots, sizes

    def _put(self, kind: _SizeClass, segments: Integers, slots: Integers) -> None:
        row = self._row[segments]
        order = np.argsort(row, kind="stable")
        rows, were_full = kind.put(row[order], slots[order])
        empty = kind.free[rows] == kind.slots
        for segment in kind.segment[rows[were_full]].tolist():
            heappush(kind.open, segment)
        if empty.any():
            self._release(kind, rows[empty])

    def _release(self, kind: _SizeClass, rows: Integers) -> None:
        """Make the segments of these rows free for any class."""
        released = kind.segment[rows]
        self._slot_bytes[released] = 0
        for segment in released.tolist():
            heappush(self._free_segments, segment)
        kind.remove(rows)
        if len(kind.idle) == len(kind.segment):
            del self._classes[kind.slot_bytes]
        elif kind.shrink():
            in_use = kind.segment[kind.segment >= 0]
            self._row[in_use] = np.arange(len(in_use))


def _not_in_use(address: int) -> ValueError:
    return ValueError(f"address {address} is not in use: freed twice, or never allocated here")


def _ranks(counts: Integers) -> Integers:
    """0, 1, … within each group of `counts`: ``[2, 3]`` gives ``[0, 1, 0, 1, 2]``."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
