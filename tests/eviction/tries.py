"""Small traces for the tests of policies, and what policies get out of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from kvpool.bench.simulation import Simulation, prepare
from kvpool.bench.traces import Trace, make_trace
from kvpool.store.eviction.base import Hint, Rows

Requests = list[list[int]]
"""Chains of blocks; the same number means the same block only below the same blocks."""

requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)
"""Prompts over three words: they share prefixes, branch off, and come again."""


def trace_of(chains: Requests) -> Trace:
    return make_trace("test", list(enumerate(chains)))


def hits_of(
    trace: Trace, capacity: int, policy: str, hints: Sequence[Hint | None] | None = None
) -> int:
    simulation = Simulation(prepare(trace), capacity, policy)
    for number in range(len(trace.requests)):
        simulation.serve(number, hints[number] if hints else None)
    simulation.check_integrity()
    return simulation.counts.hits


def victims_of(trace: Trace, capacity: int, policy: str) -> list[int]:
    """The rows that went, in their order."""

    class Recording(Simulation):
        def _evict(self, n: int) -> Rows:
            gone = super()._evict(n)
            victims.extend(gone.tolist())
            return gone

    victims: list[int] = []
    simulation = Recording(prepare(trace), capacity, policy)
    for number in range(len(trace.requests)):
        simulation.serve(number)
    return victims


def conversations(dice: random.Random, count: int) -> Requests:
    """Chains that go on or branch off."""
    chains: Requests = [[]]
    blocks = 0
    for _ in range(count):
        base = dice.choice(chains[-20:])
        kept = base[: dice.randint(0, len(base))] if dice.random() < 0.3 else base
        grown = dice.randint(0 if kept else 1, 6)
        chains.append([*kept, *range(blocks, blocks + grown)])
        blocks += grown
    return [chain for chain in chains if chain]
