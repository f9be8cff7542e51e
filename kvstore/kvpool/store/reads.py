"""The reading half of a store: which leading run of a chain is servable, and why it ends there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Reason
from kvpool.store.index import LINKED, NO_ROW, ORPHAN, Found, Rows
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import NO_EXTENT
from kvpool.store.room import Room

Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Run:
    """The leading `hits` of the keys that were asked for."""

    hits: int
    found: Found
    mask: int
    indices: Sequence[int]
    """The parts asked for, as a bitmap and as numbers."""

    @property
    def rows(self) -> Rows:
        return self.found.rows[: self.hits]


class Reads:
    """See `Store.match`."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._index = room.index

    def run(self, known: KnownNamespace, keys: bytes, parts: int) -> Run:
        """The longest servable run for a reader of `parts` (0: all).

        Orphans whose parent is in front of them again are adopted. Raises `NamespaceError` for
        unknown parts and `InvalidError` for a key that comes twice.
        """
        indices = known.namespace.part_indices(parts)
        mask = parts or known.namespace.all_parts
        found = self._index.find(known.id, keys)
        need = np.uint64(mask & known.prefix_mask)
        good = (found.resident & need == need) & (found.rows >= 0)
        if not need:
            good &= found.resident != 0
        hits = self._linked(found, len(good) if good.all() else int(good.argmin()))
        if known.windows and hits:
            hits = _windowed(known, mask, found.resident[:hits])
        return Run(hits, found, mask, indices)

    def why(self, known: KnownNamespace, keys: bytes, run: Run) -> Reason:
        """Why the chunk behind the run is not in it."""
        row = int(run.found.rows[run.hits])
        if row == NO_ROW:
            at = run.hits * KEY_BYTES
            return self._room.ghosts.reason(known.id, keys[at : at + KEY_BYTES])
        if self._index.state_at[row] != LINKED:
            return Reason.ORPHAN
        resident = self._index.resident_at[row]
        if self._index.writing.get(row, 0) & run.mask & ~resident:
            return Reason.BEING_WRITTEN
        return Reason.PART_MISSING

    def extents(self, run: Run, known: KnownNamespace) -> bytes:
        """(hits, parts, 2) int64: address and generation, (-1, 0) where a part is not stored."""
        if run.indices == (0,) and not known.windows:
            return run.found.extents[: run.hits].tobytes()
        return self.extents_of(run.rows, run.indices)

    def extents_of(self, rows: Rows, indices: Sequence[int]) -> bytes:
        """As `extents`, of any live rows."""
        resident = self._index.resident[rows]
        columns = []
        for part in indices:
            column = self._index.extents[part][rows]
            column[resident >> np.uint64(part) & 1 == 0] = NO_EXTENT
            columns.append(column)
        return np.stack(columns, axis=1).tobytes()

    def _linked(self, found: Found, hits: int) -> int:
        """How many of the first `hits` rows a chain from its root leads to."""
        if not hits or self._index.state_at[int(found.rows[0])] != LINKED:
            return 0
        rows = found.rows[:hits]
        breaks = np.flatnonzero(found.parent[1:hits] != rows[:-1])
        if not len(breaks):  # in a tree, what is linked throughout is linked to the root, and once
            return hits
        if len(np.unique(rows)) < hits:
            raise InvalidError("the chain holds the same key twice")
        for at in breaks[found.parent[breaks + 1] == ORPHAN].tolist():
            if self._index.state_at[above := int(rows[at])] == LINKED:  # it was published again
                self._index.adopt(int(rows[at + 1]), above)
        astray = np.flatnonzero(self._index.state[rows] != LINKED)
        return int(astray[0]) if len(astray) else hits


def _windowed(known: KnownNamespace, mask: int, resident: npt.NDArray[np.uint64]) -> int:
    """The largest n for which each windowed part of `mask` is there for the window before n."""
    position = np.arange(len(resident))
    good = np.ones(len(resident), np.bool_)
    for part, chunks in known.windows:
        if mask >> part & 1:
            have = resident >> np.uint64(part) & 1 != 0
            last_gap = np.maximum.accumulate(np.where(have, -1, position))
            good &= last_gap < np.maximum(position + 1 - chunks, 0)
    ends = np.flatnonzero(good)
    return int(ends[-1]) + 1 if len(ends) else 0
