"""The index: key → row, in columns, without a Python object per chunk.

A *row* stands for one chunk of one namespace. The digest table is open addressing with linear
probing over rows (load ≤ 1/4, backward-shift deletion, so no tombstones)::

    slot = ((first 64 bits of the key ^ seed ^ namespace's mix) x odd constant) >> shift
    table[slot] = row + 1

What a match wants to know of a row lies in one cache line, so that n random keys cost n table
lines and n row lines, gathered by two NumPy calls; what blocks a row is kept in dense columns::

    0        32          36       40         48                 56                    64
    key      namespace   parent   resident   part 0's address   part 0's generation

A probe compares 64 bits per key; a final comparison covers all 32 bytes and the namespace. Columns
are sized for `capacity` rows at once: the pages of a fresh anonymous mapping cost nothing until a
row touches them, so the index grows without a pause. Bytes per row: 64 above, table 16-32, siblings
12, what blocks it 12, state 1, and 16 for the extent of each part but the first.

Single cells are read and written through memoryviews (`…_at[row]`) of the same memory, several
times faster than NumPy's scalars.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]

NO_ROW = -1
ROOT = -1
"""`parent` of the first chunk of a chain."""
ORPHAN = -2
"""`parent` of a chunk whose parent was deleted."""

FREE = 0
LINKED = 1
ORPHANED = 2
"""Linked, but the chain is cut somewhere above: never matched, first victim."""
UNLINKED = 3
"""Deleted, but a lease still holds it: its extents live until the last release."""

_LINE = np.dtype(
    [
        ("key", "<u8", 4),
        ("namespace", "<i4"),
        ("parent", "<i4"),
        ("resident", "<u8"),
        ("extent", "<i8", 2),
    ]
)
_MULTIPLIER = 0x9E3779B97F4A7C15
_MULTIPLIER_U64 = np.array(_MULTIPLIER, np.uint64)
_U64 = (1 << 64) - 1
_FEW = 4  # up to this many keys plain Python beats the fixed cost of NumPy calls


class Found(NamedTuple):
    """What a batch look-up gives, one entry per key; where the row is NO_ROW, the rest is 0."""

    rows: Rows
    words: npt.NDArray[np.uint64]
    """Copies of the rows' lines, shape (n, 8)."""
    namespace: npt.NDArray[np.int32]
    parent: Rows

    @property
    def resident(self) -> npt.NDArray[np.uint64]:
        return self.words[:, 5]

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Part 0's (address, generation), shape (n, 2)."""
        return self.words.view(np.int64)[:, 6:]


