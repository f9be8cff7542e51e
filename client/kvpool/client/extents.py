"""Bytes of one part between extents and the caller's buffers, with their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.client.selection import (
    Destination,
    Selection,
    buffers_for,
    planes_of,
    scatter,
)
from kvpool.proto.chunk import prologue_bytes, read_prologue, sum_seed, write_prologue
from kvpool.proto.layout import Part
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes, copy, move

RUN = 1 << 20
"""Bytes that are copied and then summed. Smaller copies are slow where the target lies badly, see
`kvpool.transfer.copying.empty`. After far larger ones, sums find nothing in a cache."""

HIT, CORRUPT = Outcome.HIT, Outcome.CORRUPT

Sums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How one part of a namespace lies in its extents: prologue, then the planes."""

    digest: bytes
    layout_id: int
    number: int
    part: Part
    prologue: int
    starts: tuple[int, ...]
    """Start of each plane inside the payload, and the payload's end."""
    sizes: tuple[int, ...]
    """Bytes of each plane."""

    @classmethod
    def of(cls, namespace: Namespace, digest: bytes, number: int) -> PartFormat:
        part = namespace.parts[number]
        return cls(
            digest,
            namespace.layout_id,
            number,
            part,
            prologue_bytes(part),
            part.offsets(),
            tuple(plane.nbytes for plane in part.planes),
        )

    @property
    def payload_bytes(self) -> int:
        return self.starts[-1]

    @property
    def extent_bytes(self) -> int:
        return self.prologue + self.starts[-1]

    @property
    def planes(self) -> int:
        """Number of planes."""
        return len(self.starts) - 1

    # ---- reading

    def deliver(
        self,
        extent: Bytes,
        key: bytes,
        generation: int,
        selection: Selection,
        into: Destination,
        verify: bool,
    ) -> tuple[Outcome, bool]:
        """Copies the selection out of `extent`; (HIT or CORRUPT, whether it was verified).

        Whole planes are verified where they have landed; of a plane that is cut, the source is.
        Without `verify` only the header is looked at.
        """
        sums = self._sums(extent, key, generation)
        if isinstance(sums, str):
            return CORRUPT, True
        payload = extent[self.prologue :]
        if sums is None or not verify:
            scatter(payload, selection, into)
            return HIT, False
        seed = sum_seed(key, self.number)
        if not selection.whole:
            landed = sums_of([self._plane(payload, plane) for plane in selection.planes], seed)
        elif len(into) == 1 and selection.contiguous:
            first = selection.planes[0]
            source = payload[self.starts[first] : self.starts[selection.planes[-1] + 1]]
            landed = copy_and_sum(into[0], source, selection.plane_bytes, seed)
        else:
            sources = [self._plane(payload, plane) for plane in selection.planes]
            landed = copy_and_sum_each(planes_of(selection, into), sources, seed)
        if landed != sums[list(selection.planes)].tolist():
            return CORRUPT, True
        if not selection.whole:
            scatter(payload, selection, into)
        return HIT, True

    def verify_landed(
        self, head: Bytes, key: bytes, selection: Selection, into: Destination, verify: bool
    ) -> tuple[Outcome, bool]:
        """As `deliver` for bytes that came over a stream; a plane that is cut stays unverified."""
        sums = self._sums(head, key, None)
        if isinstance(sums, str):
            return CORRUPT, True
        if sums is None or not verify or not selection.whole:
            return HIT, False
        seed = sum_seed(key, self.number)
        landed = sums_of(planes_of(selection, into), seed)
        intact = landed == sums[list(selection.planes)].tolist()
        return (HIT if intact else CORRUPT), True

    def _plane(self, payload: Bytes, plane: int) -> Bytes:
        return payload[self.starts[plane] : self.starts[plane + 1]]

    def _sums(self, extent: Bytes, key: bytes, generation: int | None) -> Sums | str | None:
        return read_prologue(
            extent,
            namespace=self.digest,
            key=key,
            part=self.number,
            generation=generation,
            nbytes=self.payload_bytes,
            layout_id=self.layout_id,
            planes=self.planes,
        )

    # ---- writing

    def sources(self, payload: object) -> list[Bytes]:
        """A chunk to be published: one buffer, or one per plane. Raises `InvalidError`."""
        return buffers_for(payload, self.sizes, writable=False)

    def write_payload(
        self, extent: Bytes, key: bytes, sources: list[Bytes], checksum: bool
    ) -> list[int] | None:
        """Writes all planes (or one buffer of them all); their sums, if they are to have any.
        `write_head` completes the chunk. REQUIRES: `sources` as from `sources`."""
        payload = extent[self.prologue :]
        targets = [payload] if len(sources) == 1 else self.split(payload)
        if not checksum:
            for target, source in zip(targets, sources, strict=True):
                move(target, source)
            return None
        seed = sum_seed(key, self.number)
        if len(sources) == 1:
            return copy_and_sum(payload, sources[0], self.sizes, seed)
        return copy_and_sum_each(targets, sources, seed)

    def write_plane(
        self, extent: Bytes, key: bytes, plane: int, source: Bytes, checksum: bool
    ) -> int:
        """Writes one plane and returns its checksum (0 if it is to have none); `write_head`
        completes the chunk."""
        start = self.prologue + self.starts[plane]
        target = extent[start : start + source.size]
        if not checksum:
            copy(target, source)
            return 0
        return _copy_and_sum_one(target, source, sum_seed(key, self.number))

    def write_head(
        self, target: Bytes, key: bytes, generation: int, sums: Sequence[int] | None
    ) -> None:
        """Writes the prologue at the start of `target`; without sums it says that it has none."""
        write_prologue(
            target,
            namespace=self.digest,
            key=key,
            part=self.number,
            generation=generation,
            nbytes=self.payload_bytes,
            layout_id=self.layout_id,
            sums=sums,
            planes=self.planes,
        )

    def head(self, key: bytes, sources: list[Bytes], checksum: bool) -> Bytes:
        """The prologue of a chunk that is sent rather than written in place."""
        planes = self.split(sources[0]) if len(sources) == 1 else sources
        sums = sums_of(planes, sum_seed(key, self.number)) if checksum else None
        head = np.empty(self.prologue, np.uint8)
        self.write_head(head, key, 0, sums)
        return head

    def split(self, payload: Bytes) -> list[Bytes]:
        """The planes of a payload."""
        return [payload[start:end] for start, end in pairwise(self.starts)]


