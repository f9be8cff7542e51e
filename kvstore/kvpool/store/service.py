"""The service of one daemon, whatever carries it: requests in, responses out, no I/O.

A `Service` has one `Domain` (store and pool) per trust domain; a `Connection` is one client. The
daemon drives it from sockets, `kvpool.store.embedded` from function calls. One thread at a time.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, DeniedError
from kvpool.store.accounts import Limits
from kvpool.store.connection import Connection
from kvpool.store.eviction import DEFAULT_POLICY, online_policy
from kvpool.store.index import rows_for
from kvpool.store.learned import Learned
from kvpool.store.pool import Pool, region_bytes_for
from kvpool.store.status import domain_status
from kvpool.store.store import Store, StoreOptions
from kvpool.transfer.memory import SharedMemory

__all__ = [
    "Connection",
    "DataEndpoint",
    "Domain",
    "Health",
    "Identity",
    "Service",
    "ServiceCounters",
    "Ticket",
    "new_domain",
]

INTERNAL_TENANT = ".internal"
"""Tenant of the daemon's own sessions; no configured tenant's name starts with a dot."""
TICKETS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What a credential stands for. `mapped`: it may get the memory descriptors of its domain."""

    tenant: str
    domain: str
    mapped: bool


@dataclass(frozen=True, slots=True)
class DataEndpoint:
    """Where one data worker listens: a Unix socket, and a TCP port (0: none)."""

    unix: str
    port: int = 0

    def address_for(self, host: str | None) -> str:
        """As a client dials it that reached the daemon under `host` (None: Unix socket)."""
        if host is None:
            return self.unix
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{self.port}" if self.port else ""


@dataclass(slots=True)
class Domain:
    """One trust domain: its own store, pool and, if bytes are streamed, data workers."""

    name: str
    store: Store
    pool: Pool
    secret: bytes
    """Marks the daemon's own data workers of this domain."""
    endpoints: list[DataEndpoint] = field(default_factory=list)
    _turn: int = 0

    def data_address(self, host: str | None) -> str:
        """Of the data worker whose turn it is, or empty. See `DataEndpoint.address_for`."""
        if not self.endpoints:
            return ""
        self._turn += 1
        return self.endpoints[self._turn % len(self.endpoints)].address_for(host)

    def renew_store(self, entropy: Callable[[int], bytes]) -> None:
        """Forgets everything that is stored, as if the daemon had just started. What eviction
        policies learned in earlier lives stays."""
        learned = self.store.learned()
        store = Store(self.store.options, clock=self.store.clock, entropy=entropy, learned=learned)
        for _ in range(self.store.regions):
            store.add_region()
        self.store = self.pool.store = store


@dataclass(slots=True)
class Health:
    """What stands in the way of "ok"; whoever sees it writes a sentence under its own name."""

    starting: str = ""
    reasons: dict[str, str] = field(default_factory=dict)


def new_domain(
    name: str,
    capacity: int,
    *,
    chunks: int = 0,
    segment_bytes: int = 0,
    policy: str = DEFAULT_POLICY,
    lease_s: float = 30.0,
    pinned_share: float = 1.0,
    limits: Mapping[str, Limits] | None = None,
    learned: Learned | None = None,
    clock: Callable[[], float],
    entropy: Callable[[int], bytes],
) -> Domain:
    """An empty domain of at most `capacity` bytes, whose pool has not grown yet.

    `chunks` 0 sizes the index for chunks of 16 KiB; `limits` are by
    tenant, `learned` is of an earlier life (`Store.learned`). Raises `ConfigError`.
    """
    region_bytes = region_bytes_for(capacity)
    options = StoreOptions(
        region_bytes=region_bytes,
        chunks=chunks or rows_for(capacity),
        segment_bytes=segment_bytes,
        policy=online_policy(policy),
        lease_s=lease_s,
        pinned_share=pinned_share,
        limits=limits or {},
    )
    store = Store(options, clock=clock, entropy=entropy, learned=learned)
    pool = Pool(store, SharedMemory(), capacity, region_bytes)
    return Domain(name, store, pool, secret=entropy(32))


