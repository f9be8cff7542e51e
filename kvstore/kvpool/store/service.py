"""The service of one daemon, whatever carries it: requests in, responses out, no I/O.

A `Service` has one `Domain` (store and pool) per trust domain; a `Connection` is one client. The
daemon drives it from sockets, `kvpool.store.embedded` from function calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message

from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    DeniedError,
    InternalError,
    InvalidError,
    KvpoolError,
    NamespaceError,
)
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.store.pool import Pool, region_bytes_for
from kvpool.store.store import KnownNamespace, Store, StoreOptions, StoreSession
from kvpool.transfer.memory import SharedMemory

log = logging.getLogger("kvpool")

KEYS_MAX = 1 << 17
CHUNKS_MIN = 65536
CHUNK_BYTES_SMALL = 16 << 10
"""The index is sized for chunks of this many bytes, unless told otherwise."""
DRAM = 2
"""Number of the DRAM tier in Explained."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a credential stands for. `mapped`: it may get the memory descriptors of its domain."""

    tenant: str
    domain: str
    mapped: bool


@dataclass(slots=True)
class Domain:
    """One trust domain: its own store, pool and (if bytes are streamed) data worker."""

    name: str
    store: Store
    pool: Pool
    data_address: str = ""
    local_data_address: str = ""


