"""Bytes over a stream: Fetch and Store through real data workers of a real daemon."""

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.chunk import extent_bytes, prologue_bytes, read_prologue
from kvpool.proto.errors import (
    DeniedError,
    InvalidError,
    KvpoolError,
    ProtocolError,
    StaleError,
    UnreachableError,
)
from kvpool.proto.outcomes import Outcome
from kvpool.store.caller import Caller
from kvpool.store.poolmap import PoolMap
from kvpool.transfer.copying import Bytes
from kvpool.transfer.stream import dial
from tests.store.daemons import Chunks, Client, RunningDaemon, eventually, namespace, running

TOKENS = {name: name * 32 for name in "abc"}
TENANTS = f"""
[tenants.a]
token = "{TOKENS["a"]}"
domain = "shared"
[tenants.b]
token = "{TOKENS["b"]}"
domain = "shared"
map = false
[tenants.c]
token = "{TOKENS["c"]}"
domain = "apart"
map = false
[domains.shared]
capacity = "128MiB"
[domains.apart]
capacity = "16MiB"
"""
OK, HIT, MISS = (bytes([outcome]) for outcome in (Outcome.OK, Outcome.HIT, Outcome.MISS))
EXISTS, INVALID = (bytes([outcome]) for outcome in (Outcome.EXISTS, Outcome.INVALID))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("d")
    (folder / "tenants.toml").write_text(TENANTS)
    flags = ("--tcp", "127.0.0.1:0", "--tenants", str(folder / "tenants.toml"), "--lease-s", "2")
    with running(folder, *flags) as started:
        yield started


class Remote(Client):
    """A client of another machine: a control connection, and one to the data worker."""

    def __init__(self, daemon: RunningDaemon, tenant: str, address: str = "") -> None:
        super().__init__(address or daemon.ready["tcp"], TOKENS[tenant])
        self.data = Client(self.welcome.data_address, TOKENS[tenant])

    def close(self) -> None:
        self.data.close()
        super().close()

    def store(self, chunks: Chunks, items: Sequence[Bytes] | None = None, **more: Any) -> bytes:
        """Returns the outcomes."""
        items = chunks.items if items is None else items
        body = wire.Store(
            namespace=self.open(chunks.space),
            keys=chunks.packed,
            **{"nbytes": sum(item.size for item in items), **more},
        )
        verdict = self.data.receive(self.data.send(body, items))
        assert isinstance(verdict, wire.Verdict)
        return verdict.outcomes

    def fetch(self, **fields: Any) -> tuple[wire.Fetched, Bytes, bytes]:
        """(answer, raw bytes, outcomes)."""
        request_id = self.data.send(wire.Fetch(**fields))
        fetched = self.data.receive(request_id)
        assert isinstance(fetched, wire.Fetched)
        pulled = np.empty(fetched.nbytes, np.uint8)
        self.data.receive_into([pulled])
        verdict = self.data.receive(request_id)
        assert isinstance(verdict, wire.Verdict)
        return fetched, pulled, verdict.outcomes

    def held(self) -> tuple[int, int]:
        """(leases, bytes being written) of the domain."""
        [figures] = self.status()["domains"].values()
        return figures["leases"], figures["bytes"]["writing"]

    def expect_idle(self) -> None:
        """Nothing stays held; a worker gives back after its last word."""
        eventually(lambda: self.held() == (0, 0), "everything was given back")


@pytest.fixture
def remote(daemon: RunningDaemon) -> Iterator[Remote]:
    with Remote(daemon, "a") as client:
        yield client


def payloads(chunks: Chunks, pulled: Bytes) -> list[bytes]:
    """The payloads among whole extents, after a check of each header."""
    found, at = [], 0
    for key in chunks.keys:
        for number, part in enumerate(chunks.space.parts):
            extent = pulled[at : at + extent_bytes(part)]
            at += extent.size
            sums = read_prologue(
                extent,
                namespace=chunks.digest,
                key=key,
                part=number,
                generation=None,
                nbytes=part.nbytes,
                layout_id=chunks.space.layout_id,
                planes=len(part.planes),
            )
            assert not isinstance(sums, str), sums
            found.append(extent[prologue_bytes(part) :].tobytes())
    assert at == pulled.size
    return found