class Index:
    """Rows for at most `capacity` chunks. `seed` keeps probe lengths unpredictable to clients."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.count = 0
        self._seed = seed & _U64
        bits = max(4, (4 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._shift_u64 = np.array(64 - bits, np.uint64)
        self._mask = (1 << bits) - 1
        self._table = np.zeros(1 << bits, np.int32)
        lines = np.zeros(capacity + 1, _LINE)  # the last one stands for NO_ROW
        self._words = lines.view("<u8").reshape(-1, 8)
        self.namespace = lines["namespace"]
        self.parent = lines["parent"]
        self.resident = lines["resident"]
        """Bitmap of the parts that are stored."""
        self.state = np.zeros(capacity, np.uint8)
        self.leases = np.zeros(capacity, np.int32)
        self.pins = np.zeros(capacity, np.int32)
        self.children = np.zeros(capacity, np.int32)
        self.extents: list[npt.NDArray[np.int64]] = [lines["extent"]]
        """Per part and row: address and generation, valid where resident."""
        self.writing: dict[int, int] = {}
        """Bitmap of the parts that a writer holds, for the rows that have any."""
        # Siblings form a doubly linked list, stored as row + 1 (0: none). So do free rows.
        self._first_child = np.zeros(capacity, np.int32)
        self._next = np.zeros(capacity, np.int32)
        self._previous = np.zeros(capacity, np.int32)
        self._free = 0
        self._free_rows = 0
        self._fresh = 0  # rows from here on were never used
        self._bytes_at = memoryview(lines.view(np.uint8))
        self._words_at = memoryview(self._words.reshape(-1))
        self._table_at = memoryview(self._table)
        self._first_child_at = memoryview(self._first_child)
        self._next_at = memoryview(self._next)
        self._previous_at = memoryview(self._previous)
        self.namespace_at = memoryview(self.namespace)
        self.parent_at = memoryview(self.parent)
        self.resident_at = memoryview(self.resident)
        self.state_at = memoryview(self.state)
        self.address_at: list[memoryview[int]] = []
        self.generation_at: list[memoryview[int]] = []
        self.leases_at = memoryview(self.leases)
        self.pins_at = memoryview(self.pins)
        self.children_at = memoryview(self.children)
        self.ensure_parts(1)

    # ---- lookup

    def find(self, namespace: int, keys: bytes) -> Found:
        """The rows of `keys` (n x 32 bytes) in `namespace`."""
        count = len(keys) // 32
        if count <= _FEW:
            few = [self.find_one(namespace, keys[i * 32 : i * 32 + 32]) for i in range(count)]
            rows = np.array(few, np.int32)
            return _found(rows, self._words.take(rows, axis=0, mode="wrap"))
        wanted = np.frombuffer(keys, np.uint64).reshape(count, 4)
        tags = wanted[:, 0]
        slots = self._homes(namespace, tags)
        rows = self._table.take(slots)
        rows -= 1
        words = self._words.take(rows, axis=0, mode="wrap")
        pending = ((words[:, 0] != tags) & (rows >= 0)).nonzero()[0]
        while pending.size > _FEW:
            slots[pending] = step = (slots[pending] + 1) & self._mask
            rows[pending] = further = self._table[step] - 1
            words[pending] = lines = self._words.take(further, axis=0, mode="wrap")
            pending = pending[(lines[:, 0] != tags[pending]) & (further >= 0)]
        for i in pending.tolist():
            rows[i] = row = self.find_one(namespace, keys[i * 32 : i * 32 + 32])
            words[i] = self._words[row]
        found = _found(rows, words)
        if words[:, :4].tobytes() != keys or np.count_nonzero(found.namespace != namespace):
            self._settle(namespace, keys, wanted, found)
        return found

    def _settle(
        self, namespace: int, keys: bytes, wanted: npt.NDArray[np.uint64], found: Found
    ) -> None:
        """Mends what has the right 64 bits but another key or namespace: only by intent."""
        exact = found.namespace == namespace
        for word in (1, 2, 3):
            exact &= found.words[:, word] == wanted[:, word]
        for i in (~exact & (found.rows >= 0)).nonzero()[0].tolist():
            found.rows[i] = row = self.find_one(namespace, keys[i * 32 : i * 32 + 32])
            found.words[i] = self._words[row]

    def find_one(self, namespace: int, key: bytes) -> int:
        """Row of one key, or NO_ROW."""
        table, words, mask = self._table_at, self._words_at, self._mask
        tag, second, third, fourth = memoryview(key).cast("Q")
        slot = self._home(namespace, tag)
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
        return bytes(self._bytes_at[64 * row : 64 * row + 32])

    def extent_bytes(self, row: int) -> bytes:
        """Part 0's address and generation, int64 each."""
        return bytes(self._bytes_at[64 * row + 48 : 64 * row + 64])

    def _home(self, namespace: int, tag: int) -> int:
        return ((tag ^ self._mix(namespace)) * _MULTIPLIER & _U64) >> self._shift

    def _homes(self, namespace: int, tags: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """`_home` of each tag."""
        mixed = tags ^ np.uint64(self._mix(namespace))
        np.multiply(mixed, _MULTIPLIER_U64, out=mixed)
        np.right_shift(mixed, self._shift_u64, out=mixed)
        return mixed.view(np.int64)

    def _mix(self, namespace: int) -> int:
        """Keeps equal keys of different namespaces out of each other's way."""
        return self._seed ^ namespace * _MULTIPLIER & _U64

    # ---- rows

    @property
    def room(self) -> int:
        """Rows that can still be inserted."""
        return self._free_rows + self.capacity - self._fresh

    def insert(self, namespace: int, key: bytes, parent: int) -> int:
        """A new linked row without parts. REQUIRES: room, key absent, `parent` linked or ROOT."""
        row = self._take_row()
        self._bytes_at[64 * row : 64 * row + 32] = key
        self.namespace_at[row] = namespace
        self.parent_at[row] = ROOT
        self.state_at[row] = LINKED
        table, mask = self._table_at, self._mask
        slot = self._home(namespace, self._words_at[8 * row])
        while table[slot]:
            slot = (slot + 1) & mask
        table[slot] = row + 1
        self.count += 1
        if parent >= 0:
            self._attach(row, parent)
            self.state_at[row] = self.state_at[parent]
        return row

    def adopt(self, row: int, parent: int) -> None:
        """Ends the orphanhood of `row` and of what is below it.

        REQUIRES: the parent of `row` is ORPHAN, `parent` is LINKED (hence not below `row`).
        """
        self._attach(row, parent)
        self.state[self.subtree(row)] = LINKED

    def unlink(self, row: int) -> list[int]:
        """Takes `row` out of table and tree; what was below it, parents first, is ORPHANED."""
        self._remove_from_table(row)
        self._detach(row)
        self.state_at[row] = UNLINKED
        self.count -= 1
        if not self.children_at[row]:
            return []
        for child in self.children_of(row):
            self.parent_at[child] = ORPHAN
        below = self.subtree(row)[1:]
        self.state[below] = ORPHANED
        self.children_at[row] = self._first_child_at[row] = 0
        return below

    def release(self, row: int) -> None:
        """Gives an unlinked row back. REQUIRES: no lease, pin or part."""
        self.state_at[row] = FREE
        self._next_at[row] = self._free
        self._free = row + 1
        self._free_rows += 1

    def children_of(self, row: int) -> list[int]:
        out = []
        child = self._first_child_at[row]
        while child:
            out.append(child - 1)
            child = self._next_at[child - 1]
        return out

    def subtree(self, row: int) -> list[int]:
        """`row` and everything below it, parents before children."""
        out = [row]
        for member in out:
            if self.children_at[member]:
                out.extend(self.children_of(member))
        return out

    def linked_rows(self) -> Rows:
        """Ascending, orphans included."""
        state = self.state[: self._fresh]
        return np.flatnonzero((state == LINKED) | (state == ORPHANED)).astype(np.int32)

    def live_rows(self) -> Rows:
        """Linked rows and those that only a lease keeps."""
        return np.flatnonzero(self.state[: self._fresh]).astype(np.int32)

    def ensure_parts(self, parts: int) -> None:
        """Extent columns for at least `parts` parts per chunk."""
        while len(self.extents) < parts:
            self.extents.append(np.zeros((self.capacity + 1, 2), np.int64))
        for extents in self.extents[len(self.address_at) :]:
            self.address_at.append(memoryview(extents[:, 0]))
            self.generation_at.append(memoryview(extents[:, 1]))

    def unlink_all(self, rows: Rows) -> None:
        """Unlinks whole namespaces at once: no row outside `rows` is below or above one inside."""
        self.state[rows] = UNLINKED
        self.parent[rows] = ROOT
        self.children[rows] = 0
        self._first_child[rows] = 0
        self.count -= len(rows)
        self._rebuild_table()

    def release_all(self, rows: Rows) -> None:
        """`release` of many."""
        if len(rows):
            self.state[rows] = FREE
            self._next[rows[:-1]] = rows[1:] + 1
            self._next[rows[-1]] = self._free
            self._free = int(rows[0]) + 1
            self._free_rows += len(rows)

    def _take_row(self) -> int:
        if not self._free:
            self._fresh += 1
            return self._fresh - 1
        row = self._free - 1
        self._free = self._next_at[row]
        self._free_rows -= 1
        return row

    def _attach(self, row: int, parent: int) -> None:
        head = self._first_child_at[parent]
        self._next_at[row] = head
        self._previous_at[row] = 0
        if head:
            self._previous_at[head - 1] = row + 1
        self._first_child_at[parent] = row + 1
        self.children_at[parent] += 1
        self.parent_at[row] = parent

    def _detach(self, row: int) -> None:
        parent = self.parent_at[row]
        self.parent_at[row] = ROOT
        if parent < 0:
            return
        before, after = self._previous_at[row], self._next_at[row]
        if before:
            self._next_at[before - 1] = after
        else:
            self._first_child_at[parent] = after
        if after:
            self._previous_at[after - 1] = before
        self.children_at[parent] -= 1

    def _remove_from_table(self, row: int) -> None:
        table, words, mask = self._table_at, self._words_at, self._mask
        hole = self._home(self.namespace_at[row], words[8 * row])
        while table[hole] != row + 1:
            hole = (hole + 1) & mask
        slot = hole
        while entry := table[slot := (slot + 1) & mask]:
            home = self._home(self.namespace_at[entry - 1], words[8 * (entry - 1)])
            # An entry may move into the hole unless its home lies cyclically in (hole, slot].
            if (slot - home) & mask >= (slot - hole) & mask:
                table[hole] = entry
                hole = slot
        table[hole] = 0

    def _rebuild_table(self) -> None:
        self._table[:] = 0
        linked = self.linked_rows()
        for namespace in np.unique(self.namespace[linked]).tolist():
            rows = linked[self.namespace[linked] == namespace]
            slots = self._homes(namespace, self._words[rows, 0])
            while rows.size:
                empty = self._table[slots] == 0
                self._table[slots[empty]] = rows[empty] + 1
                lost = self._table[slots] != rows + 1
                rows, slots = rows[lost], (slots[lost] + 1) & self._mask

    # ---- integrity

    def check_integrity(self) -> None:
        """Asserts that table, tree, states and counts agree. O(rows)."""
        linked, live = self.linked_rows(), self.live_rows()
        assert len(linked) == self.count == np.count_nonzero(self._table)
        assert len(live) + self._free_rows == self._fresh
        reached = []
        for row in linked.tolist():
            assert self.find_one(self.namespace_at[row], self.key_bytes(row)) == row
            children = self.children_of(row)
            assert len(children) == self.children_at[row]
            assert all(self.parent_at[child] == row for child in children)
            parent = self.parent_at[row]
            if parent < 0:
                assert self.state_at[row] == (LINKED if parent == ROOT else ORPHANED)
                reached.extend(self.subtree(row))
            else:
                assert self.state_at[row] == self.state_at[parent]
        assert sorted(reached) == linked.tolist(), "a row that no chain leads to"
        unlinked = np.setdiff1d(live, linked)
        assert (self.children[unlinked] == 0).all() and (self.parent[unlinked] == ROOT).all()
        assert (self.leases[live] >= 0).all() and (self.pins[live] >= 0).all()
        for row, parts in self.writing.items():
            assert parts and self.state_at[row] and not parts & self.resident_at[row]
        free, length = self._free, 0
        while free:
            assert self.state_at[free - 1] == FREE and length < self._free_rows
            free, length = self._next_at[free - 1], length + 1
        assert length == self._free_rows


def _found(rows: Rows, words: npt.NDArray[np.uint64]) -> Found:
    halves = words.view(np.int32)
    return Found(rows, words, halves[:, 8], halves[:, 9])
