"""What goes before all others goes once."""

from __future__ import annotations

import numpy as np

from kvpool.store.eviction.demoted import Demoted


def test_a_row_that_was_offered_twice_is_taken_once() -> None:
    """It could go before anybody asked, and then its last child went: both offer it."""
    demoted = Demoted()
    demoted.add(np.array([7, 1], np.intp))
    demoted.offer(1)
    taken = demoted.take(3, lambda rows: np.ones(len(rows), np.bool_))
    assert [row for _, _, row in taken.going] == [1, 7]
