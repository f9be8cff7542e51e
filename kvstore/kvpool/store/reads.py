"""The reading half of a store: which leading run of a chain is servable, and why it ends there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Reason
from kvpool.store.ghosts import Ghosts
from kvpool.store.index import LINKED, NO_ROW, ORPHAN, Found, Index, Rows
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import NO_EXTENT

_FEW = 8  # up to this many keys plain Python beats the fixed cost of NumPy calls


class Run(NamedTuple):
    """The leading `hits` of the keys that were asked for; `first`: their extents of part 0."""

    hits: int
    rows: Rows
    first: bytes
    mask: int
    indices: tuple[int, ...]
    """The parts asked for, as a bitmap and as numbers."""


class Reads:
    """See `Store.match`."""

    def __init__(self, index: Index, ghosts: Ghosts) -> None:
        self._index = index
        self._ghosts = ghosts

    def run(self, known: KnownNamespace, keys: bytes, parts: int) -> Run:
        """The longest servable run for a reader of `parts` (0: all).

        Orphans whose parent is in front of them again are adopted. Raises `NamespaceError` for
        unknown parts and `InvalidError` for a key that comes twice.
        """
        indices = known.namespace.part_indices(parts)
        mask = parts or known.all_parts
        if len(keys) <= _FEW * KEY_BYTES and not known.windows:
            rows = self._few(known, mask, keys)
            if rows is not None:
                first = b"".join(map(self._index.extent_bytes, rows))
                return Run(len(rows), np.array(rows, np.intp), first, mask, indices)
        found = self._index.find(known.id, keys)
        hits = self._servable(known, mask, found)
        first = found.extents[:hits].tobytes() if indices == (0,) else b""
        return Run(hits, found.rows[:hits], first, mask, indices)

    def _few(self, known: KnownNamespace, mask: int, keys: bytes) -> list[int] | None:
        """The run of a few keys without NumPy; None if their rows are not one chain."""
        index, need = self._index, mask & known.prefix_mask
        rows: list[int] = []
        for at in range(0, len(keys), KEY_BYTES):
            row = index.find_one(known.id, keys[at : at + KEY_BYTES])
            if index.resident_at[row] & need != need:  # nothing is where the row is NO_ROW
                break
            if index.state_at[row] != LINKED or (rows and index.parent_at[row] != rows[-1]):
                return None
            rows.append(row)
        return rows

    def _servable(self, known: KnownNamespace, mask: int, found: Found) -> int:
        """How many leading rows a reader of the parts `mask` can use."""
        need = np.uint64(mask & known.prefix_mask)
        good = (found.resident & need) == need if need else found.resident != 0
        hits = good.tobytes().find(False)
        hits = self._linked(found, len(good) if hits < 0 else hits)
        if known.windows and hits:
            hits = _windowed(known, mask, found.resident[:hits])
        return hits

    def why(self, known: KnownNamespace, key: bytes, run: Run) -> Reason:
        """Why the chunk `key`, the one behind the run, is not in it."""
        row = self._index.find_one(known.id, key)
        if row == NO_ROW:
            return self._ghosts.reason(known.id, key)
        if self._index.state_at[row] != LINKED:
            return Reason.ORPHAN
        resident = self._index.resident_at[row]
        if self._index.writing.get(row, 0) & run.mask & ~resident:
            return Reason.BEING_WRITTEN
        return Reason.PART_MISSING

    def extents(self, known: KnownNamespace, run: Run) -> bytes:
        """(hits, parts, 2) int64: address and generation, (-1, 0) where a part is not stored."""
        if run.indices == (0,) and not known.windows:
            return run.first
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
        breaks = (found.parent[1:hits] != rows[:-1]).nonzero()[0]
        if not len(breaks):  # in a tree, then all are linked to the root, and distinct
            return hits
        ordered = np.sort(rows)
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise InvalidError("the chain holds the same key twice")
        if not self._index.orphaned:
            return hits
        for at in breaks[found.parent[breaks + 1] == ORPHAN].tolist():
            if self._index.state_at[above := int(rows[at])] == LINKED:  # it was published again
                self._index.adopt(int(rows[at + 1]), above)
        astray = self._index.state[rows] != LINKED
        return int(astray.argmax()) if np.count_nonzero(astray) else hits


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
