"""The index: key → row, in columns, without a Python object per chunk.

A *row* stands for one chunk of one namespace. The digest table is open addressing with linear
probing over rows (load ≤ 0.5, backward-shift deletion, so no tombstones)::

    slot = ((first 64 bits of the key ^ seed) x odd constant) >> shift      table[slot] = row + 1

What a lookup needs of a row lies in one cache line, so that a batch of n random keys costs n table
lines and n row lines, gathered by two NumPy calls::

    0        32          36       40         48       52     56         60      64
    key      namespace   parent   resident   leases   pins   children   state

A probe compares 64 bits per key; a final comparison covers all 32 bytes and the namespace. Columns
are sized for `capacity` rows at once: the pages of a fresh anonymous mapping cost nothing until a
row touches them, so the index grows without a pause. Bytes per row: 64 above, table 8-16, siblings
12, parts being written 8, last use 8, and 16 for each part's extent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]

NO_ROW = -1
ROOT = -1
"""`parent` of the first chunk of a chain."""
ORPHAN = -2
"""`parent` of a chunk whose parent was deleted: never matched, first victim."""

FREE = 0
LINKED = 1
UNLINKED = 2
"""Deleted, but a lease still holds it: its extents live until the last release."""

_LINE = np.dtype(
    [
        ("key", "<u8", 4),
        ("namespace", "<i4"),
        ("parent", "<i4"),
        ("resident", "<u8"),
        ("leases", "<i4"),
        ("pins", "<i4"),
        ("children", "<i4"),
        ("state", "<i4"),
    ]
)
_MULTIPLIER = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1
_SCALAR_BATCH = 4  # up to this many keys plain Python beats the fixed cost of NumPy calls


class Index:
    """Rows for at most `capacity` chunks. `seed` keeps probe lengths unpredictable to clients."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._seed = seed & _U64
        bits = max(4, (2 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._mask = (1 << bits) - 1
        self._table = np.zeros(1 << bits, np.int32)
        self.lines = np.zeros(capacity, _LINE)
        self._words = self.lines.view("<u8").reshape(capacity, 8)
        self.namespace = self.lines["namespace"]
        self.parent = self.lines["parent"]
        self.resident = self.lines["resident"]
        self.leases = self.lines["leases"]
        self.pins = self.lines["pins"]
        self.children = self.lines["children"]
        self.state = self.lines["state"]
        # Siblings form a doubly linked list, stored as row + 1 (0: none).
        self._first_child = np.zeros(capacity, np.int32)
        self._next = np.zeros(capacity, np.int32)
        self._previous = np.zeros(capacity, np.int32)
        self.writing = np.zeros(capacity, np.uint64)
        self.used_at = np.zeros(capacity, np.float64)
        self.extents: list[npt.NDArray[np.int64]] = []
        """One (capacity, 2) array per part: address and generation, valid where resident."""
        self._free: list[int] = []
        self._fresh = 0  # rows from here on were never used
        # memoryviews share the columns' memory; scalar access through them is several times faster
        self._table_view = memoryview(self._table)
        self._words_view = memoryview(self._words).cast("B").cast("Q")

    # ---- lookup

    def find(self, namespace: int, keys: bytes) -> Rows:
        """Rows of `keys` (n x 32 bytes) in `namespace`, NO_ROW where there is none."""
        return self.find_lines(namespace, keys)[0]

    def find_lines(self, namespace: int, keys: bytes) -> tuple[Rows, npt.NDArray[np.void]]:
        """Rows as `find`, and a copy of the row lines (arbitrary where the row is NO_ROW)."""
        count = len(keys) // 32
        if count <= _SCALAR_BATCH:
            one = [self.find_one(namespace, keys[i * 32 : i * 32 + 32]) for i in range(count)]
            rows = np.array(one, np.int32)
            return rows, self._gather(rows)
        wanted = np.frombuffer(keys, np.uint64).reshape(count, 4)
        tags = wanted[:, 0]
        hashed = ((tags ^ np.uint64(self._seed)) * np.uint64(_MULTIPLIER)) >> np.uint64(self._shift)
        slots = hashed.view(np.int64)
        rows = self._table.take(slots)
        rows -= 1
        words = self._words.take(rows, axis=0, mode="clip")
        pending = np.flatnonzero((words[:, 0] != tags) & (rows >= 0))
        while pending.size:
            slots[pending] = step = (slots.take(pending) + 1) & self._mask
            rows[pending] = next_rows = self._table.take(step) - 1
            words[pending] = line = self._words.take(next_rows, axis=0, mode="clip")
            pending = pending[(line[:, 0] != tags.take(pending)) & (next_rows >= 0)]
        lines = words.view(_LINE)[:, 0]
        # Equal tags but another key or namespace happen only by intent: settle them one by one.
        if words[:, :4].tobytes() != keys or (lines["namespace"] != namespace).any():
            exact = (words[:, :4] == wanted).all(axis=1) & (lines["namespace"] == namespace)
            for i in np.flatnonzero(~exact & (rows >= 0)).tolist():
                rows[i] = row = self.find_one(namespace, keys[i * 32 : i * 32 + 32])
                words[i] = self._words[row]
        return rows, lines

    def find_one(self, namespace: int, key: bytes) -> int:
        """Row of one key, or NO_ROW."""
        table, words, mask = self._table_view, self._words_view, self._mask
        tag, second, third, fourth = memoryview(key).cast("Q")
        slot = self._home(tag)
        while row := table[slot]:
            at = 8 * (row - 1)
            if (
                words[at] == tag
                and words[at + 1] == second
                and words[at + 2] == third
                and words[at + 3] == fourth
                and words[at + 4] & 0xFFFFFFFF == namespace
            ):
                return row - 1
            slot = (slot + 1) & mask
        return NO_ROW

    def key_bytes(self, row: int) -> bytes:
        return self._words[row, :4].tobytes()

    def _gather(self, rows: Rows) -> npt.NDArray[np.void]:
        return self._words.take(rows, axis=0, mode="clip").view(_LINE)[:, 0]

    def _home(self, tag: int) -> int:
        return (((tag ^ self._seed) * _MULTIPLIER) & _U64) >> self._shift

    # ---- rows

    @property
    def full(self) -> bool:
        return not self._free and self._fresh == self.capacity

    @property
    def room(self) -> int:
        """Rows that can still be inserted."""
        return len(self._free) + self.capacity - self._fresh

    def insert(self, namespace: int, key: bytes, parent: int) -> int:
        """A new linked row without parts. REQUIRES: not full, key absent, `parent` linked."""
        if self._free:
            row = self._free.pop()
        else:
            row = self._fresh
            self._fresh += 1
        self.lines[row] = (0, namespace, ROOT, 0, 0, 0, 0, LINKED)
        self._words[row, :4] = np.frombuffer(key, np.uint64)
        self.writing[row] = self._first_child[row] = 0
        table, mask = self._table_view, self._mask
        slot = self._home(self._words_view[8 * row])
        while table[slot]:
            slot = (slot + 1) & mask
        table[slot] = row + 1
        if parent >= 0:
            self.adopt(row, parent)
        self.count += 1
        return row

    def adopt(self, row: int, parent: int) -> None:
        """Links `row` below `parent`. REQUIRES: `row` has no parent row now."""
        head = int(self._first_child[parent])
        self._next[row] = head
        self._previous[row] = 0
        if head:
            self._previous[head - 1] = row + 1
        self._first_child[parent] = row + 1
        self.children[parent] += 1
        self.parent[row] = parent

    def unlink(self, row: int) -> list[int]:
        """Takes `row` out of the table and the tree; its children become orphans (returned)."""
        self._remove_from_table(row)
        self._detach(row)
        orphans = self.children_of(row)
        for child in orphans:
            self.parent[child] = ORPHAN
        self.children[row] = self._first_child[row] = 0
        self.state[row] = UNLINKED
        self.count -= 1
        return orphans

    def release(self, row: int) -> None:
        """Gives an unlinked row back. REQUIRES: no lease, no part."""
        self.state[row] = FREE
        self._free.append(row)

    def children_of(self, row: int) -> list[int]:
        out = []
        child = int(self._first_child[row])
        while child:
            out.append(child - 1)
            child = int(self._next[child - 1])
        return out

    def subtree(self, row: int) -> list[int]:
        """`row` and everything below it, parents before children."""
        out = [row]
        for member in out:
            if self.children[member]:
                out.extend(self.children_of(member))
        return out

    def linked_rows(self) -> Rows:
        return np.flatnonzero(self.state[: self._fresh] == LINKED).astype(np.int32)

    def live_rows(self) -> Rows:
        """Linked rows and those that only a lease keeps."""
        return np.flatnonzero(self.state[: self._fresh]).astype(np.int32)

    def ensure_parts(self, parts: int) -> None:
        """Extent columns for at least `parts` parts per chunk."""
        while len(self.extents) < parts:
            self.extents.append(np.zeros((self.capacity, 2), np.int64))

    def _detach(self, row: int) -> None:
        parent = int(self.parent[row])
        if parent < 0:
            return
        before, after = int(self._previous[row]), int(self._next[row])
        if before:
            self._next[before - 1] = after
        else:
            self._first_child[parent] = after
        if after:
            self._previous[after - 1] = before
        self.children[parent] -= 1
        self.parent[row] = ROOT

    def _remove_from_table(self, row: int) -> None:
        table, words, mask = self._table_view, self._words_view, self._mask
        hole = self._home(words[8 * row])
        while table[hole] != row + 1:
            hole = (hole + 1) & mask
        slot = hole
        while (entry := table[slot := (slot + 1) & mask]) != 0:
            home = self._home(words[8 * (entry - 1)])
            # An entry may move into the hole unless its home lies cyclically in (hole, slot].
            if (slot - home) & mask >= (slot - hole) & mask:
                table[hole] = entry
                hole = slot
        table[hole] = 0

    def unlink_all(self, rows: Rows) -> None:
        """Unlinks whole namespaces at once: no row outside `rows` is below or above one inside."""
        self.state[rows] = UNLINKED
        self.parent[rows] = ROOT
        self.children[rows] = 0
        self._first_child[rows] = 0
        self.count -= len(rows)
        self._rebuild_table(self.linked_rows())

    def _rebuild_table(self, rows: Rows) -> None:
        self._table[:] = 0
        tags = self._words[rows, 0]
        hashed = ((tags ^ np.uint64(self._seed)) * np.uint64(_MULTIPLIER)) >> np.uint64(self._shift)
        slots = hashed.astype(np.int64)
        while rows.size:
            empty = self._table[slots] == 0
            self._table[slots[empty]] = rows[empty] + 1
            lost = self._table[slots] != rows + 1
            rows, slots = rows[lost], (slots[lost] + 1) & self._mask

    # ---- integrity

    def check_integrity(self) -> None:
        """Asserts that table, tree and counts agree. O(rows)."""
        linked = self.linked_rows()
        assert len(linked) == self.count, (len(linked), self.count)
        assert int((self._table != 0).sum()) == self.count
        for row in linked.tolist():
            assert self.find_one(int(self.namespace[row]), self.key_bytes(row)) == row
            children = self.children_of(row)
            assert len(children) == self.children[row]
            assert all(self.parent[child] == row for child in children)
            parent = int(self.parent[row])
            assert parent in (ROOT, ORPHAN) or self.state[parent] == LINKED
        live = self.live_rows()
        assert len(live) + len(self._free) == self._fresh
        assert (self.leases[live] >= 0).all() and (self.pins[live] >= 0).all()
        assert not (self.resident[live] & self.writing[live]).any()
