"""Whether a learned order may be trusted: only while it keeps up with plain LRU.

Both are measured in hits, the policy's own and those of an exact LRU of the same capacity
(`shadow`). Until the learned tables have seen a few turnovers of the store and a few thousand uses,
and for a while after the policy fell behind, its order is LRU's. That while is short and doubles
with each failure that follows another, so that a bad quarter of an hour costs little and a hopeless
load is left alone.

Hits come in lumps, one request's at a time. A policy fell behind if it lost more hits since its
best moment than chance would explain (two standard deviations of a walk with the same steps), or
more in all than it may ever.
"""

from __future__ import annotations

import math

_LEARNING_TURNOVERS = 5.0
_LEARNING_USES = 4096
_LEARNING_REFERENCES = 8192
"""Capacities of references, uses to learn from, and references, before the learned order is used at
all: of fewer references, a few unlucky requests are too large a share."""
_LOSS_OF_CAPACITY = 0.02
_LOSS_OF_REFERENCES = 0.001
_LOSS_OF_LEAD = 0.25
_LOSS_MIN = 8
"""Hits that it may fall back from its best: the smaller of the first two, plus the others."""
_SIGMAS = 2.0
"""Standard deviations of a walk at random, beyond which a fall back is none of chance."""
_DEFICIT_OF_CAPACITY = 0.01
_DEFICIT_OF_REFERENCES = 0.0015
"""With fewer hits than LRU by so much in all, the two added, the learned order has to wait."""
_REQUESTS_AT_RISK = 1.75
"""Of average length, that this bound must have room for before the learned order is used: after
fewer references chance alone may cost more."""
_PAUSE_TURNOVERS = 0.5
_PAUSE_REFERENCES = 4096
"""The first pause, the longer of the two: the tables are ranked anew meanwhile."""
_PAUSE_DOUBLINGS_MAX = 6


class Guard:
    """Compares a policy with LRU as it goes. `learned`: tables were loaded, so trust at once.
    `lenient`: trust for ever what has learned; for policies that trade hits for something else."""

    def __init__(self, capacity: int, *, learned: bool = False, lenient: bool = False) -> None:
        self.capacity = capacity
        """May change as it goes."""
        self.references = 0
        self.requests = 0
        self.lead = 0
        """Own hits beyond those of LRU."""
        self.failures = 0
        self._since = 0
        self._wait = 0.0 if learned else _LEARNING_TURNOVERS
        self._lessons = 0 if learned else _LEARNING_USES  # that are missing
        self._doublings = 0
        self._best = self._start = 0
        self._variance = 0  # of the lead since its best, had it been a walk at random
        self.trusts = learned
        self._lenient = lenient

    def account(self, requests: int, references: int, own: int, lru: int, lessons: int) -> bool:
        """After requests with these hits and uses to learn from; True if `trusts` has changed."""
        self.requests += requests
        self.references += references
        self.lead += own - lru
        self._lessons -= lessons
        self._variance += (own - lru) ** 2
        if self.trusts:
            return not self._lenient and self._watch()
        if not self._may_trust():
            return False
        self.trusts = True
        self._best = self._start = self.lead
        self._variance = 0
        return True

    def _may_trust(self) -> bool:
        """Whether enough was learned and waited for, and what may be lost is worth a try."""
        waited = self.references - self._since >= self._wait * self.capacity
        learned = self._lessons <= 0 and self.references >= _LEARNING_REFERENCES
        if self._lenient or not (waited and learned):
            return waited and learned
        worthwhile = self._loss_max() * self.requests >= _REQUESTS_AT_RISK * self.references
        return worthwhile and not self._deficit()

    def _watch(self) -> bool:
        if self.lead > self._best:
            self._best, self._variance = self.lead, 0
        allowance = _LOSS_MIN + min(
            _LOSS_OF_CAPACITY * self.capacity, _LOSS_OF_REFERENCES * self.references
        )
        if self.lead > self._start + allowance:
            self._doublings = 0
        chance = _SIGMAS * math.sqrt(self._variance)
        bearable = allowance + chance + _LOSS_OF_LEAD * max(0, self._best)
        if self._best - self.lead <= bearable and not self._deficit():
            return False
        self._since = self.references
        pause = max(_PAUSE_TURNOVERS, _PAUSE_REFERENCES / self.capacity)
        self._wait = pause * 2**self._doublings
        self._doublings = min(self._doublings + 1, _PAUSE_DOUBLINGS_MAX)
        self.failures += 1
        self.trusts = False
        return True

    def _deficit(self) -> bool:
        return self.lead < -self._loss_max()

    def _loss_max(self) -> float:
        """The budget: hits fewer than LRU's that are bearable in all."""
        of_capacity = _DEFICIT_OF_CAPACITY * self.capacity
        return of_capacity + _DEFICIT_OF_REFERENCES * self.references + _LOSS_MIN
