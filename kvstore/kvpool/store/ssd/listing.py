"""A whole catalogue in columns: a million entries without a Python object for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvpool.proto.keys import KEY_BYTES
from kvpool.store.ssd.space import Space

Pair = tuple[bytes, bytes]
"""Key and packed entry, see `entries`."""
_HEAD, _EXTENT = 48, 32
BLOCK = 1 << 14
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

    def take(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Listing:
        """Some of the entries."""
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


def read_listing(pairs: Iterable[Pair]) -> tuple[Listing, list[bytes]]:
    """The entries, and the keys of what is none."""
    listings: list[Listing] = []
    damaged: list[bytes] = []
    rest = iter(pairs)
    while block := list(islice(rest, BLOCK)):
        listings += _read_block(block, damaged)
    return _joined(listings), damaged


def _read_block(pairs: list[Pair], damaged: list[bytes]) -> list[Listing]:
    """The entries, those of one length together."""
    by_length: dict[int, tuple[list[bytes], list[bytes]]] = {}
    for key, value in pairs:
        extents, rest = divmod(len(value) - _HEAD, _EXTENT)
        if len(key) != KEY_BYTES or rest or extents < 1:
            damaged.append(key)
            continue
        group = by_length.get(len(value))
        if group is None:
            group = by_length[len(value)] = ([], [])
        group[0].append(key)
        group[1].append(value)
    return [_columns(*group, damaged) for group in by_length.values()]


def _columns(keys: list[bytes], values: list[bytes], damaged: list[bytes]) -> Listing:
    """Entries with equally many extents."""
    names = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    raw = np.frombuffer(b"".join(values), np.uint8).reshape(len(keys), -1)
    numbers = np.ascontiguousarray(raw[:, :8]).view("<u4")
    parts = np.ascontiguousarray(raw[:, 40:48]).view("<u8")[:, 0]
    count = (raw.shape[1] - _HEAD) // _EXTENT
    fields = np.ascontiguousarray(raw[:, _HEAD:]).view("<u8").reshape(-1, count, 4)
    extents: list[npt.NDArray[np.uint64]] = []
    good = np.zeros(len(keys), np.bool_)
    for bitmap in np.unique(parts).tolist():
        chosen = parts == bitmap
        stored = [part for part in range(bitmap.bit_length()) if bitmap >> part & 1]
        if len(stored) != count:
            damaged += [keys[i] for i in np.flatnonzero(chosen).tolist()]
            continue
        good |= chosen
        while len(extents) <= stored[-1]:
            extents.append(np.zeros((len(keys), 4), np.uint64))
        for at, part in enumerate(stored):
            extents[part][chosen] = fields[chosen, at]
    roots, spaces = numbers[:, 1] & 1 != 0, numbers[:, 0].astype(np.int64)
    return Listing(names, raw[:, 8:40], roots, spaces, parts, extents).take(good)


def _joined(listings: list[Listing]) -> Listing:
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
