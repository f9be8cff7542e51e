"""What must hold between a store's structures after every transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvpool.store.index import UNLINKED
from kvpool.store.leases import Leases
from kvpool.store.pins import Pins
from kvpool.store.records import StoreSession
from kvpool.store.room import Room


def check_integrity(
    room: Room, leases: Leases, pins: Pins, sessions: Iterable[StoreSession]
) -> None:
    """Asserts that index, allocator, leases, pins and policies agree. O(rows)."""
    room.index.check_integrity()
    leases.check_integrity()
    _check_rows(room, leases, pins)
    _check_space(room, leases)
    _check_accounts(room, leases, pins)
    _check_sessions(leases, sessions)
    for policy in room.policies.values():
        policy.check_integrity()


def _check_rows(room: Room, leases: Leases, pins: Pins) -> None:
    index = room.index
    leased = Counter(row for lease in leases for row in lease.rows.tolist())
    pinned = Counter(row for pin in pins for row in pin.rows)
    known_rows = dict.fromkeys(room.policies.values(), 0)
    zombies = 0
    for row in index.live_rows().tolist():
        assert index.leases_at[row] == leased[row], (row, index.leases_at[row], leased[row])
        assert index.pins_at[row] == pinned[row], (row, index.pins_at[row], pinned[row])
        stored, state = index.resident_at[row] != 0, index.state_at[row]
        if state == UNLINKED:
            zombies += 1
            assert leased[row], "a deleted row that nothing holds"
        else:
            assert stored or not room.index.idle(row), "an empty row that nothing holds"
            known_rows[room.namespaces.by_id[index.namespace_at[row]].policy] += stored
        parent = index.parent_at[row]
        if stored and parent >= 0:
            assert index.resident_at[parent], "a stored chunk below an empty one"
        if row in index.writing:
            assert leased[row], "a write without a lease"
    assert zombies == room.zombies
    for policy, count in known_rows.items():
        assert policy.statistics()["rows"] == count


def _check_space(room: Room, leases: Leases) -> None:
    index = room.index
    in_rows = {}
    for row in index.live_rows().tolist():
        known = room.namespaces.by_id[index.namespace_at[row]]
        for part, nbytes in enumerate(known.extent_bytes):
            if index.resident_at[row] >> part & 1:
                address = index.address_at[part][row]
                assert address not in in_rows, "two chunks at one address"
                in_rows[address] = nbytes
    items = [item for lease in leases for item in (lease.items or {}).values()]
    assert room.loose == {item.address: item.nbytes for item in items}
    assert len(items) == len(room.loose) and not in_rows.keys() & room.loose.keys()
    if room.allocator is None:
        assert not in_rows
        return
    room.allocator.check_integrity()
    extents = [*in_rows.values(), *room.loose.values()]
    used = sum(room.allocator.slot_bytes(nbytes) for nbytes in extents)
    assert used == room.allocator.statistics().used_bytes, "sum of extents is not what is used"


def _check_accounts(room: Room, leases: Leases, pins: Pins) -> None:
    index = room.index
    used: Counter[str] = Counter()
    pinned: Counter[str] = Counter()
    for row in index.live_rows().tolist():
        known = room.namespaces.by_id[index.namespace_at[row]]
        nbytes = known.nbytes(index.resident_at[row])
        used[known.tenant] += nbytes
        pinned[known.tenant] += nbytes * (index.pins_at[row] > 0)
    for lease in leases:
        tenant = room.namespaces.by_id[lease.namespace].tenant
        used[tenant] += sum(item.nbytes for item in (lease.items or {}).values())
    for account in room.accounts:
        assert account.used == used[account.tenant] and account.pinned == pinned[account.tenant]
        assert account.left >= 0, "a tenant beyond its quota"
    assert all(pin.ends for pin in pins), "a pin without a claim"


def _check_sessions(leases: Leases, sessions: Iterable[StoreSession]) -> None:
    for session in sessions:
        overdue = sum(lease.nbytes for lease in leases.held_by(session.id) if lease.expired)
        assert session.quarantined_bytes == (overdue if session.mapped else 0)
