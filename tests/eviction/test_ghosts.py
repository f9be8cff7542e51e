"""Ghosts are bounded, the oldest make way, and what is taken is forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.store.eviction.ghosts import CLASS_BITS, Ghosts


def tags_of(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Digests are random; so are these."""
    return np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], np.uint64)


def remember(ghosts: Ghosts, number: int, stamp: int, class_: int = 0) -> None:
    if ghosts.add([(int(tags_of([number])[0]), stamp << CLASS_BITS | class_)]):
        ghosts.bury()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=400), st.sampled_from([1, 400])
)
@settings(max_examples=80, deadline=None)
def test_what_is_found_is_what_was_remembered_last(
    steps: list[tuple[bool, int]], entries: int
) -> None:
    """Against a dict; a small table may have forgotten, but never mixes up."""
    ghosts, model = Ghosts(entries), dict[int, tuple[int, int]]()
    for stamp, (takes, number) in enumerate(steps, 1):
        if takes:
            _, ghost = ghosts.take(tags_of([number, number + 1000]))
            expected = model.pop(number, None)
            seen = list(zip(ghost.stamps.tolist(), ghost.classes.tolist(), strict=True))
            assert seen in ([expected], [] if expected is None or entries == 1 else [expected])
        elif number not in model:
            model[number] = stamp, number % 72
            remember(ghosts, number, *model[number])
    ghosts.check_integrity()


def test_there_are_never_more_than_there_is_room_for() -> None:
    ghosts = Ghosts(1000)
    for number in range(1, 20_000):
        remember(ghosts, number, number)
        if number % 997 == 0:
            assert ghosts.count() <= ghosts.capacity + 128
            ghosts.check_integrity()
    assert ghosts.capacity == 1024


def test_they_last_nearly_as_long_as_in_a_queue() -> None:
    """Of the newest three quarters of the capacity hardly any is gone; much older ones all are."""
    ghosts = Ghosts(4096)
    for number in range(1, 40_001):
        remember(ghosts, number, number)
    ghosts.bury()
    recent, _ = ghosts.take(tags_of(list(range(40_001 - 3072, 40_001))))
    old, _ = ghosts.take(tags_of(list(range(1, 40_001 - 2 * 4096))))
    assert len(recent) > 0.99 * 3072
    assert len(old) < 0.01 * 4096


@pytest.mark.parametrize("runs", [1, 64])
def test_a_sample_stands_for_all(runs: int) -> None:
    ghosts = Ghosts(4096)
    for number in range(1, 3000):
        remember(ghosts, number, number)
    ghosts.bury()
    estimates = []
    for seed in range(200):
        sample, weight = ghosts.sample(np.random.default_rng(seed), runs)
        estimates.append(len(sample.stamps) * weight)
    assert abs(np.mean(estimates) - ghosts.count()) < 0.05 * ghosts.count()