def sums_of(planes: Sequence[Bytes], seed: int) -> list[int]:
    """xxh3-64 of each plane."""
    return [xxhash.xxh3_64_intdigest(plane, seed) for plane in planes]


def copy_and_sum(target: Bytes, source: Bytes, sizes: Sequence[int], seed: int) -> list[int]:
    """Copies `source`, which is planes of `sizes` bytes, to `target`; xxh3-64 of each as it has
    landed."""
    sums: list[int] = []
    landed = memoryview(target)
    for start, end, planes in _runs(tuple(sizes)):
        if len(planes) == 1:
            sums.append(_copy_and_sum_one(target[start:end], source[start:end], seed))
        else:
            np.copyto(target[start:end], source[start:end])
            sums += [xxhash.xxh3_64_intdigest(landed[a:b], seed) for a, b in planes]
    return sums


def copy_and_sum_each(targets: Sequence[Bytes], sources: Sequence[Bytes], seed: int) -> list[int]:
    """As `copy_and_sum`, plane by plane. Each copy empties the caches, so that all that Python does
    between two of them is slow: it is prepared beforehand."""
    pairs = zip(targets, sources, strict=True)
    return [_copy_and_sum_one(target, source, seed) for target, source in pairs]


@lru_cache(maxsize=256)
def _runs(sizes: tuple[int, ...]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Neighbouring planes that make up `RUN` bytes together: where they start and end, and the
    bounds of each."""
    runs: list[tuple[int, int, list[tuple[int, int]]]] = []
    planes: list[tuple[int, int]] = []
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    for start, end in bounds:
        planes.append((start, end))
        if end - planes[0][0] >= RUN or end == bounds[-1][1]:
            runs.append((planes[0][0], end, planes))
            planes = []
    return runs


def _copy_and_sum_one(target: Bytes, source: Bytes, seed: int) -> int:
    """One plane, in equal steps of at least `RUN` bytes if it is that large."""
    if source.size < 2 * RUN:
        np.copyto(target, source)
        return xxhash.xxh3_64_intdigest(target, seed)
    step = -(-source.size // (source.size // RUN))
    state = xxhash.xxh3_64(seed=seed)
    for at in range(0, source.size, step):
        block = target[at : at + step]
        np.copyto(block, source[at : at + step])
        state.update(block)
    return state.intdigest()
