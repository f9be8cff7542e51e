"""Pins: what is kept from eviction by name, for a time or until unpinned.

Whoever pins a chain has a *claim* on it, and the pin lasts as long as one claim does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from kvpool.proto.errors import BusyError
from kvpool.store.index import Rows
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.room import Room

PinName = tuple[int, bytes]
"""A namespace and the last key of a chain, which commits to all before it."""
CLAIMS_MAX = 1024
"""Per pin. Without a bound, a client that renews a pin without a TTL would fill the memory."""


@dataclass(slots=True)
class Pin:
    """`rows` are stored; what is deleted leaves the pin."""

    rows: set[int] = field(default_factory=set)
    ends: list[float] = field(default_factory=list)
    """When each claim ends, as a heap; infinity: when it is unpinned."""


class Pins:
    """All pins of a store; a row counts the pins that it is in."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._pins: dict[PinName, Pin] = {}
        self._due = math.inf  # no claim ends before

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def claims(self) -> int:
        return sum(len(pin.ends) for pin in self)

    def add(self, known: KnownNamespace, key: bytes, rows: Rows, end: float) -> None:
        """One claim more on the chain that ends in `key`, of which `rows` are stored.

        Raises `BusyError`, and pins nothing, if more would be pinned than may be.
        """
        name = known.id, key
        pin = self._pins.get(name, Pin())
        if len(pin.ends) >= CLAIMS_MAX:
            raise BusyError(f"this chain was pinned {CLAIMS_MAX} times; unpin it, or give a TTL")
        fresh = np.array([row for row in rows.tolist() if row not in pin.rows], np.intp)
        index = self._room.index
        nbytes = self._room.nbytes_of(fresh[index.pins[fresh] == 0]).sum()
        self._check_bound(known, int(nbytes))
        known.account.pinned += int(nbytes)
        index.pins[fresh] += 1
        pin.rows.update(fresh.tolist())
        heappush(pin.ends, end)
        self._pins[name] = pin
        self._due = min(self._due, end)

    def unpin(self, name: PinName) -> bool:
        """Takes the claim back that ends first; False if there is no such pin.

        So what was promised longest is kept longest, whoever unpins.
        """
        pin = self._pins.get(name)
        if pin is None:
            return False
        heappop(pin.ends)
        if not pin.ends:
            self._end(name)
        return True

    def forget(self, row: int) -> None:
        """`row` is about to be deleted."""
        room = self._room
        if room.index.pins_at[row]:
            for pin in self:
                pin.rows.discard(row)
            room.index.pins_at[row] = 0
            known = room.namespaces.by_id[room.index.namespace_at[row]]
            known.account.pinned -= known.nbytes(room.index.resident_at[row])

    def forget_namespace(self, known: KnownNamespace, rows: Rows) -> None:
        """`rows`, all that the namespace has, are about to be deleted."""
        for name in [name for name in self._pins if name[0] == known.id]:
            del self._pins[name]
        pins = self._room.index.pins
        known.account.pinned -= int(self._room.nbytes_of(rows[pins[rows] > 0]).sum())
        pins[rows] = 0

    def expire(self, now: float) -> None:
        """Ends the claims whose time is over."""
        if self._due > now:
            return
        for name, pin in list(self._pins.items()):
            while pin.ends and pin.ends[0] <= now:
                heappop(pin.ends)
            if not pin.ends:
                self._end(name)
        self._due = min((pin.ends[0] for pin in self), default=math.inf)

    def _end(self, name: PinName) -> None:
        index, known = self._room.index, self._room.namespaces.by_id[name[0]]
        rows = np.fromiter(self._pins.pop(name).rows, np.intp)
        index.pins[rows] -= 1
        free = rows[index.pins[rows] == 0]
        known.account.pinned -= int(self._room.nbytes_of(free).sum())
        known.policy.unblock(free)

    def _check_bound(self, known: KnownNamespace, nbytes: int) -> None:
        """What others reserved cannot be pinned away from them."""
        room = self._room
        pinned = sum(account.pinned for account in room.accounts)
        bound = int(room.options.pinned_share * room.capacity_bytes)
        mine = room.capacity_bytes - room.accounts.reserved_by_others(known.tenant)
        if pinned + nbytes > bound or (nbytes and known.account.pinned + nbytes > mine):
            room.counters.refused_pins += 1
            raise BusyError(
                f"{nbytes} bytes more cannot be pinned: {pinned} are pinned (bound {bound}), "
                f"{known.account.pinned} of them by tenant {known.tenant!r} (bound {mine}); "
                "unpin something, or raise pinned_share"
            )
