"""The digest table: key → row, in buckets of eight entries; rows keep their keys themselves.

A bucket is a cache line. Its entries are (fingerprint << 32 | row + 1), 0 for none, in no order::

    hash   = (first 64 bits of the key ^ seed ^ namespace) x odd constant
    bucket = hash >> shift          fingerprint = hash's low 32 bits

A key is in its bucket or, if that is full, among the *spilled* rows of the bucket. Buckets are at
most half full on average (16-32 bytes per row), so that one row of a hundred spills at the worst.
Where a row's entry is (4 bytes), is known: who leaves is not looked for.

A row's *line* is 64 bytes, one cache line too, with what a match wants to know of it, so that n
random keys cost n buckets and n lines, gathered by two NumPy calls::

    0        32          36       40         48                 56                    64
    key      namespace   parent   resident   part 0's address   part 0's generation

A fingerprint is a guess; a final comparison covers all 32 bytes and the namespace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.store.sorting import in_order, run_starts

Rows = npt.NDArray[np.intp]
"""Row numbers; of this type, because NumPy converts others to it before each use."""
Hashes = npt.NDArray[np.uint64]

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
_WAYS = 8
_SPILLED = -1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MULTIPLIER_U64 = np.array(_MULTIPLIER, np.uint64)
_LOW = 0xFFFFFFFF
_LOW_U64 = np.array(_LOW, np.uint64)
_HALF = np.array(32, np.uint64)
_ONE, _WAYS_INT = np.array(1), np.array(_WAYS)  # several times faster than Python's
_FEW = 4  # up to this many keys plain Python beats the fixed cost of NumPy calls
_U64 = (1 << 64) - 1


class Found(NamedTuple):
    """What a batch look-up gives, one entry per key; where the row is NO_ROW, the rest is 0."""

    rows: Rows
    words: Hashes
    """Copies of the rows' lines, shape (n, 8)."""
    namespace: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]

    @property
    def resident(self) -> npt.NDArray[np.uint64]:
        return self.words[:, 5]

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """Part 0's (address, generation), shape (n, 2)."""
        return self.words.view(np.int64)[:, 6:]


