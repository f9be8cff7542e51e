"""How much of a store a learned order may have: no more than it can afford to lose.

What was used lately is *protected*: it goes last, in the order of LRU. Whatever the learned order
does with the rest, the store then holds what a smaller LRU would hold, so what it may lose is
known: the hits that LRU has beyond the protected age. A mistake is seen when LRU would have hit
what went too early, so it may go on for as long as LRU would have kept that. Both together are the
*stake*::

    stake(age) = hits of LRU at that age and above, per reference x (oldest age in LRU - age)

Protected is all below the age whose stake can just be afforded. Affordable is a small share of the
references, and what was won, less what was lost; who can afford nothing is LRU.
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from kvpool.store.eviction.hazards import FIRST_AGES, LIMITS

EVERY_AGE = 1 << 62

_LESSONS = 60
"""Requests that used something again, before the learned order is used at all. Not chunks: those of
a request are used together, so that thousands of uses may be a handful of requests."""
_LOSS_OF_REFERENCES = 0.0015
"""So much of them can be afforded. When it is lost, at most as much again was at stake."""
_REQUESTS_MIN = 0.5
"""Of average length. Hits come and go by whole requests: to afford less is to afford nothing."""


class Guard:
    """Compares a policy with LRU as it goes. `learned`: references of earlier lives, which
    count, so that what they taught is used at once. `lenient`: protect nothing
    once there are lessons; for policies that trade hits for something else."""

    def __init__(self, *, learned: int | None = None, lenient: bool = False) -> None:
        self.protected = EVERY_AGE if learned is None else 0
        """Ages below this one, in references."""
        self.lead = 0
        """Own hits beyond those of LRU."""
        self._requests = self._references = 0
        self._earlier = learned or 0
        self._missing = _LESSONS if learned is None else 0
        self._lenient = lenient
        self._ages: list[float] = []
        """Some that LRU holds, in units of its oldest one, from that on downwards."""
        self._stakes: list[float] = []
        """Of protecting what is younger than these: 0, and more and more."""

    @property
    def trusts(self) -> bool:
        """Whether the learned order decides about anything."""
        return self.protected < EVERY_AGE

    def account(
        self, requests: int, references: int, own: int, lru: int, lessons: int, reach: int
    ) -> None:
        """After some requests: their references, hits, hits of LRU, how many of the requests used
        something again, and the oldest age in LRU."""
        self._requests += requests
        self._references += references
        self.lead += own - lru
        self._missing -= lessons
        if self._missing <= 0 and self._ages:
            self.protected = 0 if self._lenient else self._affordable_age(reach)

    def weigh(self, uses: NDArray[np.float64], reach: int) -> None:
        """Finds the stakes. `uses`: so far, by the bucket of their age; `reach`: as above."""
        reach = max(1, reach)
        end = 1 + int(FIRST_AGES.searchsorted(reach, "right"))
        ages = LIMITS[:end][::-1]
        lost = uses[:end][::-1].cumsum() / max(1, self._earlier + self._references)
        self._ages = [1.0, *(ages / reach).tolist()]
        self._stakes = [0.0, *(lost * (reach - ages)).tolist()]

    def _affordable_age(self, reach: int) -> int:
        """The youngest age whose stake can be afforded."""
        affordable = _LOSS_OF_REFERENCES * (self._references + self._earlier) + self.lead
        if affordable * self._requests <= _REQUESTS_MIN * self._references:
            return EVERY_AGE
        end = bisect_right(self._stakes, affordable)
        if end == len(self._stakes):
            return 0
        low, high = self._stakes[end - 1 : end + 1]
        older, younger = self._ages[end - 1 : end + 1]
        part = (affordable - low) / (high - low)
        return math.ceil(reach * (older - part * (older - younger)))
