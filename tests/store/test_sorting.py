"""Fast sorting gives what slow sorting gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.store.sorting import ascending, distinct, in_order, run_starts

U64 = (1 << 64) - 1


@given(st.lists(st.integers(0, U64), max_size=40))
def test_words_are_in_order_by_all_bits_but_the_lowest(words: list[int]) -> None:
    array = np.array(words, np.uint64)
    lowest = (1 << len(words).bit_length()) - 1
    upper, places = in_order(array)
    assert upper.tolist() == sorted(word & ~lowest for word in words)
    assert [words[place] & ~lowest for place in places] == upper.tolist()
    assert sorted(places.tolist()) == list(range(len(words)))


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1 << 42)), max_size=40))
def test_numbers_are_sorted_stably_with_their_places(numbers: list[int]) -> None:
    up, places = ascending(np.array(numbers, np.int64))
    assert up.tolist() == sorted(numbers)
    assert places.tolist() == sorted(range(len(numbers)), key=numbers.__getitem__)


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, U64)), max_size=40))
def test_each_value_is_named_once_be_they_few_or_many(values: list[int]) -> None:
    assert distinct(np.array(values, np.uint64)) == sorted(set(values))


@given(st.lists(st.integers(0, 9), max_size=40))
def test_a_run_starts_where_its_value_comes_first(values: list[int]) -> None:
    array = np.sort(np.array(values, np.int64))
    _, firsts = np.unique(array, return_index=True)
    assert run_starts(array).tolist() == firsts.tolist()
