"""Hazards are hits per exposure; the index is the best rate of reuse that any horizon offers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.store.eviction.hazards import BUCKETS, CLASSES, LIMITS, WIDTHS, Hazards, gittins

NOBODY = np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0)


def rate_by_definition(hazards: list[float], start: int) -> float:
    """max over k of P(reuse in buckets [start, k]) / E[references held in them]."""
    best = reused = held = 0.0
    alive = 1.0
    for bucket in range(start, BUCKETS):
        within = 1 - np.exp(-hazards[bucket] * WIDTHS[bucket])
        reused += alive * within
        held += alive * within / hazards[bucket]
        alive *= 1 - within
        best = max(best, reused / held)
    return best


@given(st.lists(st.floats(-14, -2), min_size=BUCKETS, max_size=BUCKETS))
@settings(max_examples=50, deadline=None)
def test_the_index_is_gittins_index_of_the_definition(exponents: list[float]) -> None:
    hazards = np.exp(np.array(exponents))
    index = gittins(hazards[None])[0]
    expected = [rate_by_definition(hazards.tolist(), start) for start in range(BUCKETS)]
    alive = np.exp(-np.concatenate([[0], np.cumsum(hazards * WIDTHS)[:-1]]))
    sure = alive > 1e-8  # beyond, nothing is left to be ranked
    assert index[sure] == pytest.approx(np.array(expected)[sure], rel=1e-3)


def test_where_hazards_fall_the_index_is_the_hazard() -> None:
    hazards = 0.1 / (LIMITS[:-1] + 5)
    assert gittins(hazards[None])[0] == pytest.approx(hazards)


def test_just_before_a_class_comes_back_it_is_worth_most() -> None:
    """All are used again at an age of 1000: the older until then, the sooner the use."""
    hazards = Hazards()
    classes = np.full(5000, 7, np.uint8)
    hazards.observe(classes, np.full(5000, 1000), hit=True)
    hazards.rank(*NOBODY)
    due = int(np.searchsorted(LIMITS, 1000, "right")) - 1
    assert (np.diff(hazards.index[7, : due + 1]) > 0).all()


def test_a_class_that_was_never_used_again_is_worth_least() -> None:
    hazards = Hazards()
    hazards.observe(np.full(2000, 1, np.uint8), np.full(2000, 100), hit=True)
    hazards.observe(np.full(2000, 2, np.uint8), np.full(2000, 5000), hit=False)
    hazards.rank(*NOBODY)
    assert (hazards.index[2, 3:10] < hazards.index[1, 3:10]).all()


def test_what_nobody_has_lived_through_decays() -> None:
    """So that before anything is learned the order is that of plain LRU."""
    hazards = Hazards()
    assert (np.diff(hazards.index, axis=1) < 0).all()
    hazards.rank(*NOBODY)
    assert (np.diff(hazards.index, axis=1) < 0).all()


def test_a_hint_speaks_for_the_classes_that_were_not_seen_with_it() -> None:
    hazards = Hazards()
    ages = np.full(3000, 200)
    hazards.observe(np.full(3000, 18 + 4, np.uint8), ages, hit=True)  # hint 1, kind 4
    hazards.observe(np.full(3000, 36 + 4, np.uint8), 10 * ages, hit=False)  # hint 2, kind 4
    hazards.rank(*NOBODY)
    kind = 9  # of which nothing was seen
    assert (hazards.index[18 + kind, 5:10] > 3 * hazards.index[36 + kind, 5:10]).all()


def test_what_was_learned_survives_as_bytes() -> None:
    random = np.random.default_rng(1)
    before, after = Hazards(), Hazards()
    before.observe(
        random.integers(0, CLASSES, 5000).astype(np.uint8), random.integers(1, 9999, 5000), hit=True
    )
    before.rank(*NOBODY)
    before.references = 12_345
    after.load(before.dump())
    assert after.index == pytest.approx(before.index, rel=0.02)
    assert after.observed == before.observed == 5000
    assert after.references == 12_345


@pytest.mark.parametrize(
    "dumped",
    [b"", b"[]", b"{}", b"\xff", b'{"format": 9, "classes": 72, "buckets": 40}', b"null", b"7"],
)
def test_other_bytes_are_refused(dumped: bytes) -> None:
    with pytest.raises(ValueError):
        Hazards().load(dumped)


def test_tables_of_less_than_no_references_are_refused() -> None:
    before, after = Hazards(), Hazards()
    before.references = -1
    with pytest.raises(ValueError, match="-1 references"):
        after.load(before.dump())
    assert after.references == 0
