"""Whether bytes from the disk are what the catalogue says they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpool.proto.chunk import extent_bytes, plane_sums, prologue_bytes, read_prologue, sum_seed
from kvpool.proto.namespace import Namespace
from kvpool.store.ssd.entries import Extent, prologue_sum
from kvpool.transfer.copying import Bytes


@dataclass(frozen=True, slots=True)
class Form:
    """How one part of a namespace lies in its extents."""

    digest: bytes
    layout_id: int
    part: int
    prologue: int
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, namespace: Namespace, digest: bytes, part: int) -> Form:
        layout = namespace.parts[part]
        return cls(digest, namespace.layout_id, part, prologue_bytes(layout), layout.offsets())

    @property
    def planes(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Of an extent."""
        return self.prologue + self.offsets[-1]


def forms_of(namespace: Namespace, digest: bytes) -> tuple[Form, ...]:
    """By part."""
    return tuple(Form.of(namespace, digest, part) for part in range(len(namespace.parts)))


def sizes_of(namespace: Namespace) -> tuple[int, ...]:
    """Bytes of an extent, by part."""
    return tuple(extent_bytes(part) for part in namespace.parts)


def fault(content: Bytes, form: Form, key: bytes, extent: Extent) -> str:
    """What is wrong with what was read for `extent`; empty if nothing is."""
    if extent.nbytes != form.nbytes or content.size != form.nbytes:
        return f"{extent.nbytes} bytes, but the namespace says {form.nbytes}"
    if prologue_sum(content, form.planes) != extent.sum:
        return "its prologue is not the one that was written"
    sums = read_prologue(
        content,
        namespace=form.digest,
        key=key,
        part=form.part,
        generation=extent.generation,
        nbytes=form.offsets[-1],
        layout_id=form.layout_id,
        planes=form.planes,
    )
    if isinstance(sums, str):
        return sums
    if sums is None:
        return "it has no plane sums"
    found = plane_sums(content[form.prologue :], form.offsets, sum_seed(key, form.part))
    wrong = np.flatnonzero(np.array(found, np.uint64) != sums).tolist()
    return f"planes {wrong} differ from their sums" if wrong else ""
