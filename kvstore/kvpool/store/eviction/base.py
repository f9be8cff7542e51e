"""The contract of an eviction policy. Policies see integer rows: no keys, clock, bytes or I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.intp]
"""Row numbers, shape ``(n,)``."""
Evictable = Callable[[Rows], NDArray[np.bool_]]
"""True where a row may go now: it has no children, lease or pin. The store's knowledge."""
Idle = Callable[[int], bool]
"""The same of one row."""
Gone = Callable[[int], int]
"""Takes a victim out of the store; returns its parent if that may go now, else -1."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy may ask of the store beside `Evictable`, about known rows; each is optional."""

    tags: Callable[[Rows], NDArray[np.uint64]] | None = None
    """64 bits of each row's key: by them a policy recognises a chunk that left and came back."""
    depths: Callable[[Rows], NDArray[np.int64]] | None = None
    """Chunks above each row in its chain."""
    room: Callable[[], int] | None = None
    """How many more rows could be known before one has to go. None: all below the capacity."""
    ghosts_per_row: int | None = None
    """Rows that left and may be remembered, per row that fits. None: as many as are of use."""
    next_uses: Callable[[Rows], NDArray[np.int64]] | None = None
    """When each row will be used next, in any ascending unit: known to replays only."""
    idle: Idle | None = None
    """`Evictable` of one row, several times faster."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What an engine tells about the future of a chain; None: nothing."""

    will_continue: float | None = None
    """Probability that the session goes on."""


class Policy(Protocol):
    """Orders the rows that are resident and says which go first.

    A row is *known* from `admit` to `forget`. Which of the known rows may go is for `Evictable` to
    say, which a policy asks in batches, only from `victims` and `unblock`, and only about known
    rows.

    Arrays of rows are in chain order, root first, and rows come once in each. A policy may keep
    the array: do not change it afterwards.

    Order within one chain: deeper rows are older ("tail first"), whatever else a policy thinks. It
    holds within each call, so a publish admits its new rows *first* and touches the rows above
    them *afterwards*; then its rows go deepest first, as if the chain had been stored at once.

    Not thread-safe. `admit` and `touch` may defer their work; a wrong row may therefore raise in a
    later call.
    """

    def __init__(self, capacity: int, evictable: Evictable) -> None:
        """An empty policy. REQUIRES: all rows that it will ever see are below `capacity`."""

    def admit(self, rows: Rows) -> None:
        """These rows became resident. `ValueError` if one is known already."""

    def touch(self, rows: Rows) -> None:
        """These rows were used. On the path of every match: a few hundred nanoseconds.

        `ValueError`, perhaps later, if one is not known.
        """

    def catch_up(self) -> None:
        """Does what `admit` and `touch` have put off, if it is worth it: for moments when nobody
        waits, before so much is pending that a later call has to do it."""

    def victims(self, n: int) -> Rows:
        """The first `n` evictable rows in the order of eviction; fewer only if there are no more.

        Each row comes once. They stay known until `forget`, and until something changes, asking
        again gives the same rows first. Evicting a row may free its parent, which this call cannot
        know: to evict several in exact order, see `evict`.
        """

    def evict(self, n: int, gone: Gone) -> int:
        """Evicts up to `n` rows in exact order, freed parents included; returns how many.

        `gone` is called for each in turn, while the row is known, and must not change the policy.
        The rows are forgotten and the parents unblocked when this returns.
        """

    def unblock(self, rows: Rows) -> None:
        """These rows may have become evictable: last child evicted, lease released, unpinned.

        REQUIRES: called after the change, for every row that ceased to be blocked; a policy sets
        blocked rows aside and does not look at them again by itself. Unknown rows are ignored.
        """

    def demote(self, rows: Rows) -> None:
        """Make these known rows the first victims, deepest first, until they are touched."""

    def forget(self, rows: Rows) -> None:
        """These rows left the store; their numbers may be admitted again at once.

        `ValueError` if one is not known.
        """

    def statistics(self) -> Mapping[str, int]:
        """Figures by name, for metrics and `check_integrity`'s readers; at least ``rows``."""

    def check_integrity(self) -> None:
        """`AssertionError` if the policy contradicts itself. Costs O(capacity)."""


@runtime_checkable
class TakesHints(Protocol):
    """A policy that hints are not lost on."""

    @property
    def behind(self) -> bool:
        """Whether plain LRU of the same capacity would have had more hits so far."""

    def hint(self, rows: Rows, hint: Hint) -> None:
        """What is told of these known rows; holds until their next use."""


@runtime_checkable
class Learns(Protocol):
    """A policy whose experience is worth keeping across restarts."""

    def dump(self) -> bytes:
        """What it learned."""

    def load(self, dumped: bytes) -> None:
        """Starts from what another life learned. `ValueError` if these are other bytes."""


UNKNOWN = 0
"""The state of a row that is not known, in any policy: fresh memory is that."""


def idle_by(evictable: Evictable, facts: Facts | None) -> Idle:
    """What the store says of one row, or `evictable` asked about one."""
    if facts and facts.idle:
        return facts.idle
    return lambda row: bool(evictable(np.array([row], np.intp))[0])


def require_known(states: NDArray[np.uint8], rows: Rows) -> None:
    """Raises `ValueError` if one of `rows` is not known by `states`."""
    found = states[rows]
    if UNKNOWN in found.tobytes():
        raise ValueError(f"rows that were never admitted: {rows[found == UNKNOWN]}")


def require_unknown(states: NDArray[np.uint8], rows: Rows) -> None:
    """Raises `ValueError` if one of `rows` is known by `states`."""
    found = states[rows]
    if found.tobytes().count(UNKNOWN) < len(rows):
        raise ValueError(f"rows that are known already: {rows[found != UNKNOWN]}")


def firsts(values: NDArray[np.generic]) -> NDArray[np.bool_]:
    """True where a value differs from the one before it: its first, if they are in order."""
    out = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=out[1:])
    return out


def least_recent(policies: Sequence[Policy], used_at: NDArray[np.float64]) -> Policy | None:
    """The policy whose next victim was not used for the longest time, by row; None: no victims."""
    offers = []
    for number, policy in enumerate(policies):
        victims = policy.victims(1)
        if len(victims):
            offers.append((float(used_at[victims[0]]), number))
    return policies[min(offers)[1]] if offers else None


def evict_in_turn(policy: Policy, n: int, gone: Gone) -> int:
    """`Policy.evict` by the other methods, for policies without a faster way."""
    for evicted in range(n):
        victim = policy.victims(1)
        if not len(victim):
            return evicted
        policy.forget(victim)
        parent = gone(int(victim[0]))
        if parent >= 0:
            policy.unblock(np.array([parent], np.intp))
    return n
