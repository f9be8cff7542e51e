"""Layout arithmetic. One idea: a part is planes with sizes, a plane is runs of tokens.

A *plane* (one layer, K and V together) of ``nbytes`` is ``runs`` equal runs, one after another;
a run holds the chunk's tokens in order, each ``token_bytes`` long::

    plane  = run 0 ‖ run 1 ‖ …                run = token 0 ‖ token 1 ‖ … ‖ token chunk_tokens-1
    portable: runs = 2 x kv_heads, token_bytes = head_dim x itemsize   (head → K/V → token → dim)
    native, tokens outermost: runs = 1 (K and V interleaved) or 2 (K, then V)
    opaque (recurrent state, packed 4-bit, …): runs = 0, cannot be cut by tokens

Whole chunks, layers, token ranges and head slices are all byte ranges that follow from this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.proto.errors import InvalidError, NamespaceError

PLANES_MAX = 4096
PARTS_MAX = 64
NBYTES_MAX = 1 << 48
"""Largest part in bytes: offsets and lengths stay far inside 64 bits."""
_U32_MAX = (1 << 32) - 1


def is_text(value: object) -> bool:
    """Whether `value` is a non-empty str that has a UTF-8 form (lone surrogates have none)."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer of a part: its name (how layers are matched), bytes per chunk and runs."""

    name: str
    nbytes: int
    runs: int

    def __post_init__(self) -> None:
        if not is_text(self.name):
            raise InvalidError(
                f"a plane needs a name, not {self.name!r}, because planes are matched by name"
            )
        if type(self.nbytes) is not int or not 1 <= self.nbytes <= NBYTES_MAX:
            raise InvalidError(
                f"plane {self.name!r} has {self.nbytes!r} bytes; an int from 1 to {NBYTES_MAX} "
                "is needed"
            )
        if type(self.runs) is not int or not 0 <= self.runs <= _U32_MAX:
            raise InvalidError(f"plane {self.name!r} has {self.runs!r} runs; an int >= 0 is needed")
        if self.runs and self.nbytes % self.runs:
            raise InvalidError(
                f"plane {self.name!r}: {self.nbytes} bytes are no multiple of {self.runs} runs"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a chunk's KV that one worker holds.

    ``window`` is None if a hit needs the part for the whole prefix, else the number of last
    tokens for which it is needed (sliding window, recurrent state).
    """

    name: str
    planes: tuple[Plane, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not is_text(self.name):
            raise InvalidError(f"a part needs a name, not {self.name!r}")
        if type(self.planes) is not tuple:
            raise InvalidError(f"part {self.name!r}: planes must be a tuple of Plane")
        if not 1 <= len(self.planes) <= PLANES_MAX:
            raise InvalidError(
                f"part {self.name!r} has {len(self.planes)} planes; 1 to {PLANES_MAX} are allowed"
            )
        if len({plane.name for plane in self.planes}) != len(self.planes):
            raise InvalidError(f"part {self.name!r} names a plane twice")
        if self.nbytes > NBYTES_MAX:
            raise InvalidError(f"part {self.name!r} has {self.nbytes} bytes, over {NBYTES_MAX}")
        if self.window is not None and not (
            type(self.window) is int and 1 <= self.window <= _U32_MAX
        ):
            raise InvalidError(
                f"part {self.name!r}: window {self.window!r} must be a positive int or None"
            )

    @property
    def nbytes(self) -> int:
        """Payload bytes per chunk."""
        return sum(plane.nbytes for plane in self.planes)

    def offsets(self) -> tuple[int, ...]:
        """Start of each plane inside the payload, and the payload's end."""
        starts = [0]
        for plane in self.planes:
            starts.append(starts[-1] + plane.nbytes)
        return tuple(starts)

    def plane_index(self, name: str) -> int:
        """Position of the plane called `name`. Raises `NamespaceError`."""
        for index, plane in enumerate(self.planes):
            if plane.name == name:
                return index
        known = ", ".join(plane.name for plane in self.planes)
        raise NamespaceError(f"part {self.name!r} has no plane {name!r}; it has {known}")


def portable(
    name: str, *, layers: Sequence[str], kv_heads: int, head_dim: int, itemsize: int, tokens: int
) -> Part:
    """The part of a worker that holds `kv_heads` heads of `layers`, in the portable layout."""
    for what, value in (
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("itemsize", itemsize),
        ("tokens", tokens),
    ):
        if value <= 0:
            raise InvalidError(f"{what} {value} must be positive")
    nbytes = 2 * kv_heads * tokens * head_dim * itemsize
    return Part(name, tuple(Plane(layer, nbytes, 2 * kv_heads) for layer in layers))


def native(name: str, *, layers: Sequence[str], nbytes: int, runs: int = 0) -> Part:
    """A part in an engine's own order: every layer `nbytes` per chunk, opaque unless `runs`."""
    return Part(name, tuple(Plane(layer, nbytes, runs) for layer in layers))


def token_ranges(plane: Plane, tokens: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """(offset, nbytes) inside `plane` of tokens [first, last) of a chunk of `tokens`.

    Raises `InvalidError`, at once, if the plane cannot be cut by tokens or the range leaves the
    chunk.
    """
    if not 0 <= first < last <= tokens:
        raise InvalidError(f"token range [{first}, {last}) is not inside a chunk of {tokens}")
    if (first, last) == (0, tokens):
        return iter([(0, plane.nbytes)])
    run_bytes = plane.nbytes // plane.runs if plane.runs else 0
    if not run_bytes or run_bytes % tokens:
        raise InvalidError(
            f"plane {plane.name!r} is opaque and cannot be cut by tokens; pull whole"
        )
    token_bytes = run_bytes // tokens
    nbytes = (last - first) * token_bytes
    return ((run * run_bytes + first * token_bytes, nbytes) for run in range(plane.runs))


@dataclass(frozen=True, slots=True)
class HeadShard:
    """KV heads [first, last) that one rank of a tensor-parallel group holds."""

    first: int
    last: int


def head_shards(kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Who holds which KV heads; with more ranks than heads, neighbours hold the same head."""
    if kv_heads <= 0 or ranks <= 0 or (kv_heads % ranks and ranks % kv_heads):
        raise InvalidError(f"{kv_heads} KV heads cannot be split over {ranks} ranks")
    if ranks <= kv_heads:
        each = kv_heads // ranks
        return tuple(HeadShard(rank * each, (rank + 1) * each) for rank in range(ranks))
    copies = ranks // kv_heads
    return tuple(HeadShard(rank // copies, rank // copies + 1) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to move inside one plane: from rank `source` at `source_offset` to `offset`."""

    source: int
    source_offset: int
    offset: int
    nbytes: int


def reshard(
    kv_heads: int, head_bytes: int, source_ranks: int, rank: int, ranks: int
) -> list[Piece]:
    """The pieces of a portable plane that `rank` of `ranks` needs from `source_ranks` parts.

    `head_bytes` is one head's K and V per chunk: 2 x tokens x head_dim x itemsize. The pieces
    cover the wanted plane exactly once: covered bytes == plane bytes. Raises `InvalidError`.
    """
    if not 0 <= rank < ranks:
        raise InvalidError(f"rank {rank} is none of {ranks} ranks")
    if head_bytes <= 0:
        raise InvalidError(f"a head of {head_bytes} bytes; at least 1 is needed")
    sources = head_shards(kv_heads, source_ranks)
    wanted = head_shards(kv_heads, ranks)[rank]
    pieces: list[Piece] = []
    head = wanted.first
    while head < wanted.last:
        source = next(i for i, shard in enumerate(sources) if shard.first <= head < shard.last)
        last = min(sources[source].last, wanted.last)
        pieces.append(
            Piece(
                source=source,
                source_offset=(head - sources[source].first) * head_bytes,
                offset=(head - wanted.first) * head_bytes,
                nbytes=(last - head) * head_bytes,
            )
        )
        head = last
    return pieces
