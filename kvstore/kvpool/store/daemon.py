"""One daemon: its parts, its life from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvpool.store.config import ServeConfig
from kvpool.store.growth import Growth
from kvpool.store.http import HttpPort
from kvpool.store.learned import LearnedFile
from kvpool.store.loops import LAG_TICK_S, Lag, Loops
from kvpool.store.memory import AvailableMemory, available_bytes
from kvpool.store.ports import Ports
from kvpool.store.selftest import self_test
from kvpool.store.service import Domain, Service, new_domain
from kvpool.store.ssd.running import TURN_S, SsdTiers
from kvpool.store.tenants import Tenants, load_tenants
from kvpool.store.values import host_port
from kvpool.store.worker import WorkerConfig
from kvpool.store.workers import Workers

log = logging.getLogger("kvpool")

REAP_S = 0.25
LEARNED_S = 300.0
DRAIN_LOOK_S = 0.02


class Daemon:
    """REQUIRES: made, run and closed on one event loop."""

    def __init__(
        self,
        config: ServeConfig,
        tenants: Tenants,
        *,
        available: Callable[[int], AvailableMemory] = available_bytes,
    ) -> None:
        """`available(headroom)` is the memory that could be taken now."""
        self.config = config
        self._tenants = tenants
        self._learned = LearnedFile(config.learned_path)
        self._earlier = self._learned.load()
        domains = [self._new_domain(name, capacity) for name, capacity in tenants.domains.items()]
        self.service = Service(
            {domain.name: domain for domain in domains},
            authenticate=tenants.authenticate,
            entropy=os.urandom,
            attach_address=f"unix:{config.socket}.fds",
        )
        self.service.health.starting = "no memory yet"
        self.loops = Loops()
        self.lag = Lag()
        self.workers = Workers(self.service.health)
        http = HttpPort(
            state=self.service.state, status=self.service.status, allows=tenants.allows_http
        )
        self.ports = Ports(config, self.service, http)
        self.growth = Growth(
            domains,
            self.service.health,
            available=available,
            headroom=config.headroom,
            populate=config.populate,
        )
        self.service.carrier_status = self._carrier_status
        self._growing: asyncio.Task[None] | None = None
        self.ssd: SsdTiers | None = None

    def _new_domain(self, name: str, capacity: int) -> Domain:
        config = self.config
        return new_domain(
            name,
            capacity,
            chunks=config.chunks,
            segment_bytes=config.segment_bytes,
            policy=config.policy,
            lease_s=config.lease_s,
            pinned_share=config.pinned_share,
            limits=self._tenants.limits_of(name),
            learned=self._earlier.get(name),
            clock=time.monotonic,
            entropy=os.urandom,
        )

    async def _save_learned(self) -> None:
        domains = {d.name: d.store.learned() for d in self.service.domains.values()}
        await asyncio.to_thread(self._learned.save, domains)

    async def start(self) -> None:
        """Returns when the daemon is ready. Raises what keeps it from that; `close` it then."""
        await self.ports.open()
        self.loops.every("reap", REAP_S, self.service.reap)
        self.loops.every("lag", LAG_TICK_S, self.lag.tick)
        self.loops.every("learned", LEARNED_S, self._save_learned)
        await self.growth.first_regions()
        self._look_at_ssd()
        self.service.health.starting = "the data workers are starting"
        await self._start_workers()
        self.service.health.starting = "the self-test is running"
        for domain in self.service.domains.values():
            streams = [endpoint.unix for endpoint in domain.endpoints]
            seconds = await asyncio.to_thread(self_test, self.ports.address, domain.secret, streams)
            log.info("domain %s: self-test passed in %.0f ms", domain.name, seconds * 1000)
            # The first namespace decides how the pool is cut: that must not be the test's.
            domain.renew_store(os.urandom)
        await self._start_ssd()
        self.service.health.starting = ""
        self._growing = asyncio.create_task(self.growth.rest(), name="growth")

    def _look_at_ssd(self) -> None:
        config = self.config
        if not config.ssd_path:
            return
        self.ssd = SsdTiers(
            config.ssd_path,
            config.ssd_capacity,
            chunks=config.chunks,
            write_through=config.ssd_mode == "write_through",
            admission=config.ssd_admission,
            health=self.service.health,
        )
        self.ssd.look(list(self.service.domains.values()))

    async def _start_ssd(self) -> None:
        if self.ssd is None:
            return
        self.service.health.starting = "the SSD is being looked at"
        await self.ssd.start(list(self.service.domains.values()))
        self.loops.every("ssd", TURN_S, self.ssd.turn)

    async def drain(self) -> bool:
        """Lets holders of leases finish, for at most `drain_s`. True if all have."""
        self.service.draining = True
        self.ports.stop_accepting()
        await self._stop_growing()
        end = time.monotonic() + self.config.drain_s
        while self.service.leases and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK_S)
        try:
            await self._save_learned()
        except OSError as error:
            log.warning("what was learned is not kept in %s: %s", self._learned.path, error)
        drained = not self.service.leases
        if self.ssd is not None:
            await self.ssd.save(end)
        return drained

    async def close(self) -> None:
        """Ends everything and removes the sockets. Idempotent."""
        await self._stop_growing()
        await self.workers.close()
        await self.loops.close()
        if self.ssd is not None:
            await self.ssd.close()
        await self.ports.close()
        for domain in self.service.domains.values():
            domain.pool.close()

    async def _stop_growing(self) -> None:
        if self._growing is not None:
            self._growing.cancel()
            await asyncio.gather(self._growing, return_exceptions=True)

    async def _start_workers(self) -> None:
        config = self.config
        for domain in self.service.domains.values():
            if not config.tcp and domain.name not in self._tenants.needs_streams:
                continue
            suffixes = ["", *(f".{number}" for number in range(1, config.data_workers))]
            worker_configs = [
                WorkerConfig(
                    daemon=self.ports.address,
                    secret=domain.secret.hex(),
                    unix=f"{self.ports.address}.data-{domain.name}{suffix}",
                    tcp_host=host_port(config.tcp).host if config.tcp else "",
                    log_level=config.log_level,
                )
                for suffix in suffixes
            ]
            await self.workers.start(domain, worker_configs)

    def _carrier_status(self) -> dict[str, Any]:
        failures = self.loops.failures
        return {
            "event_loop_lag_s": self.lag.worst_s,
            "loops": {
                name: {"last_run_age_s": age, "failures": failures[name]}
                for name, age in self.loops.ages.items()
            },
            "worker_restarts": self.workers.restarts,
            "worker_pids": dict(self.workers.pids),
            "ignored_learned_files": self._learned.ignored,
        }


async def run(daemon: Daemon, announce: Callable[[Daemon], None]) -> None:
    """From start to drain: until SIGTERM or SIGINT. `announce` is called when it is ready.

    Raises what keeps the daemon from starting.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.create_task(daemon.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            _settle_garbage_collector()
            announce(daemon)
            await stopping
            if not await daemon.drain():
                log.warning("stopping although %d leases are held", daemon.service.leases)
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await daemon.close()


def _settle_garbage_collector() -> None:
    """What was made so far stays: the collector need not look at it again. Requests leave no
    cycles behind, so it is enough to look rarely; a full look stalls every client meanwhile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def serve(config: ServeConfig, *, announce_json: bool = False) -> None:
    """`kvpool serve`: runs a daemon in this process until it is told to stop.

    Raises `KvpoolError` if it cannot start.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s kvpool %(levelname)s %(message)s"
    )
    _raise_descriptor_limit()
    tenants = load_tenants(config)
    announce = _announce_json if announce_json else _announce

    async def main() -> None:
        await run(Daemon(config, tenants), announce)

    run_loop(main())


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        log.warning("uvloop is not installed: serving on asyncio's own, slower event loop")
        asyncio.run(main)
    else:
        uvloop.run(main)


def _raise_descriptor_limit() -> None:
    """As many descriptors as the system allows: each client needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(daemon: Daemon) -> None:
    addresses = [daemon.ports.address, daemon.ports.tcp_address, daemon.ports.http_address]
    ready = sum(domain.store.capacity_bytes for domain in daemon.service.domains.values())
    capacity = sum(domain.pool.capacity for domain in daemon.service.domains.values())
    shown = ", ".join(filter(None, addresses))
    print(f"kvpool is ready on {shown} with {ready} of {capacity} bytes", flush=True)


def _announce_json(daemon: Daemon) -> None:
    line = {
        "event": "ready",
        "address": daemon.ports.address,
        "tcp": daemon.ports.tcp_address,
        "http": daemon.ports.http_address,
        "pid": os.getpid(),
        "instance": daemon.service.instance.hex(),
    }
    print(json.dumps(line), flush=True)
