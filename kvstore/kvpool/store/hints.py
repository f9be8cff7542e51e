"""What an engine's words about the future of a chain mean to the store, all in one place.

    ended           the session is over: probability 0, whatever else is said
    will_continue   the probability that it goes on, as it is
    stop_reason     the probability of `STOP_REASONS`, if `will_continue` is not said
    gap_s           goes on; later than `SOON_S`: at most as likely as after an ended turn
    priority        above 0: at least as likely as after a called tool; below: at most as an abort
    ttl_s           when it is over, the chain goes first, unless it was used in between

A probability is a prediction. A policy that learns from hints finds out what they are worth, and
plain LRU is its floor; other policies do not listen. A `ttl_s` is an order, so it is not carried
out while the policy hits less than LRU would: then it was probably wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvpool.proto.errors import InvalidError
from kvpool.store.eviction.base import Hint, Rows, TakesHints
from kvpool.store.index import NO_ROW, UNLINKED
from kvpool.store.namespaces import KnownNamespace
from kvpool.store.room import Room

TOOL = 0.97
TURN = 0.71
"""How often sessions went on after a called tool, and after an ended turn: measured on public
traces of chats and coding agents."""
ABORT = 0.1
"""A guess, as is to take an answer that was cut off for an ended turn."""
STOP_REASONS: Mapping[str, float] = {
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call"), TOOL),
    **dict.fromkeys(("stop", "stop_sequence", "end_turn", "eos", "length", "max_tokens"), TURN),
    **dict.fromkeys(("abort", "aborted", "cancelled", "error", "refusal", "content_filter"), ABORT),
}
"""The words of engines and of the common APIs, in lower case."""
SOON_S = 60.0
"""Tools answer within a minute (median 17 s), people later (median 184 s)."""
TTLS_MAX = 1 << 16
"""Chains of one store that may have a TTL: some 10 MiB."""


@dataclass(frozen=True, slots=True)
class Told:
    """One hint. Raises `InvalidError` for what is no probability, time or reason."""

    will_continue: float | None = None
    gap_s: float | None = None
    ttl_s: float = 0.0
    ended: bool = False
    stop_reason: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if self.will_continue is not None and not 0 <= self.will_continue <= 1:
            raise InvalidError(f"will_continue {self.will_continue} is no probability")
        if self.gap_s is not None and not self.gap_s >= 0:
            raise InvalidError(f"a gap of {self.gap_s} s")
        if not 0 <= self.ttl_s < math.inf:
            raise InvalidError(f"a TTL of {self.ttl_s} s")

    @property
    def kinds(self) -> list[str]:
        """Names of the fields that say something."""
        said = {
            "will_continue": self.will_continue is not None,
            "gap_s": self.gap_s is not None,
            "ttl_s": self.ttl_s > 0,
            "ended": self.ended,
            "stop_reason": bool(self.stop_reason),
            "priority": self.priority != 0,
        }
        return [kind for kind, here in said.items() if here]


def meaning(told: Told) -> Hint:
    """What a policy gets to know."""
    if told.ended:
        return Hint(will_continue=0.0)
    chance = told.will_continue
    if chance is None:
        chance = STOP_REASONS.get(told.stop_reason.lower())
    if told.gap_s is not None:
        chance = TOOL if chance is None else chance
        chance = min(chance, TURN) if told.gap_s > SOON_S else chance
    if told.priority > 0:
        chance = max(chance or 0.0, TOOL)
    elif told.priority < 0:
        chance = min(ABORT if chance is None else chance, ABORT)
    return Hint(will_continue=chance)


class Hints:
    """Takes hints to the policies, and ends the TTLs of chains."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._ttls: dict[tuple[int, bytes], tuple[float, float]] = {}  # end, when it was told
        self._ends: list[tuple[float, int, bytes]] = []  # a heap; stale unless the end is the same

    def __len__(self) -> int:
        """Chains that have a TTL."""
        return len(self._ttls)

    def take(self, known: KnownNamespace, rows: Rows, told: Told, now: float) -> None:
        """`rows` are those of the chain that are stored, distinct, parents first."""
        counters = self._room.counters
        counters.hints += 1
        for kind in told.kinds:
            counters.count_hint(kind)
        hint = meaning(told)
        if told.stop_reason and told.stop_reason.lower() not in STOP_REASONS:
            counters.count_hint_end("unknown_reason")
        if not len(rows):
            counters.count_hint_end("not_stored")
        elif not isinstance(known.policy, TakesHints):
            counters.count_hint_end("policy_ignores")
        else:
            if hint.will_continue is not None:
                known.policy.hint(rows, hint)
                counters.count_hint_end("passed_on")
            if told.ttl_s:
                self._start(known, int(rows[-1]), now + told.ttl_s, now)

    def _start(self, known: KnownNamespace, row: int, end: float, now: float) -> None:
        name = known.id, self._room.index.key_bytes(row)
        if name not in self._ttls and len(self._ttls) >= TTLS_MAX:
            self._room.counters.count_hint_end("ttl_dropped")
            return
        self._ttls[name] = end, now
        heappush(self._ends, (end, *name))
        if len(self._ends) > 2 * TTLS_MAX:
            self._ends = sorted((end, *name) for name, (end, _) in self._ttls.items())

    def expire(self, now: float) -> None:
        """Chains whose time is over go first from now on."""
        while self._ends and self._ends[0][0] <= now:
            end, namespace, key = heappop(self._ends)
            if self._ttls.get((namespace, key), (-1.0, 0.0))[0] == end:
                _, told_at = self._ttls.pop((namespace, key))
                self._demote(namespace, key, told_at)

    def _demote(self, namespace: int, key: bytes, told_at: float) -> None:
        room, counters = self._room, self._room.counters
        policy = room.namespaces.by_id[namespace].policy
        assert isinstance(policy, TakesHints)
        rows = self._unused_since(room.index.find_one(namespace, key), told_at)
        if not rows:
            counters.count_hint_end("ttl_outlived")
        elif policy.behind:
            counters.count_hint_end("ttl_mistrusted")
        else:
            policy.demote(np.array(rows[::-1], np.intp))
            counters.count_hint_end("ttl_demoted")

    def _unused_since(self, row: int, told_at: float) -> list[int]:
        """The row and those above it, up to the first that was used later."""
        index, used_at = self._room.index, self._room.used_at
        rows = []
        while row > NO_ROW and index.resident_at[row] and index.state_at[row] != UNLINKED:
            if used_at[row] > told_at:
                break
            rows.append(row)
            row = index.parent_at[row]
        return rows

    def check_integrity(self) -> None:
        """`AssertionError` if a TTL would never end."""
        ends = set(self._ends)
        assert all((end, *name) in ends for name, (end, _) in self._ttls.items())
