"""What became of one key and part. The numbers are on the wire and in files: never renumber."""

from __future__ import annotations

from enum import IntEnum
from typing import SupportsIndex


class Outcome(IntEnum):
    """The answer for one key and part, fixed for all protocol versions. An unknown number reads
    as `MISS`, the one that is always safe."""

    HIT = 0
    """Stored and servable; with a lease, its bytes stay until the lease ends."""
    MISS = 1
    """Not stored here; `Reason` says more."""
    OK = 2
    """Done as asked."""
    EXISTS = 3
    """Already stored: the first commit won, nothing was written."""
    WRITING = 4
    """Another writer holds this key and part."""
    NO_PARENT = 5
    """The chunk before it is not stored, so it could never be matched."""
    EXPIRED = 6
    """The lease ran out before the operation ended."""
    CORRUPT = 7
    """The bytes failed their checksum or header; quarantined and counted."""
    BUSY = 8
    """Not now: everything is leased, pinned or quarantined, or the chunk above is being loaded."""
    TOO_LARGE = 9
    """Larger than the tier, segment or limit can ever hold."""
    TOO_SMALL = 10
    """Empty, or shorter than the namespace's layout."""
    UNREACHABLE = 11
    """The holder did not answer in time."""
    STALE_EPOCH = 12
    """The lease is from an earlier life of the daemon or connection."""
    DENIED = 13
    """This tenant or session may not do that."""
    INVALID = 14
    """The request contradicts itself or the namespace."""

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        # A number that only a newer peer knows: whatever it means, the bytes are not to be had.
        return cls.MISS if isinstance(value, SupportsIndex) else None


class Reason(IntEnum):
    """Why a key missed. Open: a reader treats numbers it does not know as `UNKNOWN`."""

    UNKNOWN = 0
    NEVER_STORED = 1
    EVICTED = 2
    DELETED = 3
    OTHER_NAMESPACE = 4
    BEHIND_GAP = 5
    BEING_WRITTEN = 6
    PART_MISSING = 7
    QUARANTINED = 8
    ORPHAN = 9
    SLOW_TIER = 10
    """Stored, but computing it takes less time than loading it."""

    @classmethod
    def _missing_(cls, value: object) -> Reason:
        return cls.UNKNOWN