def test_what_is_stored_over_a_stream_is_fetched_over_a_stream(remote: Remote) -> None:
    chunks = Chunks(namespace(parts=2), 3, "a", seed=1)
    assert remote.store(chunks) == OK * 6
    fetched, pulled, outcomes = remote.fetch(
        namespace=remote.open(chunks.space), keys=chunks.packed
    )
    assert (fetched.hits, outcomes) == (3, HIT * 6)
    assert payloads(chunks, pulled) == [chunks.payload(i, j) for i in range(3) for j in range(2)]
    remote.expect_idle()


def test_a_remote_client_gets_no_memory_and_a_mapped_one_reads_what_it_stored(
    daemon: RunningDaemon, remote: Remote
) -> None:
    assert not remote.welcome.mapped and not remote.welcome.attach_address
    assert not remote.data.welcome.mapped and not remote.data.welcome.attach_address
    assert remote.welcome.data_address.startswith("tcp://127.0.0.1:")
    chunks = Chunks(namespace(), 1, "a", seed=2)
    assert remote.store(chunks) == OK
    with Client(daemon.address, TOKENS["a"]) as local:
        matched = local.match(local.open(chunks.space), chunks.packed)
        address, generation = np.frombuffer(matched.extents, "<i8").tolist()
        region_bytes, regions = local.attach(writable=False)
        region, offset = divmod(address, region_bytes)
        view = regions[region].view(offset, chunks.extent_bytes)
        part = chunks.space.parts[0]
        sums = read_prologue(
            view,
            namespace=chunks.digest,
            key=chunks.keys[0],
            part=0,
            generation=generation,  # the worker has stamped it
            nbytes=part.nbytes,
            layout_id=chunks.space.layout_id,
            planes=2,
        )
        assert isinstance(sums, np.ndarray)
        assert view[prologue_bytes(part) :].tobytes() == chunks.payload(0)
        del view
        for one in regions:
            one.close()


def test_a_lease_of_the_control_connection_is_pulled_in_parts(remote: Remote) -> None:
    chunks = Chunks(namespace(parts=2), 4, "a", seed=3)
    remote.store(chunks)
    space = remote.open(chunks.space)
    lease = remote.match(space, chunks.packed).lease
    fetched, pulled, outcomes = remote.fetch(namespace=space, lease=lease, parts=2, first=1, last=3)
    assert (fetched.hits, outcomes) == (4, HIT * 2)
    half = pulled.size // 2
    at = prologue_bytes(chunks.space.parts[1])
    assert [pulled[at:half].tobytes(), pulled[half + at :].tobytes()] == [
        chunks.payload(1, 1),
        chunks.payload(2, 1),
    ]
    remote.call(wire.Release(leases=lease))
    remote.expect_idle()


def test_ranges_come_behind_the_prologue_of_each_item(remote: Remote) -> None:
    chunks = Chunks(namespace(), 2, "a", seed=4)
    remote.store(chunks)
    head = prologue_bytes(chunks.space.parts[0])
    ranges = np.array([(head + 4096, 100), (head, 7)], "<u8").tobytes()
    _, pulled, outcomes = remote.fetch(
        namespace=remote.open(chunks.space), keys=chunks.packed, ranges=ranges
    )
    assert outcomes == HIT * 2 and pulled.size == 2 * (head + 107)
    for i, item in enumerate(np.split(pulled, 2)):
        payload = chunks.payload(i)
        assert item[head:].tobytes() == payload[4096:4196] + payload[:7]


