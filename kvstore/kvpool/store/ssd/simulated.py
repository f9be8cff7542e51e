"""A disk and a catalogue that remember what a crash would leave of them.

Writes are pending until a sync; a crash drops, tears and reorders what is pending, block by block,
as the seed decides. A commit of the catalogue is atomic and durable, as LMDB's is. Faults are set
by the test: an error for everything, bytes that flip, a place where the process dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool.store.ssd.disk import CatalogueFullError
from kvpool.store.ssd.entries import Entry, SpaceRecord
from kvpool.store.ssd.lanes import Lane
from kvpool.transfer.copying import Bytes


class Crash(BaseException):
    """The process dies here. Not an `Exception`: nothing may catch it and go on."""


@dataclass
class Faults:
    """What goes wrong from now on."""

    reading: OSError | None = None
    writing: OSError | None = None
    syncing: OSError | None = None
    committing: OSError | None = None
    committed_anyway: bool = False
    """A commit that fails is there nevertheless."""
    free_bytes: int = 1 << 40
    entries_max: int = 1 << 30
    operations_left: int = 1 << 60
    """The process dies when these are used up: before, or half-way through, the next one."""

    def step(self) -> bool:
        """False once the process dies in the operation that asks."""
        self.operations_left -= 1
        return self.operations_left >= 0


@dataclass
class SimulatedDisk:
    """A space of `nbytes`. See `Disk`."""

    nbytes: int
    block_bytes: int = 4096
    faults: Faults = field(default_factory=Faults)
    written_bytes: int = 0
    durable: Bytes = field(init=False)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.durable = np.zeros(self.nbytes, np.uint8)

    def read(self, address: int, target: Bytes) -> None:
        self._step(self.faults.reading)
        self._check(address, target)
        target[:] = self.durable[address : address + target.size]
        for at, data in self.pending:
            first, end = max(at, address), min(at + len(data), address + target.size)
            if first < end:
                target[first - address : end - address] = np.frombuffer(
                    data[first - at : end - at], np.uint8
                )

    def write(self, address: int, source: Bytes) -> None:
        self._check(address, source)
        data = source.tobytes()
        try:
            self._step(self.faults.writing)
        except (Crash, OSError):  # as far as it came
            self.pending.append((address, data[: len(data) // 2]))
            raise
        self.pending.append((address, data))
        self.written_bytes += len(data)

    def sync(self) -> None:
        try:
            self._step(self.faults.syncing)
        except OSError:  # as Linux does: what could not be written is dropped, and said once
            self.pending.clear()
            raise
        for address, data in self.pending:
            self.durable[address : address + len(data)] = np.frombuffer(data, np.uint8)
        self.pending.clear()

    def free_bytes(self) -> int:
        return self.faults.free_bytes

    def check(self) -> None:
        for error in (self.faults.writing, self.faults.syncing, self.faults.reading):
            if error is not None:
                raise error

    def flip(self, address: int) -> None:
        """One bit of the durable bytes changes."""
        self.durable[address] ^= 1

    def after_crash(self, dice: random.Random) -> SimulatedDisk:
        """What the next process finds: of each pending block the new bytes, the old, or a part."""
        left = SimulatedDisk(self.nbytes, self.block_bytes)
        left.durable = self.durable.copy()
        blocks = [
            (address + at, data[at : at + self.block_bytes])
            for address, data in self.pending
            for at in range(0, len(data), self.block_bytes)
        ]
        dice.shuffle(blocks)
        for address, data in blocks:
            kept = dice.choice((0, len(data), dice.randrange(len(data) + 1)))
            left.durable[address : address + kept] = np.frombuffer(data[:kept], np.uint8)
        return left

    def _check(self, address: int, view: Bytes) -> None:
        assert address % self.block_bytes == 0 and address + view.size <= self.nbytes

    def _step(self, error: OSError | None) -> None:
        if not self.faults.step():
            raise Crash
        if error is not None:
            raise error


@dataclass
class SimulatedCatalogue:
    """See `Catalogue`. Nothing of it is ever pending: a crash changes nothing."""

    faults: Faults = field(default_factory=Faults)
    stored: dict[bytes, bytes] = field(default_factory=dict)
    known: dict[int, bytes] = field(default_factory=dict)
    commits: int = 0

    def commit(self, puts: Sequence[Entry], deletes: Sequence[bytes]) -> None:
        if not self.faults.committed_anyway:
            self._step()
        if puts and len(self.stored) + len(puts) > self.faults.entries_max:
            raise CatalogueFullError("no room for more entries")
        for key in deletes:
            self.stored.pop(key, None)
        self.stored.update((entry.key, entry.pack()) for entry in puts)
        self.commits += 1
        self._step()

    def add_space(self, record: SpaceRecord) -> None:
        self._step()
        self.known[record.number] = record.pack()

    def spaces(self) -> list[SpaceRecord]:
        return [SpaceRecord.unpack(*one) for one in self.known.items()]

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        yield from sorted(self.stored.items())

    def figures(self) -> dict[str, int]:
        return {"entries": len(self.stored)}

    def close(self) -> None:
        """Nothing to give back."""

    def after_crash(self) -> SimulatedCatalogue:
        """What the next process finds."""
        return SimulatedCatalogue(stored=dict(self.stored), known=dict(self.known))

    def _step(self) -> None:
        if not self.faults.step():
            raise Crash
        if self.faults.committing is not None:
            raise self.faults.committing


_THREADS: dict[int, int] = {Lane.READ: 8, Lane.WRITE: 2, Lane.CATALOGUE: 1}


@dataclass
class SimulatedLanes:
    """Runs submitted work one piece at a time, in the order that the dice choose. See `Lanes`.

    A lane with several threads starts its work in order, and ends it in any.
    """

    dice: random.Random
    waiting: list[tuple[int, Callable[[], object], Callable[[object], None]]] = field(
        default_factory=list
    )

    def submit(self, lane: int, work: Callable[[], object], done: Callable[[object], None]) -> None:
        self.waiting.append((lane, work, done))

    def later(self, action: Callable[[], None]) -> None:
        self.submit(Lane.READ, lambda: None, lambda _: action())

    def step(self) -> bool:
        """Runs one piece, of any lane, that a thread could have begun. False if none is."""
        if not self.waiting:
            return False
        lane = self.dice.choice(sorted({lane for lane, _, _ in self.waiting}))
        begun = [i for i, item in enumerate(self.waiting) if item[0] == lane][: _THREADS[lane]]
        at = self.dice.choice(begun)
        _, work, done = self.waiting.pop(at)
        try:
            result = work()
        except Exception as error:
            result = error
        done(result)
        return True

    def run(self) -> None:
        """Until nothing waits."""
        while self.step():
            pass