class Digests:
    """Where each key's row is. `seed` keeps the buckets of keys unpredictable to clients.

    `lines` belongs to the index; its last one stays 0 and stands for NO_ROW.
    """

    def __init__(self, lines: npt.NDArray[np.void], seed: int) -> None:
        self._seed = seed & _U64
        bits = max(1, (2 * len(lines) // _WAYS).bit_length())
        self._shift = 64 - bits
        self._shift_u64 = np.array(64 - bits, np.uint64)
        self._buckets = np.zeros((1 << bits, _WAYS), np.uint64)
        self._entries = self._buckets.reshape(-1)
        self._entries_at = memoryview(self._entries)
        self._spilled: dict[int, list[int]] = {}
        """Rows by bucket. REQUIRES: the bucket is full."""
        self._place = np.zeros(len(lines), np.int32)
        """By row: where its entry is, or _SPILLED."""
        self._place_at = memoryview(self._place)
        self._words = lines.view("<u8").reshape(-1, 8)
        self._words_at = memoryview(self._words.reshape(-1))
        self._bytes_at = memoryview(lines.view(np.uint8))
        self._namespace_at = memoryview(lines["namespace"])

    def __len__(self) -> int:
        """Rows in the table. O(slots)."""
        return int(np.count_nonzero(self._buckets)) + sum(map(len, self._spilled.values()))

    def find(self, namespace: int, keys: bytes) -> Found:
        """The rows of `keys` (n x 32 bytes) in `namespace`."""
        count = len(keys) // 32
        if count <= _FEW:
            few = [self.find_one(namespace, keys[i * 32 : i * 32 + 32]) for i in range(count)]
            return self._found(np.array(few, np.intp))
        hashes = self._hashes(namespace, np.frombuffer(keys, np.uint64)[::4])
        homes = hashes >> self._shift_u64
        buckets = self._buckets.take(homes, axis=0, mode="wrap")
        halves = buckets.view(np.uint32).ravel()
        alike = halves[1::2] == hashes.astype(np.uint32).repeat(_WAYS)
        rows = halves[::2][alike].astype(np.intp)
        rows -= 1
        hits = len(rows)
        if hits != count:
            some, rows = rows, np.full(count, NO_ROW)
            rows[alike.nonzero()[0] // _WAYS] = some
        found = self._found(rows)
        # Mostly the first keys have one each and the others none; if not, it shows here.
        if (
            found.words[:hits, :4].tobytes() != keys[: 32 * hits]
            or np.count_nonzero(found.namespace[:hits] != namespace)
            or (self._spilled and not self._spilled.keys().isdisjoint(homes[hits:].tolist()))
        ):
            self._settle(namespace, keys, hashes, buckets, found)
        return found

    def _found(self, rows: Rows) -> Found:
        words = self._words.take(rows, axis=0, mode="wrap")
        halves = words.view(np.int32)
        return Found(rows, words, halves[:, 8], halves[:, 9])

    def _settle(
        self, namespace: int, keys: bytes, hashes: Hashes, buckets: Hashes, found: Found
    ) -> None:
        """Looks again for what was not found, but may have spilled or has an equal fingerprint
        (0: that of every empty entry)."""
        wanted = np.frombuffer(keys, np.uint64).reshape(-1, 4)
        exact = (found.words[:, :4] == wanted).all(axis=1) & (found.namespace == namespace)
        doubtful = (found.rows != NO_ROW) | (buckets != 0).all(axis=1) | (hashes & _LOW_U64 == 0)
        for i in (~exact & doubtful).nonzero()[0].tolist():
            found.rows[i] = row = self.find_one(namespace, keys[i * 32 : i * 32 + 32])
            found.words[i] = self._words[row]

    def find_one(self, namespace: int, key: bytes) -> int:
        """Row of one key, or NO_ROW."""
        tag = int.from_bytes(key[:8], "little") ^ self._seed ^ namespace
        hashed = tag * _MULTIPLIER & _U64
        bucket, fingerprint = hashed >> self._shift, hashed & _LOW
        at = bucket * _WAYS
        for entry in self._entries_at[at : at + _WAYS].tolist():
            if entry >> 32 == fingerprint:
                row = (entry & _LOW) - 1
                if self._is(row, namespace, key):
                    return row
        for row in self._spilled.get(bucket, ()):
            if self._is(row, namespace, key):
                return row
        return NO_ROW

    def _is(self, row: int, namespace: int, key: bytes) -> bool:
        """Whether the row is of this chunk."""
        at = 64 * row
        return self._bytes_at[at : at + 32] == key and self._namespace_at[row] == namespace

    def add(self, row: int) -> None:
        """REQUIRES: the row's line has a key and namespace that are not in the table."""
        bucket, entry = self._home(row)
        at = bucket * _WAYS
        ways = self._entries_at[at : at + _WAYS].tolist()
        if 0 in ways:
            self._put(row, at + ways.index(0), entry)
        else:
            self._spilled.setdefault(bucket, []).append(row)
            self._place_at[row] = _SPILLED

    def add_all(self, rows: Rows, namespace: int, words: Hashes) -> None:
        """`add` of many rows of one namespace; `words`: their keys' first 64 bits. REQUIRES: the
        keys differ."""
        hashes = self._hashes(namespace, words)
        entries = hashes << _HALF | (rows + _ONE).view(np.uint64)
        buckets = (hashes >> self._shift_u64).view(np.int64)
        ways = self._buckets.take(buckets, axis=0).argmin(axis=1)  # an empty one, if there is one
        places = buckets * _WAYS_INT + ways
        here = self._entries[places]
        if np.count_nonzero(here):  # full
            empty = here == 0
            self._entries[places[empty]] = entries[empty]
        else:
            self._entries[places] = entries
        self._place[rows] = places
        missing = self._entries[places] != entries  # full, or another row chose that place
        if True in missing.tobytes():
            for row in rows[missing].tolist():
                self.add(row)

    def remove(self, row: int) -> None:
        """REQUIRES: the row is in the table, and its line as it was when it was added."""
        place = self._place_at[row]
        bucket = place // _WAYS if place != _SPILLED else self._home(row)[0]
        spilled = self._spilled.get(bucket)
        if spilled is None:
            self._entries_at[place] = 0
            return
        if place == _SPILLED:
            spilled.remove(row)
        else:  # what spilled moves up into the place of who leaves
            heir = spilled.pop()
            self._put(heir, place, self._home(heir)[1])
        if not spilled:
            del self._spilled[bucket]

    def remove_all(self, rows: Rows) -> None:
        """`remove` of many."""
        places = self._place[rows].astype(np.intp)
        if self._spilled:
            buckets = (places // _WAYS).tolist()
            if _SPILLED in buckets or not self._spilled.keys().isdisjoint(buckets):
                some = [bucket == _SPILLED or bucket in self._spilled for bucket in buckets]
                alone = np.array(some)
                for row in rows[alone].tolist():
                    self.remove(row)
                places = places[~alone]
        self._entries[places] = 0

    def rebuild(self, every: Rows) -> None:
        """Holds `every` row and no others from now on."""
        self._buckets[:] = 0
        self._spilled.clear()
        namespaces = self._words.view(np.int32)[:, 8][every].astype(np.uint64)
        hashes = self._hashes(namespaces, self._words[:, 0][every])
        upper, order = in_order(hashes)
        buckets = (upper >> self._shift_u64).view(np.int64)
        starts = run_starts(buckets)
        way = np.arange(len(buckets)) - np.repeat(starts, np.diff(starts, append=len(buckets)))
        rows = every[order]
        entries = hashes[order] << _HALF | (rows + 1).view(np.uint64)
        fits = way < _WAYS
        places = buckets * _WAYS + way
        self._entries[places[fits]] = entries[fits]
        self._place[rows] = np.where(fits, places, _SPILLED)
        for bucket, row in zip(buckets[~fits].tolist(), rows[~fits].tolist(), strict=True):
            self._spilled.setdefault(bucket, []).append(row)

    def check_integrity(self) -> None:
        """Asserts that only full buckets spill, and that places are known. O(slots)."""
        taken = np.flatnonzero(self._entries)
        here = (self._entries[taken] & _LOW_U64).view(np.int64) - 1
        assert np.array_equal(self._place[here], taken), "a row knows where its entry is"
        for bucket, rows in self._spilled.items():
            assert rows and self._buckets[bucket].all(), "a bucket spills when it is full"
            assert all(self._home(row)[0] == bucket for row in rows)
            assert all(self._place_at[row] == _SPILLED for row in rows)

    def _put(self, row: int, place: int, entry: int) -> None:
        self._entries_at[place] = entry
        self._place_at[row] = place

    def _home(self, row: int) -> tuple[int, int]:
        """The bucket of a row that has its line, and its entry there."""
        words, at = self._words_at, 8 * row
        tag = words[at] ^ self._seed ^ self._namespace_at[row]
        hashed = tag * _MULTIPLIER & _U64
        return hashed >> self._shift, (hashed & _LOW) << 32 | row + 1

    def _hashes(self, namespaces: int | Hashes, tags: Hashes) -> Hashes:
        """The product keeps equal keys of different namespaces out of each other's way."""
        hashes: Hashes = tags ^ np.uint64(self._seed ^ namespaces)
        hashes *= _MULTIPLIER_U64
        return hashes
