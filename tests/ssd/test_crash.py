"""Whatever instant a crash picks: what was announced is there, and nothing is even called damaged.

The real tier runs over a disk that loses, tears and reorders what was not synced.
"""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.store.ssd.entries import Entry
from kvpool.store.ssd.simulated import Crash
from kvpool.store.ssd.tier import Read
from tests.ssd.samples import Shelf, extent_of, key_of

NAMES = 40
"""Keys in use: more than the disk has room for."""


class Traffic:
    """Random writes, deletions and reads until the process dies; knows what was promised."""

    def __init__(self, shelf: Shelf, dice: random.Random) -> None:
        self.shelf = shelf
        self.dice = dice
        self.version = 1
        self.versions: dict[bytes, set[int]] = {}
        """Every write of a key that was ever submitted."""
        self.busy: set[bytes] = set()
        self.dropped: set[bytes] = set()
        """Keys that somebody has deleted since they were announced."""

    def run(self, turns: int) -> None:
        for _ in range(turns):
            action = self.dice.choice((self.write, self.write, self.delete, self.step, self.step))
            action()

    def step(self) -> None:
        for _ in range(self.dice.randrange(6)):
            self.shelf.lanes.step()

    def write(self) -> None:
        key = key_of(self.dice.randrange(NAMES))
        if key in self.shelf.announced or key in self.busy:
            return
        self.version += 1
        draft = self.shelf.draft(key, self.version)
        announce = draft.done

        def done(entry: Entry | None) -> None:
            self.busy.discard(key)
            if entry is not None:
                self.dropped.discard(key)
            announce(entry)

        draft.done = done
        if self.shelf.tier.write(draft) is None:
            self.busy.add(key)
            self.versions.setdefault(key, set()).add(self.version)
            if self.dice.random() < 0.1:
                self.shelf.tier.cancel(draft)

    def delete(self) -> None:
        if self.shelf.announced:
            key = self.dice.choice(sorted(self.shelf.announced))
            self.dropped.add(key)
            self.shelf.delete(key)


def check_recovered(after: Shelf, traffic: Traffic, promised: set[bytes]) -> None:
    missing = promised - after.found.keys()
    assert not missing, f"{len(missing)} announced chunks are lost"
    for key, entry in after.found.items():
        verdict, why, content = after.read(entry)
        assert verdict is Read.OK, why
        version = entry.extents[0].generation
        assert version in traffic.versions[key]
        assert content == extent_of(key, version).tobytes()
    assert after.tier.counters.corrupt_chunks == 0
    after.space.check_integrity()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), operations=st.integers(0, 250))
def test_after_any_crash_what_was_announced_is_there_and_nothing_looks_damaged(
    seed: int, operations: int
) -> None:
    dice = random.Random(seed)
    shelf = Shelf(segments=3, seed=seed)
    traffic = Traffic(shelf, dice)
    shelf.disk.faults.operations_left = operations
    with contextlib.suppress(Crash):
        traffic.run(200)
    promised = set(shelf.announced) - traffic.dropped
    check_recovered(shelf.after_crash(), traffic, promised)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_crash_after_crash_nothing_that_was_announced_is_lost(seed: int) -> None:
    dice = random.Random(seed)
    shelf = Shelf(segments=3, seed=seed)
    traffic = Traffic(shelf, dice)
    for _ in range(4):
        shelf.disk.faults.operations_left = dice.randrange(120)
        with contextlib.suppress(Crash):
            traffic.run(100)
        promised = set(shelf.announced) - traffic.dropped
        shelf = shelf.after_crash()
        check_recovered(shelf, traffic, promised)
        traffic.shelf, traffic.busy = shelf, set()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), failing=st.sampled_from(("writing", "syncing", "committing")))
def test_errors_of_the_device_lose_nothing_that_was_announced(seed: int, failing: str) -> None:
    dice = random.Random(seed)
    shelf = Shelf(segments=3, seed=seed)
    traffic = Traffic(shelf, dice)
    for _ in range(6):
        broken = OSError(5, "Input/output error") if dice.random() < 0.5 else None
        setattr(shelf.disk.faults, failing, broken)
        shelf.disk.faults.committed_anyway = dice.random() < 0.5
        traffic.run(40)
        shelf.clock.now += 60
        shelf.tier.tick()
    setattr(shelf.disk.faults, failing, None)
    for _ in range(3):
        shelf.lanes.run()
        shelf.clock.now += 60
        shelf.tier.tick()
    shelf.lanes.run()
    assert not shelf.tier.down and shelf.tier.idle
    promised = set(shelf.announced) - traffic.dropped
    check_recovered(shelf.after_crash(), traffic, promised)
    # All that is left on the disk is what the catalogue names.
    assert shelf.found.keys() <= shelf.announced.keys() | traffic.dropped
    assert set(shelf.catalogue.stored) == set(shelf.announced)
    used = sum(shelf.space.slot_bytes(e.extents[0].nbytes) for e in shelf.announced.values())
    assert shelf.space.statistics().used_bytes == used
