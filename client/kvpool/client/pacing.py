"""How often a client tries a daemon that does not answer, so that an engine hardly notices it."""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.message import Message

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import DeadlineError, InvalidError, KvpoolError, from_code

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 1.0
DEADLINE_S_MAX = 1e6
PATIENCE_S = 1.0
"""Longest wait for a daemon that has let a deadline pass and was not heard since."""


class Backoff:
    """After a failure later tries fail at once until a pause is over; it doubles up to 1 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = BACKOFF_S_MIN
        self._not_before = 0.0
        self._error: KvpoolError | None = None

    def check(self) -> None:
        """Raises the last failure again while a try would be too early."""
        error = self._error
        if error is not None and self._clock() < self._not_before:
            raise type(error)(f"{error} (next try in at most {BACKOFF_S_MAX:g} s)")

    @property
    def patience(self) -> float:
        """Seconds that the next try may take."""
        return float("inf") if self._error is None else PATIENCE_S

    def failed(self, error: KvpoolError) -> None:
        self._error = error
        self._not_before = self._clock() + self._pause
        self._pause = min(2 * self._pause, BACKOFF_S_MAX)

    def succeeded(self) -> None:
        self._error = None
        self._pause = BACKOFF_S_MIN


def raise_error(message: Message | None) -> Message | None:
    """`message`, unless it is an Error: then it is raised."""
    if isinstance(message, wire.Error):
        raise from_code(message.code, message.text)
    return message


def end_after(seconds: float) -> float:
    """The end of a deadline on the monotonic clock. Raises `InvalidError` for one without end."""
    if not seconds <= DEADLINE_S_MAX:
        raise InvalidError(f"a deadline of {seconds} s; at most {DEADLINE_S_MAX:g} s are possible")
    return time.monotonic() + seconds


def left(end: float) -> float:
    """Seconds until `end` on the monotonic clock. Raises `DeadlineError` if there are none."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise DeadlineError("the deadline passed")
    return seconds
