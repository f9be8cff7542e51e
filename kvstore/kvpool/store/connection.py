"""One client of a service: its requests in, responses out, no I/O."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BusyError,
    DeniedError,
    InternalError,
    InvalidError,
    KvpoolError,
    NamespaceError,
)
from kvpool.proto.namespace import Namespace
from kvpool.store.columns import (
    explained,
    items,
    key_page,
    loaded,
    matched,
    verdict,
)
from kvpool.store.hints import Told
from kvpool.store.records import KEYS_MAX
from kvpool.store.store import Store, StoreSession

if TYPE_CHECKING:
    from kvpool.store.service import Domain, Service

log = logging.getLogger("kvpool")

LEASE_BYTES = 16


class Connection:
    """One client's requests. `close` gives back all that it holds."""

    def __init__(self, service: Service, host: str | None) -> None:
        """`host` is the address under which a TCP client reached the daemon, None for others."""
        self.service = service
        self.host = host
        self.client = ""
        self.pid = 0
        self.attached = False
        """The client was told how to map the memory: it may be copying at any time."""
        self._domain: Domain | None = None
        self._opened: tuple[Store, StoreSession] | None = None
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
            "load": self._load,
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
    def store(self) -> Store:
        return self._session_of_store[0]

    @property
    def session(self) -> StoreSession:
        return self._session_of_store[1]

    @property
    def welcomed(self) -> bool:
        """Whether Hello was answered by a Welcome."""
        return self._opened is not None

    @property
    def _session_of_store(self) -> tuple[Store, StoreSession]:
        if self._opened is None:
            raise InvalidError("say Hello first")
        return self._opened

    def handle(self, request: wire.Request) -> Message | None:
        """The answer, an Error if it cannot be served; None if none is wanted (one-way)."""
        verb = request.WhichOneof("body") or "unknown"
        requests = self.service.counters.requests
        requests[verb] = requests.get(verb, 0) + 1
        try:
            if verb == "unknown":
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
        if self._opened is not None:
            store, session = self._opened
            self._opened = None
            store.close_session(session)

    def _refusal(self, error: KvpoolError) -> wire.Error:
        name = type(error).__name__
        errors = self.service.counters.errors
        errors[name] = errors.get(name, 0) + 1
        return protocol.error_body(error)

    # ---- connection and namespace

    def _hello(self, hello: wire.Hello) -> Message:
        version = protocol.common_version(hello.version_min, hello.version_max)
        local = self.host is None
        identity = self.service.identify(hello, local)
        domain = self.service.domains[identity.domain]
        self.client, self.pid = hello.client, hello.pid
        self._domain = domain
        session = domain.store.open_session(identity.tenant, mapped=identity.mapped)
        self._opened = (domain.store, session)
        return wire.Welcome(
            version=version,
            features=sorted(protocol.FEATURES.intersection(hello.features)),
            epoch=domain.store.epoch,
            instance=self.service.instance,
            tenant=identity.tenant,
            domain=domain.name,
            mapped=identity.mapped,
            attach_address=self.service.attach_address if identity.mapped else "",
            data_address=domain.data_address(self.host),
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
        known, warning = self.store.open_namespace(tenant, namespace)
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
            regions=self.store.regions,
        )

    # ---- reading

    def _match(self, request: wire.Match) -> Message:
        peek = request.peek
        if not peek:
            self._check_draining()
        store, session = self._session_of_store
        return matched(
            store.match(
                session,
                request.namespace,
                request.keys,
                request.parts,
                request.lease_ms / 1000,
                peek,
                request.prefill_tokens_s,
            )
        )

    def _adopt(self, request: wire.Adopt) -> Message:
        return matched(self.store.adopt(self.session, request.lease, request.parts))

    def _load(self, request: wire.Load) -> Message:
        lease, upto, parts, have = request.lease, request.upto, request.parts, request.have
        return loaded(self.store.load(self.session, lease, upto, parts, have))

    def _release(self, request: wire.Release) -> Message:
        store, session = self._session_of_store
        packed = request.leases
        leases = [packed[i : i + LEASE_BYTES] for i in range(0, len(packed), LEASE_BYTES)]
        return verdict([store.release(session, lease) for lease in leases])

    def _touch(self, request: wire.Touch) -> Message:
        ttl = request.lease_ms / 1000
        outcome = self.store.renew(self.session, request.lease, ttl)
        return wire.Verdict(outcomes=bytes([outcome]), lease_ms=request.lease_ms)

    # ---- writing

    def _reserve(self, request: wire.Reserve) -> Message:
        self._check_draining()
        if not self.session.mapped:  # it cannot fill an extent, and must not commit what is there
            raise DeniedError("this session maps no memory; publish by Store, see data_address")
        reservation = self.store.reserve(
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

    def _check_draining(self) -> None:
        if self.service.draining:
            raise BusyError("the daemon is draining: it stops when all leases are given back")

    def _commit(self, request: wire.Commit) -> Message:
        return verdict(self.store.commit(self.session, request.lease, items(request.items)))

    def _abort(self, request: wire.Abort) -> Message:
        return verdict([self.store.abort(self.session, request.lease, items(request.items))])

    def _stream_only(self, _: Message) -> Message:
        raise InvalidError("Fetch and Store belong on a data connection; see Welcome.data_address")

    # ---- the rest

    def _hint(self, request: wire.Hint) -> Message:
        told = Told(
            will_continue=_said(request, "will_continue"),
            gap_s=_said(request, "gap_s"),
            ttl_s=request.ttl_ms / 1000,
            ended=request.ended,
            stop_reason=request.stop_reason,
            priority=request.priority,
        )
        return verdict(self.store.hint(self.session, request.namespace, request.keys, told))

    def _pin(self, request: wire.Pin) -> Message:
        if request.unpin:
            return verdict([self.store.unpin(self.session, request.namespace, request.keys)])
        ttl = request.ttl_ms / 1000
        return verdict(self.store.pin(self.session, request.namespace, request.keys, ttl))

    def _delete(self, request: wire.Delete) -> Message:
        session, corrupt = self.session, request.quarantine
        return verdict(self.store.delete(session, request.namespace, request.keys, corrupt=corrupt))

    def _clear(self, request: wire.Clear) -> Message:
        return wire.Count(count=self.store.clear(self.session, request.namespace))

    def _explain(self, request: wire.Explain) -> Message:
        found = self.store.explain(self.session, request.namespace, request.keys)
        return explained(found)

    def _keys(self, request: wire.Keys) -> Message:
        limit = min(request.limit or 1000, KEYS_MAX)
        keys, namespaces, cursor = self.store.keys(
            self.session, request.namespace, request.cursor, limit
        )
        return key_page(keys, namespaces, cursor)

    def _status(self, _: wire.Status) -> Message:
        report = self.service.status(self.domain, self.session.tenant)
        return wire.StatusReport(json=json.dumps(report))


def _said(hint: wire.Hint, name: str) -> float | None:
    value: float = getattr(hint, name)
    return None if not hint.HasField(name) or value < 0 else value
