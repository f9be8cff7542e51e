"""The daemon's background loops: they survive their own failures and tell when they last ran."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger("kvpool")

LAG_TICK_S = 0.05
LAG_WINDOW_S = 10.0


class Loops:
    """Named loops on the running event loop."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self._last_run: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def every(
        self, name: str, seconds: float, action: Callable[[], Awaitable[None] | None]
    ) -> None:
        """Runs `action` every `seconds`; what it raises is logged and counted, and it goes on."""
        self.failures[name] = 0
        self._last_run[name] = asyncio.get_running_loop().time()
        self._tasks.append(asyncio.create_task(self._run(name, seconds, action), name=name))

    @property
    def ages(self) -> dict[str, float]:
        """Seconds since each loop last ran to its end, well or badly."""
        now = asyncio.get_running_loop().time()
        return {name: max(0.0, now - at) for name, at in self._last_run.items()}

    async def close(self) -> None:
        """Ends all loops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(
        self, name: str, seconds: float, action: Callable[[], Awaitable[None] | None]
    ) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                pending = action()
                if pending is not None:
                    await pending
            except Exception:
                self.failures[name] += 1
                log.exception("background loop %r failed; it goes on", name)
            self._last_run[name] = asyncio.get_running_loop().time()


class Lag:
    """How late the event loop runs what is due: the worst of the last 10 to 20 seconds."""

    def __init__(self) -> None:
        self._worst = [0.0, 0.0]  # of this window and of the one before
        self._started = self._expected = 0.0

    @property
    def worst_s(self) -> float:
        return max(self._worst)

    def tick(self) -> None:
        """To be called every `LAG_TICK_S`."""
        now = time.monotonic()  # the loop's own time stands still while a callback runs
        if now - self._started > LAG_WINDOW_S:
            self._worst = [0.0, self._worst[0]]
            self._started = now
        if self._expected:
            self._worst[0] = max(self._worst[0], now - self._expected)
        self._expected = now + LAG_TICK_S
