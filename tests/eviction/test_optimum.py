"""Belady's optimum is the optimum, and no policy is above it.

An exhaustive search tries every prefix-closed set that could be kept after every request; the
greedy rule "let go of what is used again last" must hit as often. That it does is why one number
says how good a policy is: the share of the gap between plain LRU and the optimum that it closes.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.store.eviction import policy_names
from tests.eviction.tries import Requests, conversations, hits_of, requests, trace_of, victims_of


def best_possible_hits(chains: Requests, capacity: int) -> int:
    """By trying everything: after each request any prefix-closed set of what is there may stay.

    Only sets as large as fit, because any smaller one can be extended and then hits no less.
    """
    paths = [[tuple(chain[:end]) for end in range(1, len(chain) + 1)] for chain in chains]

    @cache
    def best(number: int, resident: frozenset[tuple[int, ...]]) -> int:
        if number == len(paths):
            return 0
        hits = next(
            (i for i, p in enumerate(paths[number]) if p not in resident), len(paths[number])
        )
        there = sorted(resident | set(paths[number]))
        keeps = combinations(there, min(capacity, len(there)))
        return hits + max(
            best(number + 1, frozenset(keep)) for keep in map(set, keeps) if is_prefix_closed(keep)
        )

    return best(0, frozenset())


def is_prefix_closed(paths: set[tuple[int, ...]]) -> bool:
    return all(path[:-1] in paths for path in paths if len(path) > 1)


@given(requests, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_greedy_belady_hits_as_often_as_an_exhaustive_search(
    chains: Requests, capacity: int
) -> None:
    chains = chains[:6]
    assert hits_of(trace_of(chains), capacity, "belady") == best_possible_hits(chains, capacity)


@pytest.mark.parametrize("name", policy_names())
@given(chains=requests, capacity=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_no_policy_is_above_the_optimum(name: str, chains: Requests, capacity: int) -> None:
    trace = trace_of(chains)
    assert hits_of(trace, capacity, name) <= hits_of(trace, capacity, "belady")


@pytest.mark.parametrize("name", policy_names())
def test_the_same_trace_gives_the_same_victims(name: str) -> None:
    trace = trace_of(conversations(random.Random(1), 400))
    assert victims_of(trace, 60, name) == victims_of(trace, 60, name) != []


@pytest.mark.parametrize("name", policy_names())
def test_with_room_for_all_every_repeated_block_is_a_hit(name: str) -> None:
    trace = trace_of(conversations(random.Random(2), 200))
    assert hits_of(trace, trace.unique, name) == trace.references - trace.unique
