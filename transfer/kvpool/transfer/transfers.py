"""The two kinds of `Transfer`: finished at birth, and finished later by another thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvpool.proto.errors import InvalidError
from kvpool.transfer.base import Status


class Finished:
    """A transfer whose bytes moved within the call that made it."""

    def __init__(self, statuses: Sequence[Status]) -> None:
        self.statuses = statuses

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True

    def cancel(self) -> None:
        """Nothing to do: nothing can land any more."""

    def __await__(self) -> Generator[Any, None, Sequence[Status]]:
        return self.statuses
        yield


class Pending:
    """A transfer that another thread finishes by `finish`.

    REQUIRES of that thread: it looks at `cancelled` before each step, and calls `finish` in any
    case, within the transfer's deadline.
    """

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        """`on_cancel` is called once by `cancel`, to end what the other thread waits for."""
        self._future: concurrent.futures.Future[Sequence[Status]] = concurrent.futures.Future()
        # A task that is cancelled while it awaits must not cancel the transfer for others.
        self._future.set_running_or_notify_cancel()
        self._on_cancel = on_cancel
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether somebody gave up."""
        return self._cancelled.is_set()

    def finish(self, statuses: Sequence[Status]) -> None:
        """Publish the final statuses. REQUIRES: nothing can land any more."""
        self._future.set_result(statuses)

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float) -> bool:
        concurrent.futures.wait([self._future], timeout)
        return self._future.done()

    @property
    def statuses(self) -> Sequence[Status]:
        if not self._future.done():
            raise InvalidError("the transfer is still in flight: wait for it first")
        return self._future.result()

    def cancel(self) -> None:
        if not self._future.done():
            self._cancelled.set()
            self._on_cancel()
            concurrent.futures.wait([self._future])

    def __await__(self) -> Generator[Any, None, Sequence[Status]]:
        return asyncio.wrap_future(self._future).__await__()
