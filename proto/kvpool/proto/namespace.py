"""The identity under which KV may be shared.

Every field is mandatory: a missing one is an error, never "any". What does not apply is said in a
word (``"none"``). The record is encoded injectively and hashed whole into every key::

    digest = sha256("kvpool/namespace/1" ‖ text(tenant) ‖ field 1 ‖ field 2 ‖ …)
    text   = length (u32 LE) ‖ UTF-8            number = u64 LE
    list   = count (u32 LE) ‖ items             part   = text(name) ‖ list(planes) ‖ number(window)
    plane  = text(name) ‖ number(nbytes) ‖ number(runs)

The tenant comes from the credential (the daemon says it in its Welcome), not from the record.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from functools import lru_cache

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import NamespaceError
from kvpool.proto.layout import PARTS_MAX, PLANES_MAX, Part, Plane, is_text

_PREFIX = b"kvpool/namespace/1"
_LAYOUT = re.compile(r"portable|native:[A-Za-z0-9._+-]+")
_KEY_SCHEME = re.compile(r"tokens|foreign:[A-Za-z0-9._+-]+")
CHUNK_TOKENS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for two engines to share KV. Raises `NamespaceError` if incomplete."""

    model: str
    """Name of the weights, e.g. ``HuggingFaceTB/SmolLM2-135M-Instruct``."""
    revision: str
    """Commit or hash of the weights and their quantisation."""
    kv_dtype: str
    """Type of the stored KV, e.g. ``bfloat16``, ``fp8_e4m3``."""
    kv_scales: str
    """Identity of the KV quantisation scales; ``none`` for unscaled types."""
    layout: str
    """``portable`` or ``native:<engine and order>``."""
    chunk_tokens: int
    """Tokens per chunk."""
    parts: tuple[Part, ...]
    """Part table: who holds what of a chunk. Its order gives the part numbers."""
    key_scheme: str
    """``tokens``, or ``foreign:<name>`` for engines that hand over page hashes."""
    adapter: str
    """LoRA identity; ``none`` for the base model."""
    rope: str
    """RoPE configuration, scaling included."""
    salt: str
    """Cache salt chosen by the user; ``none`` to share within the tenant."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("parts", "chunk_tokens"):
                continue
            if not is_text(value):
                raise NamespaceError(
                    f"namespace field {field.name!r} is {value!r}; every field is mandatory text, "
                    "say 'none' where nothing applies"
                )
        if type(self.chunk_tokens) is not int or not 1 <= self.chunk_tokens <= CHUNK_TOKENS_MAX:
            raise NamespaceError(
                f"namespace field 'chunk_tokens' is {self.chunk_tokens!r}; "
                f"it must be an int from 1 to {CHUNK_TOKENS_MAX}"
            )
        if (
            type(self.parts) is not tuple
            or not 1 <= len(self.parts) <= PARTS_MAX
            or not all(isinstance(part, Part) for part in self.parts)
        ):
            raise NamespaceError(
                f"namespace field 'parts' must be a tuple of 1 to {PARTS_MAX} parts"
            )
        if len({part.name for part in self.parts}) != len(self.parts):
            raise NamespaceError("namespace field 'parts' names a part twice")
        if all(part.window is not None for part in self.parts):
            raise NamespaceError(
                "at least one of 'parts' must be needed for the whole prefix (window None)"
            )
        if not _LAYOUT.fullmatch(self.layout):
            raise NamespaceError(
                f"layout {self.layout!r} is neither 'portable' nor 'native:<name>'"
            )
        if not _KEY_SCHEME.fullmatch(self.key_scheme):
            raise NamespaceError(
                f"key_scheme {self.key_scheme!r} is neither 'tokens' nor 'foreign:<name>'"
            )

    def digest(self, tenant: str) -> bytes:
        """32 bytes: the root of every key chain of `tenant` in this namespace.

        Raises `NamespaceError` without a tenant: it is in the identity, too.
        """
        if not is_text(tenant):
            raise NamespaceError(f"namespace field 'tenant' is {tenant!r}; it must be text")
        return _digest(self, tenant)

    @property
    def layout_id(self) -> int:
        """64 bits that stand for chunk size, layout and part table in chunk headers."""
        return _layout_id(self)

    @property
    def all_parts(self) -> int:
        """Bitmap with one bit per part."""
        return (1 << len(self.parts)) - 1

    def part_indices(self, parts: int) -> tuple[int, ...]:
        """The part numbers in bitmap `parts` (0 means all). Raises `NamespaceError`."""
        return _part_indices(len(self.parts), parts)

    def part_mask(self, names: tuple[str, ...] | None) -> int:
        """Bitmap of the parts called `names`; None means all. Raises `NamespaceError`."""
        if names is None:
            return self.all_parts
        index = {part.name: number for number, part in enumerate(self.parts)}
        mask = 0
        for name in names:
            if name not in index:
                raise NamespaceError(f"no part {name!r}; the namespace has {', '.join(index)}")
            mask |= 1 << index[name]
        if not mask:
            raise NamespaceError("an empty list of parts was asked for; None means all")
        return mask

    def without_layout(self) -> tuple[object, ...]:
        """What stays equal between namespaces that differ only in layout, chunks or keys."""
        skipped = ("layout", "chunk_tokens", "parts", "key_scheme")
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in skipped)

    def differences(self, other: Namespace) -> list[str]:
        """``field: mine / other's`` for each field that differs; of parts, the first difference."""
        return [
            f"parts: {_parts_difference(self.parts, other.parts)}"
            if f.name == "parts"
            else f"{f.name}: {getattr(self, f.name)!r} / {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]

    def to_record(self) -> wire.NamespaceRecord:
        """The message that travels in Open."""
        record = wire.NamespaceRecord(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "parts"}
        )
        for part in self.parts:
            planes = [
                wire.PlaneRecord(name=p.name, nbytes=p.nbytes, runs=p.runs) for p in part.planes
            ]
            record.parts.append(
                wire.PartRecord(name=part.name, planes=planes, window=part.window or 0)
            )
        return record

    @classmethod
    def from_record(cls, record: wire.NamespaceRecord) -> Namespace:
        """The inverse of `to_record`. Raises `NamespaceError` or `InvalidError`."""
        # Before any object is made of what a stranger sent.
        if len(record.parts) > PARTS_MAX:
            raise NamespaceError(
                f"namespace field 'parts' has {len(record.parts)} parts; {PARTS_MAX} are allowed"
            )
        for part in record.parts:
            if len(part.planes) > PLANES_MAX:
                raise NamespaceError(
                    f"part {part.name!r} in namespace field 'parts' has {len(part.planes)} planes; "
                    f"{PLANES_MAX} are allowed"
                )
        values = {f.name: getattr(record, f.name) for f in fields(cls) if f.name != "parts"}
        parts = tuple(
            Part(
                part.name,
                tuple(Plane(p.name, p.nbytes, p.runs) for p in part.planes),
                part.window or None,
            )
            for part in record.parts
        )
        return cls(parts=parts, **values)


