"""The shadow counts what a real LRU would have hit."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.store.eviction.shadow import LruShadow


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=5, unique=True), max_size=300),
    st.integers(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_its_hits_and_its_oldest_age_are_those_of_an_lru_list(
    uses: list[list[int]], capacity: int
) -> None:
    """Below 128 entries its blocks hold one stamp each, so that it is exact."""
    shadow = LruShadow(capacity)
    stamps: dict[int, int] = {}
    lru: OrderedDict[int, None] = OrderedDict()
    clock = 0
    for blocks in uses:
        hits = sum(block in lru for block in blocks)
        previous = np.array([stamps[block] for block in blocks if block in stamps], np.int64)
        for block in blocks:
            clock += 1
            stamps[block] = clock
            lru[block] = None
            lru.move_to_end(block)
        while len(lru) > capacity:
            lru.popitem(last=False)
        assert shadow.use(len(blocks), previous) == hits
        within = {block for block, stamp in stamps.items() if clock - stamp <= shadow.reach}
        assert within == lru.keys()


def test_its_memory_does_not_grow_with_time() -> None:
    shadow = LruShadow(1000)
    for _ in range(20_000):
        shadow.use(50, np.empty(0, np.int64))
    assert len(shadow._live) < 10_000