def test_a_miss_is_told_with_its_reason_and_without_bytes(remote: Remote) -> None:
    chunks = Chunks(namespace(), 2, "a", seed=5)
    fetched, pulled, outcomes = remote.fetch(
        namespace=remote.open(chunks.space), keys=chunks.packed
    )
    assert (fetched.hits, fetched.miss_outcome, pulled.size, outcomes) == (0, MISS[0], 0, b"")


def test_what_is_there_already_is_skipped_and_the_rest_is_stored(remote: Remote) -> None:
    chunks = Chunks(namespace(), 3, "a", seed=6)
    first = Chunks(namespace(), 1, "a", seed=6)
    assert remote.store(first) == OK
    assert remote.store(chunks) == EXISTS + OK * 2
    assert remote.store(chunks) == EXISTS * 3


def test_an_item_with_a_foreign_header_is_refused_and_stays_invisible(remote: Remote) -> None:
    chunks, other = Chunks(namespace(), 3, "a", seed=7), Chunks(namespace(), 3, "a", seed=8)
    items = [chunks.items[0], other.items[1], chunks.items[2]]
    assert remote.store(chunks, items) == OK + INVALID + bytes([Outcome.NO_PARENT])
    remote.expect_idle()
    assert remote.match(remote.open(chunks.space), chunks.packed).hits == 1


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"namespace": 999}, DeniedError),
        ({"parts": 0b100}, InvalidError),
        ({"keys": b"short"}, InvalidError),
        ({"keys": b"k" * 64}, InvalidError),
        ({"parent": b"p" * 32, "nbytes": 17}, InvalidError),
    ],
)
def test_a_store_that_cannot_be_meant_is_an_error_and_the_connection_stays_usable(
    remote: Remote, fields: dict[str, Any], kind: type[KvpoolError]
) -> None:
    chunks = Chunks(namespace(), 1, "a", seed=9)
    body = {"namespace": remote.open(chunks.space), "keys": chunks.packed, "nbytes": 5_000_000}
    junk = np.ones(fields.get("nbytes", 5_000_000), np.uint8)
    with pytest.raises(kind):
        remote.data.receive(remote.data.send(wire.Store(**{**body, **fields}), [junk]))
    remote.data.stream.ping(deadline=5.0)
    remote.expect_idle()


def test_a_fetch_beyond_the_extent_is_refused(remote: Remote) -> None:
    chunks = Chunks(namespace(), 1, "a", seed=10)
    remote.store(chunks)
    for pair in ((chunks.extent_bytes, 1), (0, 1 << 63), (1 << 63, 1 << 63)):
        with pytest.raises(InvalidError, match="leave an extent"):
            remote.fetch(
                namespace=remote.open(chunks.space),
                keys=chunks.packed,
                ranges=np.array(pair, "<u8").tobytes(),
            )


def test_a_lease_of_another_namespace_yields_none_of_its_neighbours_bytes(remote: Remote) -> None:
    """The client names a namespace with larger extents than those that its lease is of."""
    small, large = Chunks(namespace(), 1, "a", seed=11), namespace(1 << 20)
    remote.store(small)
    lease = remote.match(remote.open(small.space), small.packed).lease
    _, pulled, outcomes = remote.fetch(namespace=remote.open(large), lease=lease)
    assert outcomes == bytes([Outcome.CORRUPT]) and not pulled.any()
    remote.call(wire.Release(leases=lease))


@pytest.mark.parametrize("token", ["", "wrong", TOKENS["c"]])
def test_a_token_that_is_wrong_or_of_another_domain_is_denied(remote: Remote, token: str) -> None:
    with pytest.raises(DeniedError):
        Client(remote.welcome.data_address, token)


