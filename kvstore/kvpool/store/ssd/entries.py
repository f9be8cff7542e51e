"""What the catalogue says of one chunk, as values and as bytes.

    key    chunk key (32)                             it commits to its namespace, so it is enough
    value  head (48) ‖ one extent (32) per stored part, in the order of the part table

    head    0  namespace number  4       extent  0  address              8
            4  flags             4               8  bytes                8
            8  parent key       32              16  generation           8
           40  bitmap of parts   8              24  sum of the prologue  8

All little-endian. The parent's key lets a restart build the chains again; flag 1 says that there
is none. The sum of a part's prologue (xxh3-64 of the header and the plane sums) ties the entry to
exactly one write: the prologue's own sums then cover every plane, so the bytes of another write of
the same key do not pass, and an entry stays small however many planes a part has.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvpool.proto.chunk import HEADER_BYTES
from kvpool.proto.keys import KEY_BYTES
from kvpool.transfer.copying import Bytes

_HEAD = struct.Struct("<II32sQ")
_EXTENT = struct.Struct("<QQQQ")
_ROOT = 1
_NO_KEY = bytes(KEY_BYTES)


class Extent(NamedTuple):
    """Where one part lies on the disk, and which write it is."""

    part: int
    address: int
    nbytes: int
    generation: int
    sum: int
    """As `prologue_sum` gives it."""


class Entry(NamedTuple):
    """One chunk. `parent` is empty for the first of a chain."""

    key: bytes
    space: int
    """Number of the namespace in this catalogue."""
    parent: bytes
    extents: tuple[Extent, ...]

    def pack(self) -> bytes:
        """The value, without the key."""
        flags, parent = (0, self.parent) if self.parent else (_ROOT, _NO_KEY)
        parts = sum(1 << extent.part for extent in self.extents)
        return _HEAD.pack(self.space, flags, parent, parts) + b"".join(
            _EXTENT.pack(*extent[1:]) for extent in self.extents
        )

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> Entry:
        """The inverse of `pack`. Raises `ValueError` for what is none."""
        if len(key) != KEY_BYTES or len(value) < _HEAD.size:
            raise ValueError(f"an entry of {len(key)} and {len(value)} bytes")
        space, flags, parent, parts = _HEAD.unpack_from(value)
        if not parts or len(value) != _HEAD.size + parts.bit_count() * _EXTENT.size:
            raise ValueError(f"an entry of {len(value)} bytes for parts {parts:#x}")
        numbers = (part for part in range(parts.bit_length()) if parts >> part & 1)
        found = _EXTENT.iter_unpack(value[_HEAD.size :])
        extents = tuple(Extent(part, *rest) for part, rest in zip(numbers, found, strict=True))
        return cls(key, space, b"" if flags & _ROOT else parent, extents)


@dataclass(frozen=True, slots=True)
class SpaceRecord:
    """A namespace as the catalogue keeps it: enough to serve its chunks after a restart."""

    number: int
    tenant: str
    digest: bytes
    record: bytes
    """The `NamespaceRecord`, serialised."""

    def pack(self) -> bytes:
        """digest (32) ‖ length of the tenant's name (4) ‖ the name in UTF-8 ‖ record"""
        name = self.tenant.encode()
        return self.digest + len(name).to_bytes(4, "little") + name + self.record

    @classmethod
    def unpack(cls, number: int, value: bytes) -> SpaceRecord:
        """The inverse of `pack`. Raises `ValueError` for what is none."""
        end = 36 + int.from_bytes(value[32:36], "little")
        if not 36 < end < len(value):
            raise ValueError(f"a namespace of {len(value)} bytes")
        return cls(number, value[36:end].decode(), value[:32], value[end:])


def prologue_sum(extent: Bytes, planes: int) -> int:
    """xxh3-64 of the header and the plane sums at the start of `extent`."""
    return xxhash.xxh3_64_intdigest(extent[: HEADER_BYTES + 8 * planes])