def new_domain(
    name: str,
    capacity: int,
    *,
    chunks: int = 0,
    segment_bytes: int = 0,
    policy: str = "lru",
    lease_s: float = 30.0,
    clock: Callable[[], float],
    entropy: Callable[[int], bytes],
) -> Domain:
    """An empty domain of at most `capacity` bytes, whose pool has not grown yet.

    `chunks` 0 sizes the index for chunks of 16 KiB. Raises `ConfigError`.
    """
    region_bytes = region_bytes_for(capacity)
    options = StoreOptions(
        region_bytes=region_bytes,
        chunks=chunks or max(CHUNKS_MIN, capacity // CHUNK_BYTES_SMALL),
        segment_bytes=segment_bytes,
        policy=policy,
        lease_s=lease_s,
    )
    store = Store(options, clock=clock, entropy=entropy)
    return Domain(name, store, Pool(store, SharedMemory(), capacity, region_bytes))


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

    `authenticate(token, local)` gives the identity or raises `DeniedError`; `worker_secret` marks
    the daemon's own data workers.
    """

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        authenticate: Callable[[str, bool], Identity],
        entropy: Callable[[int], bytes],
        attach_address: str = "",
        worker_secret: bytes = b"",
    ) -> None:
        self.domains = dict(domains)
        self.instance = entropy(16)
        self.attach_address = attach_address
        self.counters = ServiceCounters()
        self.connections: set[Connection] = set()
        self.draining = False
        self._authenticate = authenticate
        self._entropy = entropy
        self._worker_secret = worker_secret
        self._tickets: dict[bytes, Ticket] = {}

    def connect(self, *, local: bool) -> Connection:
        """A new client; `local` if it came over a Unix socket or is in this process."""
        self.counters.connections += 1
        connection = Connection(self, local)
        self.connections.add(connection)
        return connection

    def identify(self, hello: wire.Hello, local: bool) -> Identity:
        """Raises `DeniedError`."""
        identity = self._authenticate(hello.token, local)
        if hello.worker:
            if not (local and self._worker_secret and hello.worker == self._worker_secret):
                raise DeniedError("the worker secret is wrong")
            return Identity(identity.tenant, identity.domain, mapped=True)
        return identity if local else Identity(identity.tenant, identity.domain, mapped=False)

    def issue(self, domain: Domain, writable: bool) -> bytes:
        """A one-time token for the descriptor socket."""
        token = self._entropy(16)
        while len(self._tickets) >= 1024:  # unredeemed ones: the oldest go first
            self._tickets.pop(next(iter(self._tickets)))
        self._tickets[token] = Ticket(domain, writable)
        return token

    def redeem(self, token: bytes) -> Ticket:
        """Raises `DeniedError` for a token that was never issued, or used before."""
        ticket = self._tickets.pop(token, None)
        if ticket is None:
            raise DeniedError("the attach token is unknown or was used before")
        return ticket

    def reap(self) -> None:
        for domain in self.domains.values():
            domain.store.reap()

    def status(self, domain: Domain | None = None) -> dict[str, Any]:
        """Everything that `kvpool status` shows, of one domain or all."""
        shown = [domain] if domain else list(self.domains.values())
        return {
            "instance": self.instance.hex(),
            "draining": self.draining,
            "connections": len(self.connections),
            "counters": asdict(self.counters),
            "domains": {d.name: _domain_status(d) for d in shown},
        }


def _domain_status(domain: Domain) -> dict[str, Any]:
    store = domain.store
    allocator = store.allocator
    return {
        "epoch": store.epoch,
        "capacity": domain.pool.capacity,
        "ready": store.capacity_bytes,
        "policy": store.options.policy,
        "chunks": store.index.count,
        "chunks_max": store.index.capacity,
        "leases": len(store.leases),
        "bytes": store.figures(),
        "slabs": asdict(allocator.statistics()) if allocator else {},
        "counters": asdict(store.counters),
        "namespaces": [_namespace_status(known) for known in store.namespaces.values()],
        "warnings": _unmet(store),
    }


def _namespace_status(known: KnownNamespace) -> dict[str, Any]:
    return {
        "id": known.id,
        "tenant": known.tenant,
        "digest": known.digest.hex(),
        "model": known.namespace.model,
        "chunk_tokens": known.namespace.chunk_tokens,
        "parts": len(known.namespace.parts),
        "chunk_bytes": sum(known.extent_bytes),
        "published": known.published,
        "hit_chunks": known.hit_chunks,
        "missed": known.missed,
    }


def _unmet(store: Store) -> list[str]:
    """Writers and readers that use different namespaces look like this: say so."""
    spaces = list(store.namespaces.values())
    writers = [k for k in spaces if k.published >= 20 and not k.hit_chunks]
    readers = [k for k in spaces if k.missed >= 20 and not k.hit_chunks and not k.published]
    return [
        f"writers and readers use different namespaces: {w.published} chunks published in "
        f"{w.digest.hex()[:16]} were never matched, {r.missed} matches missed in "
        f"{r.digest.hex()[:16]}; they differ in "
        + ("; ".join(w.namespace.differences(r.namespace)) or "tenant")
        for w in writers
        for r in readers
    ]


class Connection:
    """One client's requests. `close` gives back all that it holds."""

    def __init__(self, service: Service, local: bool) -> None:
        self.service = service
        self.local = local
        self.client = ""
        self.pid = 0
        self._domain: Domain | None = None
        self._session: StoreSession | None = None
        self.attached = False
        self._verbs: dict[str, Callable[[Any], Message | None]] = {
            "hello": self._hello,
            "open": self._open,
            "attach": self._attach,
            "match": self._match,
            "reserve": self._reserve,
            "commit": self._commit,
            "abort": self._abort,
            "release": self._release,
            "adopt": self._adopt,
            "touch": self._touch,
            "hint": self._hint,
            "pin": self._pin,
            "delete": self._delete,
            "clear": self._clear,
            "explain": self._explain,
            "keys": self._keys,
            "status": self._status,
            "fetch": self._stream_only,
            "store": self._stream_only,
        }

    @property
    def domain(self) -> Domain:
        if self._domain is None:
            raise InvalidError("say Hello first")
        return self._domain

    @property
    def session(self) -> StoreSession:
        if self._session is None:
            raise InvalidError("say Hello first")
        return self._session

    def handle(self, request: wire.Request) -> Message | None:
        """The answer, an Error if it cannot be served; None if none is wanted (one-way)."""
        verb = request.WhichOneof("body")
        counters = self.service.counters
        counters.requests[verb or "unknown"] = counters.requests.get(verb or "unknown", 0) + 1
        try:
            if verb is None:
                raise InvalidError("this version does not know the verb; upgrade the daemon")
            answer = self._verbs[verb](getattr(request, verb))
        except KvpoolError as error:
            answer = self._refusal(error)
        except Exception:
            log.exception("%s failed", verb)
            answer = self._refusal(InternalError(f"{verb} failed in the daemon; see its log"))
        return answer if request.id else None

    def close(self) -> None:
        """The client is gone. Idempotent."""
        self.service.connections.discard(self)
        if self._session is not None:
            self.domain.store.close_session(self._session)
            self._session = None

    def _refusal(self, error: KvpoolError) -> wire.Error:
        name = type(error).__name__
        counters = self.service.counters
        counters.errors[name] = counters.errors.get(name, 0) + 1
        return protocol.error_body(error)

    # ---- connection and namespace

    def _hello(self, hello: wire.Hello) -> Message:
        version = protocol.common_version(hello.version_min, hello.version_max)
        identity = self.service.identify(hello, self.local)
        domain = self.service.domains[identity.domain]
        self.client, self.pid = hello.client, hello.pid
        self._domain = domain
        self._session = domain.store.open_session(identity.tenant, mapped=identity.mapped)
        return wire.Welcome(
            version=version,
            features=sorted(protocol.FEATURES.intersection(hello.features)),
            epoch=domain.store.epoch,
            instance=self.service.instance,
            tenant=identity.tenant,
            domain=domain.name,
            mapped=identity.mapped,
            attach_address=self.service.attach_address if identity.mapped else "",
            data_address=domain.local_data_address if self.local else domain.data_address,
            frame_bytes_max=frames.MAX_FRAME,
            keys_max=KEYS_MAX,
            reserve_max=domain.store.options.reserve_max,
            lease_ms=int(domain.store.options.lease_s * 1000),
        )

    def _open(self, request: wire.Open) -> Message:
        namespace = Namespace.from_record(request.namespace)
        tenant = self.session.tenant
        digest = namespace.digest(tenant)
        if digest != request.digest:
            raise NamespaceError(
                f"the client computes namespace digest {request.digest.hex()[:16]}, the daemon "
                f"{digest.hex()[:16]} for tenant {tenant!r}: their versions encode it differently"
            )
        known, warning = self.domain.store.open_namespace(tenant, namespace)
        if warning:
            log.warning("%s", warning)
        return wire.Opened(namespace=known.id, warning=warning)

    def _attach(self, request: wire.Attach) -> Message:
        if not self.session.mapped:
            raise DeniedError(
                f"tenant {self.session.tenant!r} may not map the memory of domain "
                f"{self.domain.name!r} over this connection; use the byte stream"
            )
        self.attached = True
        return wire.Attached(
            token=self.service.issue(self.domain, request.writable),
            region_bytes=self.domain.pool.region_bytes,
            regions=self.domain.store.regions,
        )

    # ---- reading

    def _match(self, request: wire.Match) -> Message:
        _check_keys(request.keys)
        match = self.domain.store.match(
            self.session,
            request.namespace,
            request.keys,
            request.parts,
            request.lease_ms / 1000,
            request.peek,
        )
        return wire.Matched(
            hits=match.hits,
            miss_outcome=match.outcome,
            miss_reason=match.reason,
            lease=match.lease,
            lease_ms=int(match.lease_s * 1000),
            extents=match.extents,
        )

    def _adopt(self, request: wire.Adopt) -> Message:
        match = self.domain.store.adopt(self.session, request.lease, request.parts)
        return wire.Matched(
            hits=match.hits,
            miss_outcome=match.outcome,
            miss_reason=match.reason,
            lease=match.lease,
            lease_ms=int(match.lease_s * 1000),
            extents=match.extents,
        )

    def _release(self, request: wire.Release) -> Message:
        leases = [request.leases[i : i + 16] for i in range(0, len(request.leases), 16)]
        return _verdict([self.domain.store.release(self.session, lease) for lease in leases])

    def _touch(self, request: wire.Touch) -> Message:
        ttl = request.lease_ms / 1000
        outcome = self.domain.store.renew(self.session, request.lease, ttl)
        return wire.Verdict(outcomes=bytes([outcome]), lease_ms=request.lease_ms)

    # ---- writing

    def _reserve(self, request: wire.Reserve) -> Message:
        reservation = self.domain.store.reserve(
            self.session,
            request.namespace,
            request.parent,
            request.keys,
            request.parts,
            request.lease_ms / 1000,
        )
        return wire.Reserved(
            outcomes=reservation.outcomes.tobytes(),
            lease=reservation.lease,
            lease_ms=int(reservation.lease_s * 1000),
            extents=reservation.extents,
            text=reservation.text,
        )

    def _commit(self, request: wire.Commit) -> Message:
        return _verdict(
            self.domain.store.commit(self.session, request.lease, _items(request.items))
        )

    def _abort(self, request: wire.Abort) -> Message:
        return _verdict(
            [self.domain.store.abort(self.session, request.lease, _items(request.items))]
        )

    def _stream_only(self, _: Message) -> Message:
        raise InvalidError("Fetch and Store belong on a data connection; see Welcome.data_address")

    # ---- the rest

    def _hint(self, request: wire.Hint) -> Message:
        return _verdict(self.domain.store.hint(self.session, request.namespace, request.keys))

    def _pin(self, request: wire.Pin) -> Message:
        _check_keys(request.keys)
        store = self.domain.store
        if request.unpin:
            return _verdict([store.unpin(self.session, request.namespace, request.keys)])
        ttl = request.ttl_ms / 1000
        return _verdict(store.pin(self.session, request.namespace, request.keys, ttl))

    def _delete(self, request: wire.Delete) -> Message:
        _check_keys(request.keys)
        return _verdict(
            self.domain.store.delete(
                self.session, request.namespace, request.keys, corrupt=request.quarantine
            )
        )

    def _clear(self, request: wire.Clear) -> Message:
        return wire.Count(count=self.domain.store.clear(self.session, request.namespace))

    def _explain(self, request: wire.Explain) -> Message:
        _check_keys(request.keys)
        found = self.domain.store.explain(self.session, request.namespace, request.keys)
        return wire.Explained(
            outcomes=bytes(e.outcome for e in found),
            reasons=bytes(e.reason for e in found),
            tiers=bytes(DRAM if e.parts else 0 for e in found),
            nbytes=np.array([e.nbytes for e in found], "<u8").tobytes(),
            parts=np.array([e.parts for e in found], "<u8").tobytes(),
            leases=np.array([e.leases for e in found], "<u4").tobytes(),
            pins=np.array([e.pins for e in found], "<u4").tobytes(),
            age_ms=np.array([e.age_s * 1000 for e in found]).astype("<u8").tobytes(),
            children=np.array([e.children for e in found], "<u4").tobytes(),
        )

    def _keys(self, request: wire.Keys) -> Message:
        limit = min(request.limit or 1000, KEYS_MAX)
        keys, namespaces, cursor = self.domain.store.keys(
            self.session, request.namespace, request.cursor, limit
        )
        packed = np.array(namespaces, "<u4").tobytes()
        return wire.KeyPage(keys=keys, namespaces=packed, cursor=cursor)

    def _status(self, _: wire.Status) -> Message:
        report = self.service.status(self.domain)
        report["tenant"] = self.session.tenant
        return wire.StatusReport(json=json.dumps(report))


def _verdict(outcomes: list[Outcome]) -> wire.Verdict:
    return wire.Verdict(outcomes=bytes(outcomes))


def _items(packed: bytes) -> list[int] | None:
    if len(packed) % 4:
        raise InvalidError(f"{len(packed)} bytes of item numbers are no multiple of 4")
    return np.frombuffer(packed, "<u4").tolist() if packed else None


def _check_keys(keys: bytes) -> None:
    if len(keys) > 32 * KEYS_MAX:
        raise InvalidError(
            f"{len(keys) // 32} keys exceed the limit of {KEYS_MAX}; split the batch"
        )
