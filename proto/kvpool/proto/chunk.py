"""A chunk's part at rest: the same bytes in DRAM, on SSD, on the wire and in exports.

    extent   = prologue ‖ payload
    prologue = header (128) ‖ one xxh3-64 per plane (8 each) ‖ zeros up to the alignment
    payload  = the planes in layer order (kvpool.proto.layout)

    header, little-endian
      0  magic "KVPOOL\\r\\n"     8    40  key                  32     104  header sum (xxh3-64
      8  version                2    72  generation            8          of bytes 0-103)      8
     10  part number            2    80  payload bytes         8     112  zeros               16
     12  planes                 4    88  layout id             8
     16  namespace digest (24)       96  flags                 8

The digest is cut to 24 bytes here; the key beside it already commits to all 32. The payload starts
at a page when it is at least 64 KiB (direct I/O, page-aligned views), else at 64 bytes. The sums
are seeded with key and part, so bytes of another chunk or part never pass. Unknown flags and header
bytes that should be zero are refused; the zeros before the payload are written, but not looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.layout import Part

HEADER_BYTES = 128
MAGIC = b"KVPOOL\r\n"
VERSION = 1
NO_SUMS = 1
"""Flag: the writer stored no plane sums. A counted state, never silently the same as verified."""

_HEADER = struct.Struct("<8sHHI24s32sQQQQ")
_SUM = struct.Struct("<Q")
_DIGEST_BYTES = 24
_RESERVED = bytes(16)
_PART_STEP = 0x9E3779B97F4A7C15  # odd constant, 2^64 / golden ratio: spreads small part numbers
_MASK = (1 << 64) - 1

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def prologue_bytes(part: Part) -> int:
    """Bytes before the payload."""
    return _prologue_bytes(part.nbytes, len(part.planes))


def _prologue_bytes(nbytes: int, planes: int) -> int:
    align = 4096 if nbytes >= 64 << 10 else 64
    return -(-(HEADER_BYTES + 8 * planes) // align) * align


def extent_bytes(part: Part) -> int:
    """Bytes of one stored chunk of `part`."""
    return prologue_bytes(part) + part.nbytes


def sum_seed(key: bytes, part: int) -> int:
    """Seed of the plane sums of `part` of chunk `key`."""
    return (int.from_bytes(key[:8], "little") ^ (part + 1) * _PART_STEP) & _MASK


def plane_sums(payload: npt.NDArray[np.uint8], offsets: Sequence[int], seed: int) -> list[int]:
    """xxh3-64 of each plane; `offsets` as from `Part.offsets`."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(payload[start:end], seed) for start, end in pairwise(offsets)]


def write_prologue(
    target: npt.NDArray[np.uint8],
    *,
    namespace: bytes,
    key: bytes,
    part: int,
    generation: int,
    nbytes: int,
    layout_id: int,
    sums: Sequence[int] | None,
    planes: int,
) -> None:
    """Fills the prologue at the start of `target`; ``sums=None`` stores none and says so.

    Every byte up to the payload is written, so nothing of the memory's last owner stays in it.
    Raises `InvalidError` if a value does not fit its field.
    """
    if len(namespace) < _DIGEST_BYTES or len(key) != KEY_BYTES:
        raise InvalidError(
            f"a namespace digest of {len(namespace)} and a key of {len(key)} bytes; "
            f"both must have {KEY_BYTES}"
        )
    if sums is not None and len(sums) != planes:
        raise InvalidError(f"{len(sums)} sums for {planes} planes")
    end = _prologue_bytes(nbytes, planes)
    if len(target) < end:
        raise InvalidError(f"a prologue of {end} bytes does not fit into {len(target)}")
    flags = 0 if sums is not None else NO_SUMS
    try:
        head = _HEADER.pack(
            MAGIC,
            VERSION,
            part,
            planes,
            namespace[:_DIGEST_BYTES],
            key,
            generation,
            nbytes,
            layout_id,
            flags,
        )
        packed = struct.pack(f"<{planes}Q", *sums) if sums is not None else b""
    except struct.error as error:
        raise InvalidError(f"a value does not fit the chunk header: {error}") from error
    head += _SUM.pack(xxhash.xxh3_64_intdigest(head)) + _RESERVED + packed
    memoryview(target)[:end] = head.ljust(end, b"\0")


def read_prologue(
    source: npt.NDArray[np.uint8],
    *,
    namespace: bytes,
    key: bytes,
    part: int,
    generation: int | None,
    nbytes: int,
    layout_id: int,
    planes: int,
) -> npt.NDArray[np.uint64] | str | None:
    """The plane sums if the header is the expected one; None if it stores none.

    A string says what is wrong: the extent is not what was asked for and must not be served.
    ``generation=None`` accepts any.
    """
    raw = source[: HEADER_BYTES + 8 * planes].tobytes()
    if len(raw) < HEADER_BYTES + 8 * planes:
        return f"short: {len(raw)} bytes"
    head = _HEADER.unpack_from(raw)
    if head[0] != MAGIC or _SUM.unpack_from(raw, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(
        raw[: _HEADER.size]
    ):
        return "no intact header"
    if raw[_HEADER.size + _SUM.size : HEADER_BYTES] != _RESERVED:
        return "no intact header: its reserved bytes are not zero"
    wanted = (VERSION, part, planes, namespace[:_DIGEST_BYTES], key)
    if head[1:6] != wanted:
        return f"header is of another chunk: {head[1:4]} instead of {wanted[:3]}, or another key"
    if generation is not None and head[6] != generation:
        return f"generation {head[6]} instead of {generation}"
    if head[7] != nbytes or head[8] != layout_id:
        return f"{head[7]} bytes of layout {head[8]:#x} instead of {nbytes} of {layout_id:#x}"
    if head[9] & ~NO_SUMS:
        return f"flags {head[9]:#x}, of which this version knows only {NO_SUMS:#x}"
    if head[9] & NO_SUMS:
        return None
    return np.frombuffer(raw, "<u8", planes, HEADER_BYTES)
