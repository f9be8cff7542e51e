"""The memory of what left: right where it remembers, and never more than it was given."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvpool.proto.outcomes import Reason
from kvpool.store.ghosts import Ghosts
from tests.store.world import chain

REASONS = (Reason.EVICTED, Reason.DELETED, Reason.QUARANTINED)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.sampled_from(REASONS))),
    st.integers(0, 6),
)
def test_a_reason_is_the_last_one_that_was_told_or_forgotten(
    departures: list[tuple[int, int, Reason]], slots_log2: int
) -> None:
    keys, told = chain("x", 41), {}
    ghosts = Ghosts(slots_log2)
    for namespace, number, reason in departures:
        ghosts.add(namespace, keys[number], reason)
        told[namespace, number] = reason
        assert ghosts.reason(namespace, keys[number]) is reason, "the newest is remembered"
    for namespace in range(1, 4):
        for number, key in enumerate(keys):
            known = told.get((namespace, number), Reason.NEVER_STORED)
            assert ghosts.reason(namespace, key) in (known, Reason.NEVER_STORED)


def test_one_key_in_two_namespaces_has_two_fates() -> None:
    ghosts, key = Ghosts(), chain("x", 1)[0]
    ghosts.add(1, key, Reason.EVICTED)
    assert ghosts.reason(2, key) is Reason.NEVER_STORED
    ghosts.add(2, key, Reason.DELETED)
    assert ghosts.reason(1, key) is Reason.EVICTED


def test_a_key_of_zeros_is_a_key_like_any_other() -> None:
    ghosts = Ghosts(4)
    assert ghosts.reason(0, bytes(32)) is Reason.NEVER_STORED
    ghosts.add(0, bytes(32), Reason.EVICTED)
    assert ghosts.reason(0, bytes(32)) is Reason.EVICTED


def test_a_hundred_thousand_departures_take_no_more_memory_than_one() -> None:
    ghosts = Ghosts(8)
    tracemalloc.start()
    for number in range(100_000):
        ghosts.add(1, number.to_bytes(32, "big"), Reason.EVICTED)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 1000