def test_a_tenant_without_the_right_to_map_uses_the_stream_on_the_same_host(
    daemon: RunningDaemon,
) -> None:
    chunks = Chunks(namespace(), 2, "b", seed=12)
    with Remote(daemon, "b", daemon.address) as client:
        assert client.welcome.data_address == f"{daemon.address}.data-shared"
        assert client.store(chunks) == OK * 2
        space = client.open(chunks.space)
        assert client.fetch(namespace=space, keys=chunks.packed)[2] == HIT * 2
    with Remote(daemon, "a") as other:  # same tokens, other tenant: other keys, none of them there
        theirs = Chunks(namespace(), 2, "a", seed=12)
        assert not other.match(other.open(theirs.space), theirs.packed).hits
    with Remote(daemon, "c", daemon.address) as apart:
        assert apart.welcome.data_address == f"{daemon.address}.data-apart"


def test_a_stranger_cannot_make_a_worker_hold_a_large_first_frame(remote: Remote) -> None:
    with dial(remote.welcome.data_address, 5.0) as stranger:
        stranger.send(bytes(protocol.HELLO_MAX + 1), deadline=5.0)
        with pytest.raises((ProtocolError, UnreachableError)):
            protocol.parse_response(stranger.receive(deadline=5.0))


def test_a_data_connection_serves_nothing_else(remote: Remote) -> None:
    with pytest.raises(InvalidError, match="only Fetch and Store"):
        remote.data.call(wire.Status())
    with socket.create_connection(("127.0.0.1", _port(remote)), timeout=5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(4096) == b""


def _port(remote: Remote) -> int:
    return int(remote.welcome.data_address.rpartition(":")[2])


def test_a_store_that_is_cut_leaves_nothing(daemon: RunningDaemon, remote: Remote) -> None:
    chunks = Chunks(namespace(1 << 20), 3, "a", seed=13)
    space = remote.open(chunks.space)
    store = wire.Store(namespace=space, keys=chunks.packed, nbytes=3 * chunks.extent_bytes)
    frame = protocol.request_body(7, store)
    items = chunks.items
    remote.data.stream.send(frame, [items[0], items[1][:100_000]], deadline=5.0)
    eventually(lambda: remote.held() == (1, 3 * chunks.extent_bytes), "it is being written")
    remote.data.close()
    remote.expect_idle()
    assert not remote.match(space, chunks.packed).hits
    with Remote(daemon, "a") as again:
        assert again.store(chunks) == OK * 3


def test_a_fetch_that_is_cut_gives_its_lease_back(remote: Remote) -> None:
    chunks = Chunks(namespace(4 << 20), 3, "a", seed=14)
    remote.store(chunks)
    remote.data.send(wire.Fetch(namespace=remote.open(chunks.space), keys=chunks.packed))
    eventually(lambda: remote.held()[0] == 1, "it is being sent")
    remote.data.close()
    remote.expect_idle()


def test_what_is_sent_after_the_lease_has_expired_is_right_and_called_so(remote: Remote) -> None:
    chunks = Chunks(namespace(4 << 20), 5, "a", seed=15)
    for i in range(5):  # one by one: the upload is not what is tested
        part = Chunks(namespace(4 << 20), i + 1, "a", seed=15)
        part.packed, part.keys = chunks.keys[i], [chunks.keys[i]]
        parent = chunks.keys[i - 1] if i else b""
        assert remote.store(part, [chunks.extent(i)], parent=parent) == OK
    space = remote.open(chunks.space)
    lease = remote.match(space, chunks.packed, lease_ms=200).lease
    request_id = remote.data.send(wire.Fetch(namespace=space, lease=lease))
    expired = _counter(remote, "expired_leases")
    eventually(lambda: _counter(remote, "expired_leases") > expired, "the lease expired")
    fetched = remote.data.receive(request_id)
    assert isinstance(fetched, wire.Fetched)
    pulled = np.empty(fetched.nbytes, np.uint8)
    remote.data.receive_into([pulled])
    verdict = remote.data.receive(request_id)
    assert isinstance(verdict, wire.Verdict)
    assert verdict.outcomes.strip(HIT) == bytes([Outcome.EXPIRED]) * verdict.outcomes.count(
        bytes([Outcome.EXPIRED])
    )
    assert verdict.outcomes[-1] == Outcome.EXPIRED
    assert payloads(chunks, pulled) == [chunks.payload(i) for i in range(5)]


def _counter(remote: Remote, name: str) -> int:
    [figures] = remote.status()["domains"].values()
    return int(figures["counters"][name])


def test_a_steady_upload_that_takes_longer_than_its_lease_succeeds(remote: Remote) -> None:
    chunks = Chunks(namespace(), 6, "a", seed=16)
    store = wire.Store(
        namespace=remote.open(chunks.space), keys=chunks.packed, nbytes=6 * chunks.extent_bytes
    )
    request_id = remote.data.send(store)
    started = time.monotonic()
    for item in chunks.items:
        remote.data.stream.send_buffers([item], deadline=5.0)
        time.sleep(0.45)  # the pace of a slow link; the lease is 2 s
    verdict = remote.data.receive(request_id)
    assert time.monotonic() - started > 2.2
    assert isinstance(verdict, wire.Verdict) and verdict.outcomes == OK * 6


def _workers(remote: Remote) -> dict[str, int]:
    pids: dict[str, int] = remote.status()["worker_pids"]
    return pids


def test_a_worker_that_dies_is_started_again(daemon: RunningDaemon) -> None:
    chunks = Chunks(namespace(), 1, "a", seed=17)
    with Remote(daemon, "a") as before:
        before.store(chunks)
        name = "data worker shared/0"
        pid = _workers(before)[name]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: _workers(before).get(name, pid) != pid, "another worker runs")
        with pytest.raises(UnreachableError):
            before.data.stream.ping(deadline=5.0)
        assert before.status()["worker_restarts"] == 1
    with Remote(daemon, "a") as after:
        space = after.open(chunks.space)
        assert after.fetch(namespace=space, keys=chunks.packed)[2] == HIT
        after.expect_idle()


