"""Bytes of one part between extents and the caller's buffers, with their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.client.selection import Destination, Selection, buffers_for, planes_of, scatter
from kvpool.proto.chunk import prologue_bytes, read_prologue, sum_seed, write_prologue
from kvpool.proto.layout import Part
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes, copy

BLOCK = 256 << 10
"""Bytes that are copied and then summed while they are in the core's own cache."""

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

    @classmethod
    def of(cls, namespace: Namespace, digest: bytes, number: int) -> PartFormat:
        part = namespace.parts[number]
        return cls(digest, namespace.layout_id, number, part, prologue_bytes(part), part.offsets())

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
            return Outcome.CORRUPT, True
        payload = extent[self.prologue :]
        if sums is None or not verify:
            scatter(payload, selection, into)
            return Outcome.HIT, False
        seed = sum_seed(key, self.number)
        if selection.whole:
            landed = [
                copy_and_sum(target, payload[self.starts[plane] : self.starts[plane + 1]], seed)
                for plane, target in zip(selection.planes, planes_of(selection, into), strict=True)
            ]
        else:
            landed = [
                xxhash.xxh3_64_intdigest(payload[self.starts[plane] : self.starts[plane + 1]], seed)
                for plane in selection.planes
            ]
        if landed != sums[list(selection.planes)].tolist():
            return Outcome.CORRUPT, True
        if not selection.whole:
            scatter(payload, selection, into)
        return Outcome.HIT, True

    def verify_landed(
        self, head: Bytes, key: bytes, selection: Selection, into: Destination, verify: bool
    ) -> tuple[Outcome, bool]:
        """As `deliver` for bytes that came over a stream; a plane that is cut stays unverified."""
        sums = self._sums(head, key, None)
        if isinstance(sums, str):
            return Outcome.CORRUPT, True
        if sums is None or not verify or not selection.whole:
            return Outcome.HIT, False
        seed = sum_seed(key, self.number)
        landed = [xxhash.xxh3_64_intdigest(plane, seed) for plane in planes_of(selection, into)]
        intact = landed == sums[list(selection.planes)].tolist()
        return (Outcome.HIT if intact else Outcome.CORRUPT), True

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
        sizes = [plane.nbytes for plane in self.part.planes]
        return buffers_for(payload, sizes, writable=False)

    def fill(
        self, extent: Bytes, key: bytes, generation: int, sources: list[Bytes], checksum: bool
    ) -> None:
        """Writes a whole chunk: its planes (or one buffer of all), then its prologue."""
        payload = extent[self.prologue :]
        if not checksum:
            targets = [payload] if len(sources) == 1 else self.split(payload)
            for target, source in zip(targets, sources, strict=True):
                copy(target, source)
            self.write_head(extent, key, generation, None)
            return
        seed = sum_seed(key, self.number)
        planes = self.split(sources[0]) if len(sources) == 1 else sources
        sums = [
            copy_and_sum(target, plane, seed)
            for target, plane in zip(self.split(payload), planes, strict=True)
        ]
        self.write_head(extent, key, generation, sums)

    def write_plane(self, extent: Bytes, key: bytes, plane: int, source: Bytes) -> int:
        """Writes one plane and returns its checksum; `write_head` completes the chunk."""
        start = self.prologue + self.starts[plane]
        return copy_and_sum(extent[start : start + source.size], source, sum_seed(key, self.number))

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
        seed = sum_seed(key, self.number)
        planes = self.split(sources[0]) if len(sources) == 1 else sources
        sums = [xxhash.xxh3_64_intdigest(plane, seed) for plane in planes] if checksum else None
        head = np.empty(self.prologue, np.uint8)
        self.write_head(head, key, 0, sums)
        return head

    def split(self, payload: Bytes) -> list[Bytes]:
        """The planes of a payload."""
        return [payload[start:end] for start, end in pairwise(self.starts)]


def copy_and_sum(target: Bytes, source: Bytes, seed: int) -> int:
    """Copies `source` to `target`, of the same length; xxh3-64 of what has landed."""
    if source.size <= BLOCK:
        np.copyto(target, source)
        return xxhash.xxh3_64_intdigest(target, seed)
    state = xxhash.xxh3_64(seed=seed)
    for at in range(0, source.size, BLOCK):
        block = target[at : at + BLOCK]
        np.copyto(block, source[at : at + BLOCK])
        state.update(block)
    return state.intdigest()
