"""The SSD tiers of a daemon's domains: started, driven from the event loop, and ended."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.store.memory import return_freed
from kvpool.store.service import Domain, Health
from kvpool.store.ssd.attached import Ssd
from kvpool.store.ssd.lanes import Threads
from kvpool.store.ssd.opening import Opened
from kvpool.store.ssd.starting import Found, attach, look
from kvpool.store.ssd.tier import QUEUE_BYTES
from kvpool.transfer.copying import Bytes

log = logging.getLogger("kvpool")

TURN_S = 0.02
READERS, WRITERS = 8, 2
"""Threads at most: so many reads and writes are in flight."""
QUEUE_SHARE = 8
"""What waits for the device keeps at most this part of the memory (an eighth)."""
END_S = 5.0
"""How long an end waits for the device."""


@dataclass(frozen=True, slots=True)
class _Running:
    domain: Domain
    ssd: Ssd
    lanes: Threads
    opened: Opened


class SsdTiers:
    """One folder per domain below `path`, which share `capacity` as the domains share memory.

    REQUIRES: made and called on one event loop.
    """

    def __init__(
        self,
        path: str,
        capacity: int,
        *,
        chunks: int,
        write_through: bool,
        admission: str,
        health: Health,
    ) -> None:
        self._path = path
        self._capacity = capacity
        self._chunks = chunks
        self._write_through = write_through
        self._admission = admission
        self._health = health
        self._looking: dict[str, asyncio.Task[Found]] = {}
        """By domain."""
        self._device = asyncio.Lock()
        """For one look at a time: each measures how fast the device is."""
        self._running: list[_Running] = []
        self._again: asyncio.Handle | None = None

    def look(self, domains: list[Domain]) -> None:
        """Begins to read what the folders hold, which takes a while; `start` has the rest."""
        memory = sum(domain.pool.capacity for domain in domains)
        for domain in domains:
            share = self._capacity * domain.pool.capacity // memory
            folder = os.path.join(self._path, domain.name)
            self._looking[domain.name] = asyncio.create_task(self._look(folder, share))

    async def _look(self, folder: str, share: int) -> Found:
        async with self._device:
            return await asyncio.to_thread(look, folder, share, self._chunks)

    async def start(self, domains: list[Domain]) -> None:
        """Raises `ConfigError` if a folder cannot be used; `close` it then. REQUIRES: `look`."""
        for domain in domains:
            # Shielded: what a thread has opened must be closed, although nobody waits any more.
            found = await asyncio.shield(self._looking[domain.name])
            lanes, opened = Threads(READERS, _writers(), self._waker()), found.opened
            ssd = attach(
                domain.store,
                found,
                lanes,
                _memory_of(domain),
                seed=int.from_bytes(os.urandom(8), "little"),
                write_through=self._write_through,
                admission=self._admission,
                queue_bytes=min(QUEUE_BYTES, domain.pool.capacity // QUEUE_SHARE),
                clock=time.monotonic,
            )
            self._running.append(_Running(domain, ssd, lanes, opened))
            del found, self._looking[domain.name]  # a whole catalogue
            return_freed()
            log.info(
                "domain %s: %d bytes at %s, %s I/O (%s)",
                domain.name,
                opened.capacity_bytes,
                opened.folder.path,
                "direct" if opened.access.direct else "buffered",
                opened.access.reason,
            )

    def turn(self) -> None:
        """Every `TURN_S`."""
        self._advance()
        for running in self._running:
            running.ssd.turn()
            name, trouble = f"ssd of domain {running.domain.name}", running.ssd.trouble()
            if trouble:
                self._health.reasons[name] = trouble
            else:
                self._health.reasons.pop(name, None)

    async def save(self, end: float) -> None:
        """Writes what only memory has, until `end` on the monotonic clock."""
        for running in self._running:
            while time.monotonic() < end and not running.ssd.trouble():
                started = running.ssd.demotion.flush()
                if started and running.ssd.shelf.tier.idle:
                    break
                await asyncio.sleep(TURN_S)

    async def close(self) -> None:
        """Ends the threads and closes the files, unless the device hangs. Idempotent."""
        while self._looking:
            name, looking = self._looking.popitem()
            if not (await asyncio.wait((looking,), timeout=END_S))[0]:
                log.warning("the SSD of domain %s does not answer", name)
            elif not looking.cancelled() and looking.exception() is None:
                looking.result().opened.close()
        while self._running:
            running = self._running.pop()
            end = time.monotonic() + END_S
            while not running.ssd.shelf.tier.idle and time.monotonic() < end:
                if running.ssd.trouble():
                    break
                while running.lanes.poll():  # nobody else is to be served any more
                    pass
                await asyncio.sleep(TURN_S)
            if await asyncio.to_thread(running.lanes.close, max(0.1, end - time.monotonic())):
                running.opened.close()
            else:
                log.warning("the SSD of domain %s does not answer", running.domain.name)

    def _waker(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._advance)

        return wake

    def _advance(self) -> None:
        """Takes results and starts what they have made room for; goes on when the loop has served
        who waits."""
        for running in self._running:
            running.lanes.poll()
            if running.ssd.demotion.advance() and not self._again:
                self._again = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._again = None
        self._advance()


def _writers() -> int:
    """Not all cores: whoever matches while chunks are written would wait for one."""
    return max(1, min(WRITERS, len(os.sched_getaffinity(0)) // 2))


def _memory_of(domain: Domain) -> Callable[[int, int], Bytes]:
    """The bytes of its pool at an address."""

    def view(address: int, nbytes: int) -> Bytes:
        region, offset = divmod(address, domain.pool.region_bytes)
        return domain.pool.regions[region].array[offset : offset + nbytes]

    return view
