"""A whole catalogue in columns: a million entries without a Python object for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from kvpool.proto.keys import KEY_BYTES
from kvpool.store.sorting import distinct
from kvpool.store.ssd.space import Space

Pair = tuple[bytes, bytes]
"""Key and packed entry, see `entries`."""
_HEAD, _EXTENT = 48, 32
BLOCK = 1 << 12
"""Entries that are Python objects at a time."""
ADDRESS, NBYTES, GENERATION, SUM = range(4)


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries as columns, in any order; `extents[part]` is (n, 4) uint64: address, bytes,
    generation and sum, zero where the part is not stored."""

    keys: npt.NDArray[np.uint8]
    """(n, 32)"""
    parents: npt.NDArray[np.uint8]
    """(n, 32)"""
    roots: npt.NDArray[np.bool_]
    """True where there is no parent."""
    spaces: npt.NDArray[np.int64]
    parts: npt.NDArray[np.uint64]
    """Bitmap of the stored parts."""
    extents: list[npt.NDArray[np.uint64]]

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, chosen: npt.NDArray[np.bool_]) -> Listing:
        """Some of the entries."""
        if chosen.all():
            return self
        return Listing(
            self.keys[chosen],
            self.parents[chosen],
            self.roots[chosen],
            self.spaces[chosen],
            self.parts[chosen],
            [one[chosen] for one in self.extents],
        )

    def has(self, part: int) -> npt.NDArray[np.bool_]:
        """True where the part is stored."""
        stored: npt.NDArray[np.bool_] = self.parts >> np.uint64(part) & np.uint64(1) != 0
        return stored


def read_listing(pairs: Iterable[Pair], count: int) -> tuple[Listing, list[bytes]]:
    """The entries, and the keys of what is none. `count`: how many pairs there are at most."""
    tables: dict[int, npt.NDArray[np.uint8]] = {}
    filled: dict[int, int] = {}
    damaged: list[bytes] = []
    rest = iter(pairs)
    while block := list(chain.from_iterable(islice(rest, BLOCK))):
        for extents, alike in _by_extents(block, damaged):
            if extents not in tables:  # rows that stay empty cost nothing
                tables[extents] = np.empty((count, _record(extents).itemsize), np.uint8)
            start = filled.get(extents, 0)
            filled[extents] = end = start + len(alike) // 2
            tables[extents][start:end].reshape(-1)[:] = np.frombuffer(b"".join(alike), np.uint8)
    records = [
        table[: filled[extents]].view(_record(extents))[:, 0] for extents, table in tables.items()
    ]
    return _joined([_columns(table, damaged) for table in records]), damaged


def _by_extents(block: list[bytes], damaged: list[bytes]) -> Iterable[tuple[int, list[bytes]]]:
    """Of keys and values in turn: how many extents, and the keys and values that have so many."""
    count = _extents(len(block[1]))
    if count and list(map(len, block)) == [KEY_BYTES, len(block[1])] * (len(block) // 2):
        return [(count, block)]  # mostly: a look at each pair costs as much as to read it
    groups: dict[int, list[bytes]] = {}
    for key, value in zip(block[::2], block[1::2], strict=True):
        count = _extents(len(value)) if len(key) == KEY_BYTES else 0
        if count:
            groups.setdefault(count, []).extend((key, value))
        else:
            damaged.append(key)
    return groups.items()


def _extents(length: int) -> int:
    """How many extents an entry of `length` bytes has; 0 if it is none."""
    extents, rest = divmod(length - _HEAD, _EXTENT)
    return 0 if rest else max(0, extents)


def _record(extents: int) -> np.dtype[np.void]:
    """A key and its entry as `entries` packs it."""
    return np.dtype(
        [
            ("key", "<u8", KEY_BYTES // 8),
            ("space", "<u4"),
            ("flags", "<u4"),
            ("parent", "<u8", KEY_BYTES // 8),
            ("parts", "<u8"),
            ("extents", "<u8", (extents, 4)),
        ]
    )


def _columns(table: npt.NDArray[np.void], damaged: list[bytes]) -> Listing:
    """Entries with equally many extents. Columns that need no change are views of `table`."""
    parts, fields = table["parts"], table["extents"]
    extents: list[npt.NDArray[np.uint64]] = []
    good = np.zeros(len(table), np.bool_)
    for bitmap in distinct(parts):
        chosen = parts == bitmap
        stored = [part for part in range(bitmap.bit_length()) if bitmap >> part & 1]
        if len(stored) != fields.shape[1]:
            damaged += [key.tobytes() for key in table["key"][chosen]]
            continue
        good |= chosen
        while len(extents) <= stored[-1]:
            extents.append(np.zeros((len(table), 4), np.uint64))
        for at, part in enumerate(stored):
            np.copyto(extents[part], fields[:, at], where=chosen[:, None])
    return Listing(
        table["key"].view(np.uint8),
        table["parent"].view(np.uint8),
        table["flags"] & 1 != 0,
        table["space"].astype(np.int64),
        parts,
        extents,
    ).take(good)


def _joined(listings: list[Listing]) -> Listing:
    if len(listings) == 1:
        return listings[0]
    none = np.empty((0, KEY_BYTES), np.uint8)
    empty = Listing(
        none, none, np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.uint64), []
    )
    every = [empty, *listings]
    columns = zip(*((o.keys, o.parents, o.roots, o.spaces, o.parts) for o in every), strict=True)
    keys, parents, roots, spaces, parts = (np.concatenate(column) for column in columns)
    extents = []
    for part in range(max(len(one.extents) for one in every)):
        found = [
            one.extents[part] if part < len(one.extents) else np.zeros((len(one), 4), np.uint64)
            for one in every
        ]
        extents.append(np.concatenate(found))
    return Listing(keys, parents, roots, spaces, parts, extents)


def claim(listing: Listing, space: Space) -> npt.NDArray[np.bool_]:
    """Takes every extent in `space`. False for entries that contradict it or one another; what
    they would have is taken by nobody."""
    good = np.ones(len(listing), np.bool_)
    taken: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]] = []
    for part, extents in enumerate(listing.extents):
        here = np.flatnonzero(listing.has(part))
        addresses = extents[here, ADDRESS].astype(np.int64)
        claimed = space.claim(addresses, extents[here, NBYTES].astype(np.int64))
        good[here[~claimed]] = False
        taken.append((here[claimed], addresses[claimed]))
    for here, addresses in taken:  # a chunk is taken with all of its parts, or not at all
        space.free(addresses[~good[here]].tolist())
    return good
