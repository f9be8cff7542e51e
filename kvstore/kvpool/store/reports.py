"""Looking into a store: explanations, key pages, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.index import LINKED, NO_ROW, Index
from kvpool.store.leases import Lease
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.records import Explanation, StoreSession
from kvpool.store.room import Room


def explain(room: Room, known: KnownNamespace, key: bytes, now: float) -> Explanation:
    """What is known about one key."""
    index = room.index
    row = index.find_one(known.id, key)
    if row == NO_ROW:
        return Explanation(Outcome.MISS, room.ghosts.reason(known.id, key))
    resident = index.resident_at[row]
    reason = Reason.UNKNOWN
    if not resident:
        reason = Reason.BEING_WRITTEN
    elif index.state_at[row] != LINKED:
        reason = Reason.ORPHAN
    elif resident & known.prefix_mask != known.prefix_mask:
        reason = Reason.PART_MISSING
    return Explanation(
        outcome=Outcome.MISS if reason else Outcome.HIT,
        reason=reason,
        parts=resident,
        nbytes=known.nbytes(resident),
        leases=index.leases_at[row],
        pins=index.pins_at[row],
        age_s=max(0.0, now - float(room.used_at[row])) if resident else 0.0,
        children=index.children_at[row],
    )


def page(
    index: Index, namespaces: Sequence[int], cursor: int, limit: int
) -> tuple[bytes, list[int], int]:
    """`limit` (at least 1) stored keys of `namespaces` from row `cursor` on; see `Store.keys`."""
    rows = index.linked_rows()
    rows = rows[(rows >= cursor) & (index.resident[rows] != 0)]
    rows = rows[np.isin(index.namespace[rows], namespaces)]
    listed = rows[: max(1, limit)]
    following = int(listed[-1]) + 1 if len(rows) > len(listed) else 0
    keys = b"".join(index.key_bytes(row) for row in listed.tolist())
    return keys, index.namespace[listed].tolist(), following


def figures(
    room: Room, leases: Iterable[Lease], sessions: Iterable[StoreSession]
) -> dict[str, int]:
    """Bytes by what holds them."""
    held = [np.empty(0, np.intp), *(lease.rows for lease in leases)]
    rows = np.unique(np.concatenate(held))
    sizes = room.nbytes_of(rows)
    leased = int(sizes.sum())
    both = int(sizes[room.index.pins[rows] > 0].sum())
    pinned = sum(account.pinned for account in room.accounts)
    writing = sum(room.loose.values())
    stored = sum(account.used for account in room.accounts) - writing
    return {
        "total": room.capacity_bytes,
        "stored": stored,
        "leased": leased,
        "pinned": pinned,
        "evictable": stored - leased - pinned + both,
        "writing": writing,
        "quarantined": sum(session.quarantined_bytes for session in sessions),
    }
