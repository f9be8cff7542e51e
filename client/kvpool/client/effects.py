"""What a client operation asks of the world, so that it is written once for sync and async.

An operation is a generator: it yields effects and gets their results. `Link` drivers run it, by
blocking calls (`kvpool.client.blocking`) or by awaiting (`kvpool.client.awaiting`)::

    welcome = yield Call(wire.Hello(...))       one request, its response
    nbytes  = yield Work(copy, 64 << 20)        a blocking function (a bulk copy)
    yield Dial()                                connect anew
    yield Exclusive(steps)                      run other steps, one caller at a time
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Send `body`, get the response. An Error response is raised as its exception."""

    body: Message


@dataclass(frozen=True, slots=True)
class Work:
    """Run `function`, which blocks; `nbytes` tells an async driver whether a thread pays."""

    function: Callable[[], Any]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a fresh connection to the daemon. Raises `UnreachableError`."""


@dataclass(frozen=True, slots=True)
class Exclusive:
    """Run `steps` while nobody else runs any under the same link's lock."""

    steps: Callable[[], Steps[None]]


Effect = Call | Work | Dial | Exclusive
Steps = Generator[Effect, Any, T]
