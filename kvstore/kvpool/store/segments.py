"""When a size class takes over a segment, and which: the least recently used that nothing holds.

Decides only, for any tier whose chunks lie in segments; the tier evicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.store.allocator import SlabAllocator
from kvpool.store.index import Index, Rows

_TRIES = 32
"""Segments that are looked into before giving up."""


class Tier(Protocol):
    """Chunks in segments, and when each was last used."""

    @property
    def index(self) -> Index: ...

    @property
    def slabs(self) -> SlabAllocator: ...

    @property
    def used_at(self) -> npt.NDArray[np.float64]:
        """By row."""

    def segments_of(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The allocator's segment of each address."""


class Turns:
    """When a class may take over an older segment: once per segment's worth of its evictions.

    Otherwise a class that came late would live in its first segment for ever.
    """

    def __init__(self) -> None:
        self._evictions: dict[int, int] = {}  # by class, since it last looked at the others

    def evicted(self, slot: int, chunks: int) -> None:
        """For a chunk of class `slot`, so many of its own went."""
        self._evictions[slot] = self._evictions.get(slot, 0) + chunks

    def due(self, slot: int, slabs: SlabAllocator) -> bool:
        """Whether it is the class's turn now, which is over then."""
        if self._evictions.get(slot, 0) < slabs.segment_bytes // slot:
            return False
        self._evictions[slot] = 0
        return True


def to_empty(tier: Tier, slot: int, before: float, may_go: Callable[[Rows], bool]) -> list[int]:
    """The rows that must go for one more segment of class `slot`: its own, and all below them.

    Empty if every segment of another class was used at or after `before`, holds what is leased,
    pinned, in no row (being written, say) or, all together, may not go, or is above such.
    """
    others = tier.slabs.used_segments(slot)
    if not len(others):
        return []
    segments, rows = _extents_by_segment(tier)
    last_use = _last_uses(tier, segments, rows)
    order = others[np.argsort(last_use[others], kind="stable")]
    cheapest: list[int] = []
    reached = -math.inf
    for segment in order[last_use[order] < before][:_TRIES].tolist():
        if cheapest and last_use[segment] > reached:
            break
        first, end = np.searchsorted(segments, [segment, segment + 1])
        doomed = _with_descendants(tier.index, np.unique(rows[first:end]), len(cheapest))
        if doomed and may_go(np.array(doomed, np.intp)):
            # A chain's segments were all used at once: the one at its end costs least.
            cheapest, reached = doomed, float(last_use[segment])
    return cheapest


def _extents_by_segment(tier: Tier) -> tuple[npt.NDArray[np.int64], Rows]:
    """(segment, row) of every extent that is in a row, ascending by segment."""
    index = tier.index
    live = index.live_rows()
    segments, rows = [], []
    for part, extents in enumerate(index.extents):
        here = live[index.resident[live] >> np.uint64(part) & 1 != 0]
        segments.append(tier.segments_of(extents[here, 0]))
        rows.append(here)
    segment, row = np.concatenate(segments), np.concatenate(rows)
    order = np.argsort(segment, kind="stable")
    return segment[order], row[order]


def _last_uses(tier: Tier, segments: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.float64]:
    """By segment: when it was last used, infinity if something in it is held."""
    held = (tier.index.leases[rows] != 0) | (tier.index.pins[rows] != 0)
    used = tier.slabs.used_slots()
    last_use = np.full(len(used), -math.inf)
    np.maximum.at(last_use, segments, np.where(held, math.inf, tier.used_at[rows]))
    last_use[np.bincount(segments, minlength=len(used)) != used] = math.inf
    return last_use


def _with_descendants(index: Index, rows: Rows, limit: int) -> list[int]:
    """`rows` and all below; none if something is held, or if they are `limit` (0: any number)."""
    found: list[int] = rows.tolist()
    seen = set(found)
    for row in found:
        if index.leases_at[row] or index.pins_at[row] or len(found) >= limit > 0:
            return []
        below = [child for child in index.children_of(row) if child not in seen]
        seen.update(below)
        found += below
    return found
