"""Bytes of one part between extents and the caller's buffers, with their checksums.

A *selection* is what is wanted of a chunk: some planes, whole or cut to a token range. The caller
gives one buffer per chunk (the selected pieces packed in order) or one buffer per plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

from kvpool.proto.chunk import plane_sums, prologue_bytes, read_prologue, sum_seed, write_prologue
from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.layout import Part, token_ranges
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes, as_bytes, copy

Destination = list[Bytes]


@dataclass(frozen=True, slots=True)
class Selection:
    """Pieces (plane, offset in the payload, bytes) to move, in order; see `select`."""

    planes: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    plane_bytes: tuple[int, ...]
    """Selected bytes of each selected plane."""
    whole: bool
    """All pieces are whole planes."""

    @property
    def nbytes(self) -> int:
        return sum(self.plane_bytes)


@lru_cache(maxsize=4096)
def select(part: Part, planes: tuple[int, ...], tokens: int, first: int, last: int) -> Selection:
    """Tokens [first, last) of `planes` of a chunk of `tokens`. Raises `InvalidError`."""
    starts = part.offsets()
    pieces: list[tuple[int, int, int]] = []
    sizes = []
    for plane in planes:
        cut = list(token_ranges(part.planes[plane], tokens, first, last))
        pieces += [(plane, starts[plane] + offset, nbytes) for offset, nbytes in cut]
        sizes.append(sum(nbytes for _, nbytes in cut))
    return Selection(planes, tuple(pieces), tuple(sizes), (first, last) == (0, tokens))


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How one part of a namespace lies in its extents."""

    digest: bytes
    layout_id: int
    number: int
    part: Part
    prologue: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, namespace: Namespace, digest: bytes, number: int) -> PartFormat:
        part = namespace.parts[number]
        return cls(digest, namespace.layout_id, number, part, prologue_bytes(part), part.offsets())

    @property
    def extent_bytes(self) -> int:
        return self.prologue + self.starts[-1]

    def deliver(
        self,
        extent: Bytes,
        key: bytes,
        generation: int | None,
        selection: Selection,
        into: Destination,
        verify: bool,
    ) -> tuple[Outcome, bool]:
        """Copies the selection out of `extent`; (HIT or CORRUPT, whether it was verified).

        Whole planes are verified where they have landed; of a plane that is cut, the source is.
        """
        sums = self._sums(extent, key, generation) if verify else None
        if isinstance(sums, str):
            return Outcome.CORRUPT, True
        payload = extent[self.prologue :]
        if sums is not None and not selection.whole:
            planes = [payload[self.starts[p] : self.starts[p + 1]] for p in selection.planes]
            if not self._intact(planes, sums, selection.planes, key):
                return Outcome.CORRUPT, True
        scatter(payload, selection, into)
        if sums is not None and selection.whole:
            planes = _planes_of(selection, into)
            if not self._intact(planes, sums, selection.planes, key):
                return Outcome.CORRUPT, True
        return Outcome.HIT, sums is not None

    def verify_landed(
        self, head: Bytes, key: bytes, selection: Selection, into: Destination
    ) -> tuple[Outcome, bool]:
        """As `deliver` for bytes that came over a stream; a plane that is cut stays unverified."""
        sums = self._sums(head, key, None)
        if isinstance(sums, str):
            return Outcome.CORRUPT, True
        if sums is None or not selection.whole:
            return Outcome.HIT, False
        intact = self._intact(_planes_of(selection, into), sums, selection.planes, key)
        return (Outcome.HIT if intact else Outcome.CORRUPT), True

    def _sums(self, extent: Bytes, key: bytes, generation: int | None) -> object:
        return read_prologue(
            extent,
            namespace=self.digest,
            key=key,
            part=self.number,
            generation=generation,
            nbytes=self.starts[-1],
            layout_id=self.layout_id,
            planes=len(self.part.planes),
        )

    def _intact(
        self, planes: Sequence[Bytes], sums: object, numbers: Sequence[int], key: bytes
    ) -> bool:
        seed = sum_seed(key, self.number)
        expected = np.asarray(sums)
        return all(
            xxhash.xxh3_64_intdigest(plane, seed) == expected[number]
            for plane, number in zip(planes, numbers, strict=True)
        )

    def fill(
        self, extent: Bytes, key: bytes, generation: int, planes: Sequence[Bytes], checksum: bool
    ) -> None:
        """Writes a whole chunk: its planes (or one buffer of all), then its prologue."""
        payload = extent[self.prologue :]
        if len(planes) == 1:
            copy(payload, planes[0])
        else:
            for number, plane in enumerate(planes):
                copy(payload[self.starts[number] : self.starts[number + 1]], plane)
        self.seal(extent, key, generation, checksum)

    def seal(self, extent: Bytes, key: bytes, generation: int, checksum: bool) -> None:
        """Writes the prologue for the payload that `extent` holds now."""
        payload = extent[self.prologue :]
        sums = plane_sums(payload, self.starts, sum_seed(key, self.number)) if checksum else None
        self.head(extent, key, generation, sums)

    def head(self, target: Bytes, key: bytes, generation: int, sums: Sequence[int] | None) -> None:
        """Writes the prologue at the start of `target`."""
        write_prologue(
            target,
            namespace=self.digest,
            key=key,
            part=self.number,
            generation=generation,
            nbytes=self.starts[-1],
            layout_id=self.layout_id,
            sums=sums,
            planes=len(self.part.planes),
        )

    def sums_of(self, planes: Sequence[Bytes], key: bytes) -> list[int]:
        """Checksums of a chunk given as its planes, or as one buffer of all."""
        seed = sum_seed(key, self.number)
        if len(planes) == 1:
            return plane_sums(planes[0], self.starts, seed)
        return [xxhash.xxh3_64_intdigest(plane, seed) for plane in planes]

    def sources(self, payload: object) -> list[Bytes]:
        """A chunk to be published: one buffer, or one per plane. Raises `InvalidError`."""
        sizes = [plane.nbytes for plane in self.part.planes]
        return buffers_for(payload, sizes, writable=False)


