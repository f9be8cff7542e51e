"""The digest table: key → row, open addressing over rows that keep their keys themselves.

Linear probing at a load of at most 1/4 (slots 16-32 bytes per row), backward-shift deletion, so no
tombstones::

    slot = ((first 64 bits of the key ^ seed ^ namespace's mix) x odd constant) >> shift
    table[slot] = row + 1

A row's *line* is 64 bytes, one cache line, with what a match wants to know of it, so that n random
keys cost n table lines and n row lines, gathered by two NumPy calls::

    0        32          36       40         48                 56                    64
    key      namespace   parent   resident   part 0's address   part 0's generation

A probe compares 64 bits per key; a final comparison covers all 32 bytes and the namespace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]

NO_ROW = -1

LINE = np.dtype(
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


class Digests:
    """Where each key's row is. `seed` keeps probe lengths unpredictable to clients.

    `lines` belongs to the index; its last one stays 0 and stands for NO_ROW.
    """

    def __init__(self, lines: npt.NDArray[np.void], seed: int) -> None:
        self._seed = seed & _U64
        bits = max(4, (4 * len(lines) - 5).bit_length())
        self._shift = 64 - bits
        self._shift_u64 = np.array(64 - bits, np.uint64)
        self._mask = (1 << bits) - 1
        self._table = np.zeros(1 << bits, np.int32)
        self._table_at = memoryview(self._table)
        self._words = lines.view("<u8").reshape(-1, 8)
        self._words_at = memoryview(self._words.reshape(-1))
        self._namespace = lines["namespace"]
        self._namespace_at = memoryview(self._namespace)

    def __len__(self) -> int:
        """Rows in the table. O(slots)."""
        return int(np.count_nonzero(self._table))

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

    def add(self, row: int) -> None:
        """REQUIRES: the row's line has a key and namespace that are not in the table."""
        table, mask = self._table_at, self._mask
        slot = self._home(self._namespace_at[row], self._words_at[8 * row])
        while table[slot]:
            slot = (slot + 1) & mask
        table[slot] = row + 1

    def remove(self, row: int) -> None:
        """REQUIRES: the row is in the table, and its line as it was when it was added."""
        table, words, mask = self._table_at, self._words_at, self._mask
        hole = self._home(self._namespace_at[row], words[8 * row])
        while table[hole] != row + 1:
            hole = (hole + 1) & mask
        slot = hole
        while entry := table[slot := (slot + 1) & mask]:
            home = self._home(self._namespace_at[entry - 1], words[8 * (entry - 1)])
            # An entry may move into the hole unless its home lies cyclically in (hole, slot].
            if (slot - home) & mask >= (slot - hole) & mask:
                table[hole] = entry
                hole = slot
        table[hole] = 0

    def rebuild(self, every: Rows) -> None:
        """Holds `every` row and no others from now on."""
        self._table[:] = 0
        for namespace in np.unique(self._namespace[every]).tolist():
            rows = every[self._namespace[every] == namespace]
            slots = self._homes(namespace, self._words[rows, 0])
            while rows.size:
                empty = self._table[slots] == 0
                self._table[slots[empty]] = rows[empty] + 1
                lost = self._table[slots] != rows + 1
                rows, slots = rows[lost], (slots[lost] + 1) & self._mask

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


def _found(rows: Rows, words: npt.NDArray[np.uint64]) -> Found:
    halves = words.view(np.int32)
    return Found(rows, words, halves[:, 8], halves[:, 9])
