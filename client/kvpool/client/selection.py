"""What is wanted of a chunk, and where it goes: some planes, whole or cut to a token range.

The caller gives one buffer per chunk (the selected pieces packed in order), one buffer per plane of
each chunk, or one buffer for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kvpool.proto.errors import InvalidError
from kvpool.proto.layout import Part, token_ranges
from kvpool.transfer.copying import Bytes, as_bytes, copy

Destination = list[Bytes]
"""One view for all selected planes of a chunk, or one per selected plane."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Pieces (plane, offset in the payload, bytes) to move, in order; see `select`."""

    planes: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    plane_bytes: tuple[int, ...]
    """Selected bytes of each selected plane."""
    plane_pieces: tuple[int, ...]
    """Number of pieces of each selected plane."""
    nbytes: int
    whole: bool
    """All pieces are whole planes."""
    contiguous: bool
    """The pieces follow one another in the payload without gaps."""


@lru_cache(maxsize=4096)
def select(part: Part, planes: tuple[int, ...], tokens: int, first: int, last: int) -> Selection:
    """Tokens [first, last) of `planes` of a chunk of `tokens`. Raises `InvalidError`."""
    starts = part.offsets()
    pieces: list[tuple[int, int, int]] = []
    sizes, counts = [], []
    for plane in planes:
        runs = list(token_ranges(part.planes[plane], tokens, first, last))
        pieces += [(plane, starts[plane] + offset, nbytes) for offset, nbytes in runs]
        sizes.append(sum(nbytes for _, nbytes in runs))
        counts.append(len(runs))
    return Selection(
        planes,
        tuple(pieces),
        tuple(sizes),
        tuple(counts),
        sum(sizes),
        whole=(first, last) == (0, tokens),
        contiguous=all(a[1] + a[2] == b[1] for a, b in pairwise(pieces)),
    )


def select_chunks(
    part: Part, chunk_tokens: int, layers: Sequence[str] | None, start: int, end: int
) -> list[Selection]:
    """What tokens [start, end) of a prompt are, chunk by chunk; `layers` None means all.

    Raises `InvalidError` and, for a layer that the part does not have, `NamespaceError`.
    """
    if layers is None:
        planes = tuple(range(len(part.planes)))
    else:
        numbers = {plane.name: number for number, plane in enumerate(part.planes)}
        planes = tuple(
            numbers[name] if name in numbers else part.plane_index(name) for name in layers
        )
        if not planes:
            raise InvalidError("an empty list of layers was asked for; None means all")
    if start == end:
        return []
    return [
        select(
            part,
            planes,
            chunk_tokens,
            max(start - chunk * chunk_tokens, 0),
            min(end - chunk * chunk_tokens, chunk_tokens),
        )
        for chunk in range(start // chunk_tokens, -(-end // chunk_tokens))
    ]


def buffers_for(given: object, sizes: Sequence[int], *, writable: bool) -> list[Bytes]:
    """`given` as one view of sum(sizes) bytes, or one view per size. Raises `InvalidError`."""
    if isinstance(given, list | tuple):
        views = [as_bytes(one, writable) for one in given]
        got = [view.size for view in views]
        if got != list(sizes):
            raise InvalidError(
                f"{_shown(got)} were given where {_shown(sizes)} are needed, one buffer per plane"
            )
        return views
    view = as_bytes(given, writable)
    if view.size != sum(sizes):
        raise InvalidError(
            f"a buffer of {view.size} bytes was given for {sum(sizes)} bytes of one chunk"
        )
    return [view]


def _shown(sizes: Sequence[int]) -> str:
    if len(set(sizes)) == 1:
        return f"{len(sizes)} buffers of {sizes[0]} bytes"
    return f"{len(sizes)} buffers of {', '.join(map(str, sizes))} bytes"


def destinations(into: object, selections: Sequence[Selection]) -> list[Destination]:
    """The caller's buffers chunk by chunk: a list of them, or one buffer for all chunks.

    Raises `InvalidError`, which names the sizes.
    """
    if isinstance(into, list | tuple):
        if len(into) != len(selections):
            raise InvalidError(f"{len(into)} buffers were given for {len(selections)} chunks")
        return [
            buffers_for(one, selection.plane_bytes, writable=True)
            for one, selection in zip(into, selections, strict=True)
        ]
    view = as_bytes(into, writable=True)
    total = sum(selection.nbytes for selection in selections)
    if view.size != total:
        raise InvalidError(f"a buffer of {view.size} bytes was given for {total} bytes to pull")
    return [[one] for one in cut(view, [selection.nbytes for selection in selections])]


def landing(selection: Selection, into: Destination) -> list[Bytes]:
    """Where each piece of the selection goes, in order."""
    if len(into) == 1:
        return cut(into[0], [nbytes for _, _, nbytes in selection.pieces])
    out: list[Bytes] = []
    for target, count in zip(into, selection.plane_pieces, strict=True):
        pieces = selection.pieces[len(out) : len(out) + count]
        out += cut(target, [nbytes for _, _, nbytes in pieces])
    return out


def planes_of(selection: Selection, into: Destination) -> list[Bytes]:
    """Where each selected plane goes, in order."""
    return cut(into[0], selection.plane_bytes) if len(into) == 1 else into


def scatter(payload: Bytes, selection: Selection, into: Destination) -> None:
    """Copies the selected pieces of `payload`; neighbours that stay neighbours in one go."""
    if len(into) == 1 and selection.contiguous:
        first = selection.pieces[0][1]
        copy(into[0], payload[first : first + selection.nbytes])
        return
    for (_, offset, nbytes), target in zip(selection.pieces, landing(selection, into), strict=True):
        copy(target, payload[offset : offset + nbytes])


def cut(view: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """`view` in consecutive pieces of `sizes` bytes."""
    out, at = [], 0
    for nbytes in sizes:
        out.append(view[at : at + nbytes])
        at += nbytes
    return out
