"""The daemon's proof before it calls itself ready: a real publish and pull through itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.chunk import extent_bytes, plane_sums, prologue_bytes, sum_seed, write_prologue
from kvpool.proto.errors import InternalError
from kvpool.proto.keys import chain_keys
from kvpool.proto.layout import native
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.store.caller import Caller, hello
from kvpool.transfer.copying import Bytes

TOKENS = 16
_PART = native("self", layers=("0", "1"), nbytes=1024)
_NAMESPACE = Namespace(
    model="self-test",
    revision="1",
    kv_dtype="uint8",
    kv_scales="none",
    layout="native:self-test",
    chunk_tokens=TOKENS,
    parts=(_PART,),
    key_scheme="tokens",
    adapter="none",
    rope="none",
    salt="none",
)


def self_test(address: str, secret: bytes, data_addresses: Sequence[str] = ()) -> float:
    """Publishes and pulls one chunk through the daemon at `address`, by shared memory and through
    each data worker; returns the seconds it took.

    `secret` is that of the domain. Blocks; raises `InternalError` or what went wrong on the way.
    """
    started = time.monotonic()
    token = secret.hex()
    with Caller(address, hello(token, "self-test", worker=secret)) as daemon:
        space, key, extent = _prepare(daemon)
        region_bytes, regions = daemon.attach(writable=True)
        views = [region.view() for region in regions]
        try:
            _publish(daemon, space, key, extent, region_bytes, views)
            _pull(daemon, space, key, extent, region_bytes, views)
        finally:
            for region in regions:
                region.close()
        _delete(daemon, space, key)
        for data_address in data_addresses:
            with Caller(data_address, hello(token, "self-test")) as worker:
                _stream(worker, space, key, extent)
            _delete(daemon, space, key)
    return time.monotonic() - started


def prepare_chunk(tenant: str, namespace: Namespace = _NAMESPACE) -> tuple[bytes, Bytes]:
    """(key, extent) of the test's only chunk."""
    digest = namespace.digest(tenant)
    key = chain_keys(digest, list(range(TOKENS)), TOKENS)
    extent = np.zeros(extent_bytes(_PART), np.uint8)
    payload = extent[prologue_bytes(_PART) :]
    payload[:] = np.frombuffer(hashlib.shake_256(key).digest(payload.size), np.uint8)
    write_prologue(
        extent,
        namespace=digest,
        key=key,
        part=0,
        generation=0,
        nbytes=_PART.nbytes,
        layout_id=namespace.layout_id,
        sums=plane_sums(payload, _PART.offsets(), sum_seed(key, 0)),
        planes=len(_PART.planes),
    )
    return key, extent


def _prepare(daemon: Caller) -> tuple[int, bytes, Bytes]:
    tenant = daemon.welcome.tenant
    record = wire.Open(namespace=_NAMESPACE.to_record(), digest=_NAMESPACE.digest(tenant))
    opened = daemon.call(record)
    assert isinstance(opened, wire.Opened)
    return opened.namespace, *prepare_chunk(tenant)


def _publish(
    daemon: Caller, space: int, key: bytes, extent: Bytes, region_bytes: int, views: list[Bytes]
) -> None:
    reserved = daemon.call(wire.Reserve(namespace=space, keys=key))
    assert isinstance(reserved, wire.Reserved)
    _expect("reserve", reserved.outcomes, Outcome.OK, reserved.text)
    _extent(reserved.extents, region_bytes, views, extent.size)[:] = extent
    committed = daemon.call(wire.Commit(lease=reserved.lease))
    assert isinstance(committed, wire.Verdict)
    _expect("commit", committed.outcomes, Outcome.OK, committed.text)


def _pull(
    daemon: Caller, space: int, key: bytes, extent: Bytes, region_bytes: int, views: list[Bytes]
) -> None:
    matched = daemon.call(wire.Match(namespace=space, keys=key))
    assert isinstance(matched, wire.Matched)
    _expect("match", bytes([matched.miss_outcome]), Outcome.HIT, f"{matched.hits} hits")
    if not np.array_equal(_extent(matched.extents, region_bytes, views, extent.size), extent):
        raise InternalError("self-test: the bytes that were pulled are not those published")
    daemon.notify(wire.Release(leases=matched.lease))


def _stream(worker: Caller, space: int, key: bytes, extent: Bytes) -> None:
    store = wire.Store(namespace=space, keys=key, nbytes=extent.size)
    stored = worker.receive(worker.send(store, [extent]))
    assert isinstance(stored, wire.Verdict)
    _expect("store", stored.outcomes, Outcome.OK, stored.text)
    request_id = worker.send(wire.Fetch(namespace=space, keys=key))
    fetched = worker.receive(request_id)
    assert isinstance(fetched, wire.Fetched)
    pulled = np.empty(fetched.nbytes, np.uint8)
    worker.receive_into([pulled])
    verdict = worker.receive(request_id)
    assert isinstance(verdict, wire.Verdict)
    _expect("fetch", verdict.outcomes, Outcome.HIT, verdict.text)
    at = prologue_bytes(_PART)
    if not np.array_equal(pulled[at:], extent[at:]):
        raise InternalError("self-test: the bytes that were fetched are not those stored")


def _delete(daemon: Caller, space: int, key: bytes) -> None:
    deleted = daemon.call(wire.Delete(namespace=space, keys=key))
    assert isinstance(deleted, wire.Verdict)
    _expect("delete", deleted.outcomes, Outcome.OK, deleted.text)


def _extent(packed: bytes, region_bytes: int, views: list[Bytes], nbytes: int) -> Bytes:
    address = int(np.frombuffer(packed, "<i8")[0])
    region, offset = divmod(address, region_bytes)
    return views[region][offset : offset + nbytes]


def _expect(step: str, outcomes: bytes, wanted: Outcome, text: str) -> None:
    if outcomes != bytes([wanted]):
        names = ", ".join(Outcome(outcome).name for outcome in outcomes)
        raise InternalError(f"self-test: {step} gave {names or 'nothing'} {text}")
