"""What a client operation asks of the world, so that it is written once for sync and async.

An operation is a generator: it yields effects and gets their results. A driver runs it, by blocking
calls (`kvpool.client.blocking`) or by awaiting (`kvpool.client.awaiting`)::

    channel = yield Dial()                      a fresh connection
    welcome = yield Call(channel, hello)        one request, its response
    ticket  = yield Post(channel, reserve)      one request, whose response is wanted later ...
    room    = yield Await(channel, ticket)      ... and now
    copied  = yield Work(copy, 64 << 20)        a blocking function (a bulk copy)
    yield Exclusive(steps)                      run other steps, one caller at a time
    yield Pause(0.001)                          nothing, for a while

All effects of one operation share its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")


class Channel(Protocol):
    """One connection to the service. It is bound to one life of the daemon: it never reconnects."""

    @property
    def alive(self) -> bool:
        """False once the peer has closed it, or what travels on it has lost its meaning."""

    @property
    def silent(self) -> bool:
        """A deadline has passed since the peer was last heard."""

    def call(self, body: Message | None, end: float) -> Any:
        """The response to `body` (None: a ping) before `end` on the monotonic clock; of an async
        driver's channel, an awaitable of it.

        An Error response is returned as it is. Raises `UnreachableError`, `DeadlineError`,
        `ProtocolError`.
        """

    def post(self, body: Message, end: float) -> int:
        """Sends `body` as `call` does, without waiting for the response: a ticket for it.

        The service handles what comes over one channel in the order in which it was sent. A
        ticket is awaited once, or dropped; if awaiting it fails, both.
        """

    def wait(self, ticket: int, end: float) -> Any:
        """The response to what was posted, as from `call`; one that has come counts even after
        `end`."""

    def drop(self, ticket: int) -> None:
        """Nobody wants that response any more: what it grants is given back, now or when it comes.

        From any thread; never raises, never waits for long.
        """

    def notify(self, body: Message, *, vital: bool = True) -> bool:
        """Sends without wanting a response. Never raises, never waits for long.

        To a daemon that does not read, what is vital goes when it reads again, and what is not is
        dropped. False if the connection is lost or the message was dropped.
        """

    def close(self) -> None:
        """The peer takes back all that this connection holds. Idempotent."""

    def forget(self) -> None:
        """In a fork child: drop the inherited connection without disturbing the parent's."""


@dataclass(slots=True)
class Call:
    """Send `body` (None: a ping), get the response. An Error response is raised."""

    channel: Channel
    body: Message | None


@dataclass(slots=True)
class Post:
    """Send `body`; the result is a ticket for its response."""

    channel: Channel
    body: Message


@dataclass(slots=True)
class Await:
    """Get the response to what was posted. An Error response is raised."""

    channel: Channel
    ticket: int


@dataclass(slots=True)
class Work:
    """Run `function(end)`, which blocks, at most until about `end` on the monotonic clock.

    `nbytes` (0: unknown) tells an async driver whether a thread pays.
    """

    function: Callable[[float], Any]
    nbytes: int


@dataclass(slots=True)
class Dial:
    """Open a fresh `Channel`. Raises `UnreachableError`."""


@dataclass(slots=True)
class Exclusive:
    """Run `steps`, for at most `seconds`, while nobody else runs any under the driver's lock."""

    steps: Callable[[], Steps[None]]
    seconds: float = float("inf")


@dataclass(slots=True)
class Pause:
    """Let `seconds` pass."""

    seconds: float


Effect = Call | Post | Await | Work | Dial | Exclusive | Pause
Steps = Generator[Effect, Any, T]
