"""The store's answers as messages."""

import pytest

from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.columns import matched
from kvpool.store.records import Match


@pytest.mark.parametrize(("seconds", "told"), [(0.0001, 1), (0.001, 1), (0.0011, 2), (0.25, 250)])
def test_the_time_of_a_load_is_rounded_up_so_that_it_is_never_none(
    seconds: float, told: int
) -> None:
    match = Match(0, Outcome.HIT, Reason.UNKNOWN, cold=8, load_s=seconds)
    assert matched(match).load_ms == told
