"""Pins: what is kept from eviction by name, for a time or until unpinned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvpool.store.index import Rows
from kvpool.store.room import Room

PinName = tuple[int, bytes]
"""A namespace and the last key of a chain, which commits to all before it."""


@dataclass(slots=True)
class Pin:
    """`rows` are stored; what is deleted leaves the pin."""

    rows: set[int]
    deadline: float


class Pins:
    """All pins of a store; a row counts the pins that it is in."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._pins: dict[PinName, Pin] = {}
        self._due = math.inf  # no pin ends before

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def add(self, name: PinName, rows: Rows, deadline: float) -> None:
        """REQUIRES: the rows are stored and distinct, and there is no pin of that name."""
        self._room.index.pins[rows] += 1
        self._pins[name] = Pin(set(rows.tolist()), deadline)
        self._due = min(self._due, deadline)

    def end(self, name: PinName) -> bool:
        """False if there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        index = self._room.index
        rows = np.fromiter(pin.rows, np.int32)
        index.pins[rows] -= 1
        self._room.namespaces.by_id[name[0]].policy.unblock(rows[index.pins[rows] == 0])
        return True

    def forget(self, row: int) -> None:
        """`row` is about to be deleted."""
        if self._room.index.pins_at[row]:
            for pin in self._pins.values():
                pin.rows.discard(row)
            self._room.index.pins_at[row] = 0

    def forget_namespace(self, namespace: int, rows: Rows) -> None:
        """`rows`, all that the namespace has, are about to be deleted."""
        for name in [name for name in self._pins if name[0] == namespace]:
            del self._pins[name]
        self._room.index.pins[rows] = 0

    def expire(self, now: float) -> None:
        """Ends the pins whose time is over."""
        if self._due <= now:
            for name in [name for name, pin in self._pins.items() if pin.deadline <= now]:
                self.end(name)
            self._due = min((pin.deadline for pin in self._pins.values()), default=math.inf)
