"""Whether a chunk that leaves DRAM is written to the tier below. An admission is one class here.

Writing all costs the most writes and loses nothing; each other choice trades hits for writes. Order
*within* a tier is a policy's affair, of which each tier has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvpool.proto.errors import ConfigError
from kvpool.store.eviction.base import Policy, Rows

DEFAULT_ADMISSION = "always"
_RECENT = 4096
"""Candidates whose worth the newest is compared with."""
_ADMITTED_SHARE = 0.7


class Admission(Protocol):
    """Asked once about each chunk that is about to leave DRAM, while the policy still knows it."""

    def admits(self, rows: Rows) -> NDArray[np.bool_]:
        """True where the chunk is worth writing; shape ``(n,)``, in the order of `rows`."""


@runtime_checkable
class Values(Protocol):
    """A policy that can say what rows are worth."""

    def values(self, rows: Rows) -> NDArray[np.float64]:
        """The higher, the more a known row is worth keeping; shape ``(n,)``."""

    def uses(self, rows: Rows) -> NDArray[np.int64]:
        """How often each known row was used, its storing included; shape ``(n,)``. What is
        remembered of an earlier stay counts."""


class Always:
    """Write back on demotion: every chunk gets a second chance."""

    def admits(self, rows: Rows) -> NDArray[np.bool_]:
        return np.ones(len(rows), np.bool_)


class SecondTouch:
    """Only what was used again since it was stored, now or before it last left."""

    def __init__(self, policy: Values) -> None:
        self._policy = policy

    def admits(self, rows: Rows) -> NDArray[np.bool_]:
        return np.asarray(self._policy.uses(rows) > 1)


class ByValue:
    """All but the least: what the policy values above the lowest 30 % of recent candidates.

    Equal values count as above, so that a policy that cannot tell candidates apart admits all.
    """

    def __init__(self, policy: Values) -> None:
        self._policy = policy
        self._recent = np.zeros(_RECENT)
        self._seen = 0

    def admits(self, rows: Rows) -> NDArray[np.bool_]:
        values = self._policy.values(rows)
        places = np.arange(self._seen, self._seen + len(rows)) % _RECENT
        self._recent[places] = values
        self._seen += len(rows)
        recent = self._recent[: self._seen]
        return np.asarray(values >= np.quantile(recent, 1 - _ADMITTED_SHARE, method="lower"))


_BY_POLICY: dict[str, Callable[[Values], Admission]] = {
    "second_touch": SecondTouch,
    "phz": ByValue,
}


def admission_names() -> tuple[str, ...]:
    """The names that `make_admission` accepts."""
    return (DEFAULT_ADMISSION, *_BY_POLICY)


def make_admission(name: str, policy: Policy) -> Admission:
    """`policy` orders the tier that chunks leave. `ConfigError` for an unknown name, or if the
    policy cannot say what that admission asks."""
    if name not in admission_names():
        raise ConfigError(f"no admission {name!r}; choose {', '.join(admission_names())}")
    if name == DEFAULT_ADMISSION:
        return Always()
    if not isinstance(policy, Values):
        raise ConfigError(f"admission {name!r} needs a policy that values rows: choose phz")
    return _BY_POLICY[name](policy)