def buffers_for(given: object, sizes: Sequence[int], *, writable: bool) -> list[Bytes]:
    """`given` as one view of sum(sizes) bytes, or one view per size. Raises `InvalidError`."""
    if isinstance(given, list | tuple):
        views = [as_bytes(one, writable) for one in given]
        got = [view.size for view in views]
        if got != list(sizes):
            raise InvalidError(f"buffers of {got} bytes were given for planes of {list(sizes)}")
        return views
    view = as_bytes(given, writable)
    if view.size != sum(sizes):
        raise InvalidError(
            f"a buffer of {view.size} bytes was given for {sum(sizes)} bytes of one chunk"
        )
    return [view]


def destinations(into: object, selections: Sequence[Selection]) -> list[Destination]:
    """The caller's buffers chunk by chunk: a list of them, or one buffer for all chunks."""
    if isinstance(into, list | tuple):
        if len(into) != len(selections):
            raise InvalidError(f"{len(into)} buffers were given for {len(selections)} chunks")
        return [
            buffers_for(one, selection.plane_bytes, writable=True)
            for one, selection in zip(into, selections, strict=True)
        ]
    total = sum(selection.nbytes for selection in selections)
    view = as_bytes(into, writable=True)
    if view.size != total:
        raise InvalidError(f"the buffer has {view.size} bytes, the selection {total}")
    out, at = [], 0
    for selection in selections:
        out.append([view[at : at + selection.nbytes]])
        at += selection.nbytes
    return out


def landing(selection: Selection, into: Destination) -> list[Bytes]:
    """Where each piece of the selection goes, in order."""
    if len(into) == 1:
        sizes = [nbytes for _, _, nbytes in selection.pieces]
        return _cut(into[0], sizes)
    out = []
    for plane, target in zip(selection.planes, into, strict=True):
        out += _cut(target, [nbytes for p, _, nbytes in selection.pieces if p == plane])
    return out


def scatter(payload: Bytes, selection: Selection, into: Destination) -> None:
    """Copies the selected pieces of `payload`; neighbours that stay neighbours in one go."""
    pieces = selection.pieces
    first = pieces[0][1]
    if len(into) == 1 and _contiguous(pieces):
        copy(into[0], payload[first : first + into[0].size])
        return
    for (_, offset, nbytes), target in zip(pieces, landing(selection, into), strict=True):
        copy(target, payload[offset : offset + nbytes])


def _contiguous(pieces: Sequence[tuple[int, int, int]]) -> bool:
    first, last = pieces[0], pieces[-1]
    return last[1] + last[2] - first[1] == sum(nbytes for _, _, nbytes in pieces)


def _planes_of(selection: Selection, into: Destination) -> list[Bytes]:
    return _cut(into[0], selection.plane_bytes) if len(into) == 1 else into


def _cut(view: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    out, at = [], 0
    for nbytes in sizes:
        out.append(view[at : at + nbytes])
        at += nbytes
    return out


def key_at(keys: bytes, chunk: int) -> bytes:
    """The `chunk`-th of packed keys."""
    return keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]
