"""Which segment another size class gives up: the least recently used one that nothing holds.

Decides only; `Room` evicts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.store.accounts import Account
from kvpool.store.index import Index, Rows

if TYPE_CHECKING:
    from kvpool.store.room import Room

_TRIES = 32
"""Segments that are looked into before giving up."""


def to_empty(room: Room, slot: int, account: Account, before: float) -> list[int]:
    """The rows that must go for one more segment of class `slot`: its own, and all below them.

    Empty if every segment of another class was used at or after `before`, holds what is leased,
    pinned, being written or of another tenant's reserve than `account`'s, or is above such.
    """
    others = room.slabs.used_segments(slot)
    if not len(others):
        return []
    segments, rows = _extents_by_segment(room)
    last_use = _last_uses(room, segments, rows)
    order = others[np.argsort(last_use[others], kind="stable")]
    cheapest: list[int] = []
    reached = -math.inf
    for segment in order[last_use[order] < before][:_TRIES].tolist():
        if cheapest and last_use[segment] > reached:
            break
        first, end = np.searchsorted(segments, [segment, segment + 1])
        doomed = _with_descendants(room.index, np.unique(rows[first:end]), len(cheapest))
        if doomed and room.may_take(np.array(doomed, np.int32), account):
            # A chain's segments were all used at once: the one at its end costs least.
            cheapest, reached = doomed, float(last_use[segment])
    return cheapest


def _extents_by_segment(room: Room) -> tuple[npt.NDArray[np.int64], Rows]:
    """(segment, row) of every extent that is in a row, ascending by segment."""
    index = room.index
    live = index.live_rows()
    segments, rows = [], []
    for part, extents in enumerate(index.extents):
        here = live[index.resident[live] >> np.uint64(part) & 1 != 0]
        segments.append(room.segments_of(extents[here, 0]))
        rows.append(here)
    segment, row = np.concatenate(segments), np.concatenate(rows)
    order = np.argsort(segment, kind="stable")
    return segment[order], row[order]


def _last_uses(room: Room, segments: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.float64]:
    """By segment: when it was last used, infinity if something in it is held."""
    held = (room.index.leases[rows] != 0) | (room.index.pins[rows] != 0)
    last_use = np.full(room.slabs.capacity_bytes // room.slabs.segment_bytes, -math.inf)
    np.maximum.at(last_use, segments, np.where(held, math.inf, room.used_at[rows]))
    last_use[room.segments_of(np.fromiter(room.loose, np.int64))] = math.inf
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