@dataclass(slots=True)
class ServiceCounters:
    """Events of the carrier side since the start."""

    connections: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    protocol_faults: int = 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an attach token is worth, once."""

    domain: Domain
    writable: bool


class Service:
    """All domains of a daemon.

    `authenticate(token, local)` gives the identity or raises `DeniedError`.
    """

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        authenticate: Callable[[str, bool], Identity],
        entropy: Callable[[int], bytes],
        attach_address: str = "",
    ) -> None:
        self.domains = dict(domains)
        self.instance = entropy(16)
        self.attach_address = attach_address
        self.counters = ServiceCounters()
        self.connections: set[Connection] = set()
        self.health = Health()
        self.draining = False
        self.carrier_status: Callable[[], dict[str, Any]] = dict
        """What the carrier adds to the status."""
        self._authenticate = authenticate
        self._entropy = entropy
        self._tickets: dict[bytes, Ticket] = {}

    def connect(self, *, local: bool, host: str = "") -> Connection:
        """A new client; `local` if it came over a Unix socket or is in this process, else it
        reached us under the address `host`."""
        self.counters.connections += 1
        connection = Connection(self, None if local else host)
        self.connections.add(connection)
        return connection

    def identify(self, hello: wire.Hello, local: bool) -> Identity:
        """Raises `DeniedError`, and `BusyError` for clients that come before all is ready.

        A data worker proves itself by its domain's secret. It speaks for the client whose token it
        passes on, and for itself when it presents the secret as the token, too.
        """
        worker_of = self._worker_domain(hello.worker, local) if hello.worker else None
        if worker_of is not None and hello.token == worker_of.secret.hex():
            return Identity(INTERNAL_TENANT, worker_of.name, mapped=True)
        identity = self._authenticate(hello.token, local and worker_of is None)
        if self.health.starting:
            raise BusyError(f"the daemon is starting: {self.health.starting}")
        if worker_of is None:
            return identity if local else Identity(identity.tenant, identity.domain, mapped=False)
        if worker_of.name != identity.domain:
            raise DeniedError(
                f"tenant {identity.tenant!r} is of another domain than this data worker; "
                "dial the data_address of the Welcome"
            )
        return Identity(identity.tenant, identity.domain, mapped=True)

    def _worker_domain(self, secret: bytes, local: bool) -> Domain:
        found = None
        for domain in self.domains.values():
            if hmac.compare_digest(domain.secret, secret):
                found = domain
        if found is None or not local:
            raise DeniedError("the worker secret is wrong")
        return found

    def issue(self, domain: Domain, writable: bool) -> bytes:
        """A one-time token for the descriptor socket."""
        token = self._entropy(16)
        while len(self._tickets) >= TICKETS_MAX:  # unredeemed ones: the oldest go first
            self._tickets.pop(next(iter(self._tickets)))
        self._tickets[token] = Ticket(domain, writable)
        return token

    def redeem(self, token: bytes) -> Ticket:
        """Raises `DeniedError` for a token that was never issued, or used before."""
        ticket = self._tickets.pop(token, None)
        if ticket is None:
            raise DeniedError("the attach token is unknown or was used before")
        return ticket

    def catch_up(self) -> None:
        """See `Store.catch_up`."""
        for domain in self.domains.values():
            domain.store.catch_up()

    def reap(self) -> None:
        for domain in self.domains.values():
            domain.store.reap()

    @property
    def leases(self) -> int:
        """Leases that are held, in all domains."""
        return sum(len(domain.store.leases) for domain in self.domains.values())

    def state(self) -> tuple[str, list[str]]:
        """(starting, draining, degraded or ok; the reasons)."""
        reasons = [f"{name}: {text}" for name, text in self.health.reasons.items()]
        if self.health.starting:
            return "starting", [self.health.starting, *reasons]
        if self.draining:
            return "draining", [f"{self.leases} leases are held", *reasons]
        return ("degraded" if reasons else "ok"), reasons

    def status(self, domain: Domain | None = None, tenant: str | None = None) -> dict[str, Any]:
        """Everything that `kvpool status` shows, of one domain or all; of namespaces only those
        of `tenant` if it is given."""
        shown = [domain] if domain else list(self.domains.values())
        state, reasons = self.state()
        return {
            "instance": self.instance.hex(),
            "state": state,
            "reasons": reasons,
            "draining": self.draining,
            "tenant": tenant,
            "connections": len(self.connections),
            "counters": asdict(self.counters),
            **self.carrier_status(),
            "domains": {d.name: domain_status(d.store, tenant) | _pool_status(d) for d in shown},
        }


def _pool_status(domain: Domain) -> dict[str, int]:
    return {"capacity": domain.pool.capacity, "data_workers": len(domain.endpoints)}