class GrowingPool:
    """Stands in for the daemon: the pool has one region more each time that it is attached."""

    def __init__(self) -> None:
        self.attached = 0
        self.closed: list[int] = []

    def attach(self, *, writable: bool) -> tuple[int, list[Any]]:
        assert writable
        self.attached += 1
        return 4096, [self.Mapped(self, number) for number in range(self.attached)]

    class Mapped:
        def __init__(self, pool: "GrowingPool", number: int) -> None:
            self.pool, self.number = pool, number

        def view(self) -> Bytes:
            return np.full(4096, self.number, np.uint8)

        def close(self) -> None:
            self.pool.closed.append(self.number)


def test_a_worker_maps_what_has_grown_since_and_keeps_what_it_had() -> None:
    daemon = GrowingPool()
    pool = PoolMap(cast(Caller, daemon))
    before = pool.view(4000, 96)
    assert pool.view(4096 + 10, 20).tolist() == [1] * 20
    assert (daemon.attached, daemon.closed) == (2, [0])
    assert np.shares_memory(pool.view(4000, 96), before)
    with pytest.raises(StaleError, match="leaves its region"):
        pool.view(4000, 97)
    with pytest.raises(StaleError, match="region 9"):
        pool.view(9 * 4096, 1)


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_workers_end_with_a_daemon_that_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--tcp", "127.0.0.1:0", "--data-workers", "2")
    with running(tmp_path_factory.mktemp("d"), *flags) as daemon:
        with Client(daemon.address) as client:
            pids = list(client.status()["worker_pids"].values())
            remotes = [Client(daemon.ready["tcp"]) for _ in range(2)]
        assert len({one.welcome.data_address for one in remotes}) == 2
        for one in remotes:
            one.close()
        assert len(pids) == 2 and all(map(_is_alive, pids))
        daemon.kill()
        eventually(lambda: not any(map(_is_alive, pids)), "the workers are gone")
