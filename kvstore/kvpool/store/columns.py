"""The store's answers as messages: bulk results are columns of packed little-endian arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError
from kvpool.proto.outcomes import Outcome
from kvpool.store.records import Explanation, Loading, Match

DRAM, SSD = 2, 3
"""Numbers of the tiers in Explained."""


def matched(match: Match) -> wire.Matched:
    """The answer to Match and Adopt."""
    answer = wire.Matched(
        hits=match.hits,
        miss_outcome=match.outcome,
        miss_reason=match.reason,
        lease=match.lease,
        lease_ms=int(match.lease_s * 1000),
        extents=match.extents,
    )
    if match.cold or match.skipped:
        answer.ssd_chunks, answer.skipped = match.cold, match.skipped
        answer.load_ms = math.ceil(match.load_s * 1000)  # 0 would say that nothing is to be loaded
    return answer


def loaded(loading: Loading) -> wire.Loaded:
    """The answer to Load."""
    return wire.Loaded(
        chunks=loading.chunks,
        pending=loading.pending,
        outcome=loading.outcome,
        wait_us=int(loading.wait_s * 1e6),
        extents=loading.extents,
    )


def verdict(outcomes: Sequence[Outcome]) -> wire.Verdict:
    """One outcome per item asked for."""
    return wire.Verdict(outcomes=bytes(outcomes))


def items(packed: bytes) -> list[int] | None:
    """Item numbers; None (all) if `packed` is empty. Raises `InvalidError`."""
    if len(packed) % 4:
        raise InvalidError(f"{len(packed)} bytes of item numbers are no multiple of 4")
    return np.frombuffer(packed, "<u4").tolist() if packed else None


def explained(found: Sequence[Explanation]) -> wire.Explained:
    """The answer to Explain."""
    return wire.Explained(
        outcomes=bytes(e.outcome for e in found),
        reasons=bytes(e.reason for e in found),
        tiers=bytes((SSD if e.on_ssd else DRAM) if e.parts else 0 for e in found),
        nbytes=np.array([e.nbytes for e in found], "<u8").tobytes(),
        parts=np.array([e.parts for e in found], "<u8").tobytes(),
        leases=np.array([e.leases for e in found], "<u4").tobytes(),
        pins=np.array([e.pins for e in found], "<u4").tobytes(),
        age_ms=np.array([e.age_s * 1000 for e in found]).astype("<u8").tobytes(),
        children=np.array([e.children for e in found], "<u4").tobytes(),
        durable=bytes(e.durable for e in found),
    )


def key_page(keys: bytes, namespaces: Sequence[int], cursor: int) -> wire.KeyPage:
    """The answer to Keys."""
    return wire.KeyPage(keys=keys, namespaces=np.array(namespaces, "<u4").tobytes(), cursor=cursor)