def _parts_difference(mine: tuple[Part, ...], theirs: tuple[Part, ...]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} parts / {len(theirs)} parts"
    pairs = enumerate(zip(mine, theirs, strict=True))
    number, a, b = next((i, a, b) for i, (a, b) in pairs if a != b)
    where = f"part {number} has "
    if a.name != b.name:
        return f"{where}name {a.name!r} / {b.name!r}"
    if a.window != b.window:
        return f"{where}window {a.window} / {b.window}"
    if len(a.planes) != len(b.planes):
        return f"{where}{len(a.planes)} planes / {len(b.planes)} planes"
    p, q = next((p, q) for p, q in zip(a.planes, b.planes, strict=True) if p != q)
    return f"{where}{p} / {q}"


def _text(value: str) -> bytes:
    raw = value.encode()
    return len(raw).to_bytes(4, "little") + raw


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _parts(parts: tuple[Part, ...]) -> bytes:
    out = [len(parts).to_bytes(4, "little")]
    for part in parts:
        out += [_text(part.name), len(part.planes).to_bytes(4, "little")]
        for plane in part.planes:
            out += [_text(plane.name), _number(plane.nbytes), _number(plane.runs)]
        out.append(_number(part.window or 0))
    return b"".join(out)


@lru_cache(maxsize=256)
def _digest(namespace: Namespace, tenant: str) -> bytes:
    out = [_PREFIX, _text(tenant)]
    for field in fields(namespace):
        value = getattr(namespace, field.name)
        if isinstance(value, str):
            out.append(_text(value))
        elif isinstance(value, int):
            out.append(_number(value))
        else:
            out.append(_parts(value))
    return hashlib.sha256(b"".join(out)).digest()


@lru_cache(maxsize=256)
def _layout_id(namespace: Namespace) -> int:
    encoded = _text(namespace.layout) + _number(namespace.chunk_tokens) + _parts(namespace.parts)
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little")


@lru_cache(maxsize=4096)
def _part_indices(count: int, parts: int) -> tuple[int, ...]:
    if parts >> count:
        raise NamespaceError(f"part bitmap {parts:#x} names parts beyond the {count} declared")
    wanted = parts or (1 << count) - 1
    return tuple(i for i in range(count) if wanted >> i & 1)
