"""The daemon's data workers: started, announced when they listen, started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Sequence

from kvpool.proto.errors import InternalError
from kvpool.store.service import DataEndpoint, Domain, Health
from kvpool.store.worker import WorkerConfig

log = logging.getLogger("kvpool")

READY_S = 20.0
STOP_S = 2.0
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 5.0
STEADY_S = 30.0
"""A worker that lived this long is started again at once."""


class Workers:
    """One task per worker process."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts = 0
        self.pids: dict[str, int] = {}

    async def start(self, domain: Domain, configs: Sequence[WorkerConfig]) -> None:
        """Starts one worker per config and waits until all listen. Raises `InternalError`."""
        first = [asyncio.get_running_loop().create_future() for _ in configs]
        for number, (config, ready) in enumerate(zip(configs, first, strict=True)):
            name = f"data worker {domain.name}/{number}"
            task = asyncio.create_task(self._keep(name, domain, config, ready), name=name)
            self._tasks.append(task)
        await asyncio.gather(*first)

    async def close(self) -> None:
        """Ends all workers. What they are sending is cut."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _keep(
        self, name: str, domain: Domain, config: WorkerConfig, ready: asyncio.Future[None]
    ) -> None:
        loop = asyncio.get_running_loop()
        pause = BACKOFF_S_MIN
        while True:
            started = loop.time()
            try:
                await self._run(name, domain, config, ready)
                text = "it ended"
            except Exception as error:  # whatever it is, the domain needs its worker
                text = f"{type(error).__name__}: {error}"
                if not ready.done():  # the first one: the daemon must not start without
                    ready.set_exception(InternalError(f"{name} did not start: {text}"))
                    return
            self._health.reasons[name] = f"{text}; it is being started again"
            self.restarts += 1
            log.warning("%s: %s; starting it again", name, text)
            pause = BACKOFF_S_MIN if loop.time() - started > STEADY_S else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_S_MAX)

    async def _run(
        self, name: str, domain: Domain, config: WorkerConfig, ready: asyncio.Future[None]
    ) -> None:
        """Starts a worker and returns when it has ended. Raises `InternalError`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvpool.store.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            endpoint = await _endpoint_of(process, config)
            domain.endpoints.append(endpoint)
            self._health.reasons.pop(name, None)
            self.pids[name] = process.pid
            if not ready.done():
                ready.set_result(None)
            try:
                await process.wait()
            finally:
                domain.endpoints.remove(endpoint)
                self.pids.pop(name, None)
        finally:
            await _stop(process)


async def _endpoint_of(process: asyncio.subprocess.Process, config: WorkerConfig) -> DataEndpoint:
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            process.stdin.write(config.to_json().encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
    except (TimeoutError, ConnectionError) as error:
        raise InternalError(f"it was not ready within {READY_S} s") from error
    if not line:
        raise InternalError("it ended at its start; see its log")
    return DataEndpoint(config.unix, json.loads(line)["port"])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """A worker ends when its stdin closes; one that does not is killed."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
