"""What a store is told at birth, counts, and answers: plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.accounts import Limits
from kvpool.store.eviction import DEFAULT_POLICY

KEYS_MAX = 1 << 17
"""Keys per request."""
NO_EXTENT = (-1, 0)
"""(address, generation) of a part that is not there."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What one store is told at birth.

    `chunks` bounds the index (rows), `segment_bytes` 0 lets the first namespace decide:
    max(64 MiB, 8 chunks), at most an eighth of the first regions so that classes can coexist.
    """

    region_bytes: int
    chunks: int
    segment_bytes: int = 0
    policy: str = DEFAULT_POLICY
    lease_s: float = 30.0
    lease_s_max: float = 3600.0
    reserve_max: int = 32
    """Chunks per Reserve. Making room for one costs tens of microseconds, and nobody else is served
    meanwhile: 32 keep a match's wait within some milliseconds while others publish."""
    quarantine_share: float = 0.25
    """Share of the capacity that one session may hold past its leases before it gets BUSY."""
    pinned_share: float = 1.0
    """Share of the capacity that may be pinned."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Reserve and quota by tenant."""


@dataclass(slots=True, eq=False)
class StoreSession:
    """One connected client. `mapped` sessions copy by themselves, so their extents outlive TTLs."""

    id: int
    tenant: str
    mapped: bool
    quarantined_bytes: int = 0


class Match(NamedTuple):
    """`hits` leading chunks are servable; `extents` is (hits, parts, 2) int64 as bytes."""

    hits: int
    outcome: Outcome
    reason: Reason
    lease: bytes = b""
    lease_s: float = 0.0
    extents: bytes = b""
    cold: int = 0
    """Chunks after the hits that are on the SSD: `Store.load` brings them."""
    load_s: float = 0.0
    """How long that is expected to take."""
    skipped: int = 0
    """Chunks on the SSD that would take longer to load than to compute."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the chunks of a match are that were on the SSD."""

    chunks: int
    """Leading chunks of the lease that are in memory."""
    pending: bool
    """More are on their way."""
    outcome: Outcome
    """Why no more are, if some are left; else HIT."""
    wait_s: float
    """When it is worth to ask again."""
    extents: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """`outcomes` is (n, parts) uint8; `extents` like a match's, (-1, 0) where not OK."""

    outcomes: npt.NDArray[np.uint8]
    lease: bytes
    lease_s: float
    extents: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where one chunk is and what holds it, or why it is not there."""

    outcome: Outcome
    reason: Reason
    parts: int = 0
    nbytes: int = 0
    leases: int = 0
    pins: int = 0
    age_s: float = 0.0
    children: int = 0
    on_ssd: bool = False
    """And not in memory."""
    durable: bool = False
    """All of it is on the SSD: it would survive the process."""


@dataclass(slots=True)
class Counters:
    """Events since the start; they only grow."""

    matches: int = 0
    hit_chunks: int = 0
    missed_matches: int = 0
    published_chunks: int = 0
    published_bytes: int = 0
    evicted_chunks: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    """`evicted_chunks` by reason: room, rows, quota, segment."""
    reassigned_segments: int = 0
    deleted_chunks: int = 0
    corrupt_chunks: int = 0
    busy: int = 0
    expired_leases: int = 0
    refused_pins: int = 0
    ignored_experience: int = 0
    hints: int = 0
    hint_kinds: dict[str, int] = field(default_factory=dict)
    """What hints said; one may say several things."""
    hint_ends: dict[str, int] = field(default_factory=dict)
    """What became of hints: see `kvpool.store.hints`."""

    def count_hint(self, kind: str) -> None:
        self.hint_kinds[kind] = self.hint_kinds.get(kind, 0) + 1

    def count_hint_end(self, end: str) -> None:
        self.hint_ends[end] = self.hint_ends.get(end, 0) + 1


def split_keys(keys: bytes) -> list[bytes]:
    """The keys one by one. Raises as `check_keys`."""
    check_keys(keys)
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def check_keys(keys: bytes) -> int:
    """The number of keys. Raises `InvalidError` unless they are whole, and 1 to `KEYS_MAX`."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not count:
        raise InvalidError(f"{len(keys)} bytes of keys are not a positive multiple of {KEY_BYTES}")
    if count > KEYS_MAX:
        raise InvalidError(f"{count} keys exceed the limit of {KEYS_MAX}; split the batch")
    return count
