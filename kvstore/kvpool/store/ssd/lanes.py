"""Threads that wait for the disk, so that nobody else does.

Work is submitted to a lane by the tier's owner and runs in that lane's threads; its result comes
back when the owner polls. Threads are daemons: a device that hangs does not keep a process alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, Protocol

Work = Callable[[], Any]
Done = Callable[[Any], None]
"""Gets what the work returned, or the `Exception` that it raised."""


class Lane(IntEnum):
    """Work of one lane starts in the order in which it was submitted."""

    READ = 0
    WRITE = 1
    CATALOGUE = 2


class Lanes(Protocol):
    """Runs work elsewhere."""

    def submit(self, lane: Lane, work: Work, done: Done) -> None:
        """`done` is called later, by the owner of the tier."""

    def later(self, action: Callable[[], None]) -> None:
        """`action` is called later, by the owner of the tier: what is too much to do at once."""


class Threads:
    """`readers` and `writers` threads, and one for the catalogue, started when first needed."""

    def __init__(self, readers: int, writers: int, wake: Callable[[], None]) -> None:
        """`wake` is called from any thread when there is something to `poll`."""
        self._counts = {Lane.READ: readers, Lane.WRITE: writers, Lane.CATALOGUE: 1}
        self._queues: dict[Lane, SimpleQueue[tuple[Work, Done] | None]] = {}
        self._results: deque[tuple[Done, Any]] = deque()
        self._wake = wake
        self._threads: list[threading.Thread] = []

    def submit(self, lane: Lane, work: Work, done: Done) -> None:
        if lane not in self._queues:
            self._start(lane)
        self._queues[lane].put((work, done))

    def later(self, action: Callable[[], None]) -> None:
        self._results.append((lambda _: action(), None))
        self._wake()

    def poll(self) -> bool:
        """Hands one result over, in the caller's thread; False if there is none. Wakes again if
        there are more: the owner has others to serve between them."""
        if not self._results:
            return False
        done, result = self._results.popleft()
        done(result)
        if self._results:
            self._wake()
        return True

    def close(self, seconds: float) -> bool:
        """Ends the threads when their work is done; False if one is not within `seconds`."""
        for lane, queue in self._queues.items():
            for _ in range(self._counts[lane]):
                queue.put(None)
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, lane: Lane) -> None:
        queue = self._queues[lane] = SimpleQueue()
        for number in range(self._counts[lane]):
            name = f"ssd-{lane.name.lower()}-{number}"
            thread = threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, queue: SimpleQueue[tuple[Work, Done] | None]) -> None:
        while (item := queue.get()) is not None:
            work, done = item
            try:
                result = work()
            except Exception as error:
                result = error
            self._results.append((done, result))
            self._wake()
