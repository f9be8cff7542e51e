"""The chunks of a publication that are still open, and the rule that guards the pool: nothing is
given back while somebody may still write to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.client.results import Outcomes
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

OPEN = 255
"""No outcome yet: reserved, not committed."""


@dataclass(slots=True)
class Slot:
    """One chunk being written."""

    lease: bytes
    item: int
    generation: int
    extent: Bytes | None
    """None: to be staged when it is first written."""
    sums: dict[int, int] = field(default_factory=dict)
    """Planes that are there, with their checksums."""
    whole: bool = False
    """All planes are there, and the prologue."""
    writers: int = 0
    doomed: bool = False
    """Given up while somebody was writing: goes back with the last writer."""


class Slots:
    """By chunk. `outcomes` has `OPEN` for chunks without an outcome. Thread-safe."""

    def __init__(self, count: int, give_back: Callable[[Sequence[Slot]], None]) -> None:
        """`give_back(slots)` tells the store that nobody writes to these any more."""
        self.outcomes: Outcomes = np.full(count, OPEN, np.uint8)
        self._give_back = give_back
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._slots

    def open(self, slots: Mapping[int, Slot]) -> None:
        with self._lock:
            self._slots.update(slots)

    def whole(self) -> dict[int, Slot]:
        """Chunks that are complete, in order."""
        with self._lock:
            return {chunk: slot for chunk, slot in sorted(self._slots.items()) if slot.whole}

    @contextlib.contextmanager
    def writing(self, chunks: Iterable[int]) -> Iterator[dict[int, Slot]]:
        """The slots of those of `chunks` that have one, which nobody gives back meanwhile."""
        with self._lock:
            slots = {chunk: self._slots[chunk] for chunk in chunks if chunk in self._slots}
            for slot in slots.values():
                slot.writers += 1
        try:
            yield slots
        finally:
            with self._lock:
                for slot in slots.values():
                    slot.writers -= 1
                last = [slot for slot in slots.values() if slot.doomed and not slot.writers]
            if last:
                self._give_back(last)

    def settle(self, chunks: Sequence[int], outcomes: Sequence[Outcome]) -> int:
        """Closes `chunks` with these outcomes; how many of them are OK."""
        with self._lock:
            for chunk, outcome in zip(chunks, bytes(outcomes), strict=True):
                self.outcomes[chunk] = outcome
                self._slots.pop(chunk, None)
        return outcomes.count(Outcome.OK)

    def give_up(self, outcome: Outcome) -> None:
        """Closes all that is open with `outcome`, and gives it back."""
        with self._lock:
            slots = list(self._slots.values())
            self._slots.clear()
            self.outcomes[self.outcomes == OPEN] = outcome
            for slot in slots:
                slot.doomed = bool(slot.writers)
            idle = [slot for slot in slots if not slot.doomed]
        self._give_back(idle)
