"""How many examples a property gets, relative to the chosen Hypothesis profile."""

from __future__ import annotations

from hypothesis import settings


def examples(share: float) -> settings:
    """For properties whose examples are slow (below 1) or whose faults are rare (above 1)."""
    return settings(max_examples=max(20, int(settings().max_examples * share)))
