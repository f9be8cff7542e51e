"""A store with a clock that stands still, names that count, and bytes that say whose they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.proto.chunk import extent_bytes
from kvpool.proto.layout import Part, Plane
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.store.store import KnownNamespace, Match, Reservation, Store, StoreOptions, StoreSession

LINE = 64
SEGMENT = 16 << 10
TOKENS = 16
"""Tokens per chunk."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Entropy:
    """As many bytes as asked for, never the same twice."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, nbytes: int) -> bytes:
        self.given += 1
        return hashlib.shake_128(self.given.to_bytes(8, "big")).digest(nbytes)


def part(name: str, nbytes: int, window: int | None = None) -> Part:
    """A part whose extent has `nbytes` (its header included), needed for `window` last tokens."""
    header = extent_bytes(Part(name, (Plane("0", nbytes, 0),))) - nbytes
    made = Part(name, (Plane("0", nbytes - header, 0),), window)
    assert extent_bytes(made) == nbytes
    return made


def namespace(*parts: Part, model: str = "model") -> Namespace:
    return Namespace(
        model=model,
        revision="1",
        kv_dtype="float32",
        kv_scales="none",
        layout="native:test",
        chunk_tokens=TOKENS,
        parts=parts,
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


def chain(name: str, length: int, first: int = 0) -> list[bytes]:
    """Keys `first` to `length` of the chain called `name`."""
    return [hashlib.sha256(f"{name}/{at}".encode()).digest() for at in range(first, length)]


def blob(key: bytes, part: int, generation: int, nbytes: int) -> bytes:
    """Lines of 64 bytes that say whose they are, which write's, and where."""
    name = hashlib.sha256(key + bytes([part])).digest()[:16]
    middle = b"".join(
        name + offset.to_bytes(8, "little") + generation.to_bytes(8, "little") + bytes(32)
        for offset in range(0, nbytes, LINE)
    )
    return middle[:nbytes]


@dataclass
class World:
    """A store of a few segments and the bytes behind it."""

    segments: int = 4
    regions: int = 1
    chunks: int = 1000
    options: dict[str, Any] = field(default_factory=dict)
    learned: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        region_bytes = self.segments * SEGMENT // self.regions
        options = StoreOptions(region_bytes, self.chunks, SEGMENT, **self.options)
        self.store = Store(options, clock=self.clock, entropy=Entropy(), learned=self.learned)
        for _ in range(self.regions):
            self.store.add_region()
        self.memory = bytearray(self.segments * SEGMENT)

    def session(self, tenant: str = "red", *, mapped: bool = True) -> StoreSession:
        return self.store.open_session(tenant, mapped=mapped)

    def open(self, *parts: Part, tenant: str = "red", model: str = "model") -> KnownNamespace:
        return self.store.open_namespace(tenant, namespace(*parts, model=model))[0]

    # ---- bytes

    def write(self, address: int, content: bytes) -> None:
        assert address >= 0 and address + len(content) <= len(self.memory)
        self.memory[address : address + len(content)] = content

    def read(self, address: int, nbytes: int) -> bytes:
        assert address >= 0 and address + nbytes <= len(self.memory)
        return bytes(self.memory[address : address + nbytes])

    def fill(
        self,
        known: KnownNamespace,
        reservation: Reservation,
        keys: Sequence[bytes],
        parts: Sequence[int] | None = None,
    ) -> None:
        """Writes what was reserved."""
        indices = parts if parts is not None else range(len(known.extent_bytes))
        for (i, j), address, generation in granted(reservation):
            nbytes = known.extent_bytes[indices[j]]
            self.write(address, blob(keys[i], indices[j], generation, nbytes))

    # ---- whole operations

    def publish(
        self,
        session: StoreSession,
        known: KnownNamespace,
        keys: Sequence[bytes],
        parent: bytes = b"",
        parts: int = 0,
    ) -> Reservation:
        """Reserves, writes and commits; every item must come out OK."""
        reservation = self.store.reserve(session, known.id, parent, b"".join(keys), parts)
        assert (reservation.outcomes == Outcome.OK).all(), reservation
        self.fill(known, reservation, keys, known.namespace.part_indices(parts))
        assert set(self.store.commit(session, reservation.lease)) == {Outcome.OK}
        return reservation

    def hits(self, session: StoreSession, known: KnownNamespace, keys: Sequence[bytes]) -> int:
        """How many leading chunks are servable, without a trace."""
        return self.store.match(session, known.id, b"".join(keys), peek=True).hits

    def pull(self, session: StoreSession, known: KnownNamespace, keys: Sequence[bytes]) -> int:
        """Matches, checks every byte, releases; returns the hits."""
        match = self.store.match(session, known.id, b"".join(keys))
        for (i, part), address, generation in extents(match, len(known.extent_bytes)):
            nbytes = known.extent_bytes[part]
            assert self.read(address, nbytes) == blob(keys[i], part, generation, nbytes)
        if match.hits:
            assert self.store.release(session, match.lease) is Outcome.OK
        return match.hits

    def used_bytes(self) -> int:
        assert self.store.allocator is not None
        return self.store.allocator.statistics().used_bytes


Extent = tuple[tuple[int, int], int, int]
"""((chunk, position of the part), address, generation)"""


def extents(match: Match, parts: int) -> Iterator[Extent]:
    """What a match grants, without the gaps."""
    return _unpack(np.frombuffer(match.extents, np.int64).reshape(match.hits, parts, 2))


def granted(reservation: Reservation) -> Iterator[Extent]:
    """What a reservation grants."""
    chunks, parts = reservation.outcomes.shape
    return _unpack(np.frombuffer(reservation.extents, np.int64).reshape(chunks, parts, 2))


def _unpack(columns: npt.NDArray[np.int64]) -> Iterator[Extent]:
    for i, chunk in enumerate(columns.tolist()):
        for j, (address, generation) in enumerate(chunk):
            if address >= 0:
                yield (i, j), address, generation
