"""How a daemon takes its memory: in steps, each after a look at what is free."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kvpool.proto.errors import ConfigError, KvpoolError
from kvpool.store.memory import AvailableMemory
from kvpool.store.service import Domain, Health

log = logging.getLogger("kvpool")


class Growth:
    """Fills the pools of `domains`. The steps run in a thread, so that the loop never waits."""

    def __init__(
        self,
        domains: Sequence[Domain],
        health: Health,
        *,
        available: Callable[[int], AvailableMemory],
        headroom: int,
        populate: bool,
    ) -> None:
        """`available(headroom)` is the memory that could be taken now beside the headroom, in
        bytes."""
        self._domains = domains
        self._health = health
        self._available = available
        self._headroom = headroom
        self._populate = populate

    async def first_regions(self) -> None:
        """One region in each domain. Raises `ConfigError` with figures if there is no room."""
        for domain in self._domains:
            async for done in self._region(domain):
                self._health.starting = (
                    f"{done} of the first {domain.pool.region_bytes} bytes are there"
                )

    async def rest(self) -> None:
        """All that is still to come. What stops it is logged, and shown by `/health`."""
        for domain in self._domains:
            try:
                while domain.pool.room:
                    async for _ in self._region(domain):
                        pass
                    ready = domain.store.capacity_bytes
                    log.info("domain %s: %d of %d bytes", domain.name, ready, domain.pool.capacity)
            except KvpoolError as error:
                text = (
                    f"stays at {domain.store.capacity_bytes} of {domain.pool.capacity} bytes: "
                    f"{error}"
                )
                log.warning("domain %s %s", domain.name, text)
                self._health.reasons[f"memory of domain {domain.name}"] = text

    async def _region(self, domain: Domain) -> AsyncIterator[int]:
        steps = domain.pool.build_region(self._check, self._populate)
        while (done := await asyncio.to_thread(next, steps, None)) is not None:
            yield done
        domain.pool.announce()

    def _check(self, nbytes: int) -> None:
        found = self._available(self._headroom)
        if nbytes > found.available_bytes:
            raise ConfigError(
                f"{nbytes} more bytes are wanted, but {found.source} leaves only "
                f"{found.available_bytes} beside the headroom of {self._headroom}: lower "
                "--capacity or --headroom, or free memory"
            )
