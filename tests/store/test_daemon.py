"""Whole daemons: start, self-test, faults of clients, drain, death."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    InternalError,
    InvalidError,
    KvpoolError,
    UnreachableError,
)
from kvpool.proto.outcomes import Outcome
from kvpool.store.caller import hello
from kvpool.store.config import load
from kvpool.store.control import Control
from kvpool.store.daemon import Daemon, run, run_loop
from kvpool.store.embedded import embedded_service
from kvpool.store.loops import Loops
from kvpool.store.memory import AvailableMemory
from kvpool.store.ports import prepare_folder
from kvpool.store.tenants import load_tenants
from kvpool.transfer.sockets import connect
from kvpool.transfer.stream import Stream, dial
from tests.store.daemons import (
    DEADLINE_S,
    Chunks,
    Client,
    RunningDaemon,
    eventually,
    http_get,
    namespace,
    running,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon for all tests that leave it as they found it."""
    with running(tmp_path_factory.mktemp("d"), "--http", "127.0.0.1:0") as started:
        yield started


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")


def raw(daemon: RunningDaemon) -> socket.socket:
    return connect(daemon.address, 5.0)


def until_closed(sock: socket.socket, seconds: float = 5.0) -> bytes:
    sock.settimeout(seconds)
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def error_in(data: bytes) -> str:
    with pytest.raises(KvpoolError) as caught:
        protocol.parse_response(frames.FrameDecoder().feed(data)[-1])
    return str(caught.value)


# ---- start


def test_it_is_ready_only_after_a_publish_and_a_pull_through_itself(daemon: RunningDaemon) -> None:
    assert "self-test passed" in daemon.log.read_text()
    with Client(daemon.address) as client:
        status = client.status()
    requests = status["counters"]["requests"]
    assert {"reserve", "commit", "match", "delete"} <= requests.keys()
    local = status["domains"]["local"]
    assert local["ready"] == 32 << 20
    assert not local["namespaces"] and not local["counters"]["published_chunks"]


def start_here(
    folder: Path,
    settings: Mapping[str, str] | None = None,
    available_bytes: int = 1 << 30,
) -> None:
    """Runs a daemon inside this process, for those that must not start."""
    config = load(
        {"socket": str(folder / "k.sock"), "capacity": "32MiB", **(settings or {})}
    ).config

    def available(headroom: int) -> AvailableMemory:
        return AvailableMemory(available_bytes - headroom, "the test")

    def announce(_: Daemon) -> None:
        raise AssertionError("it became ready")

    async def main() -> None:
        await run(Daemon(config, load_tenants(config), available=available), announce)

    asyncio.run(main())


def test_it_does_not_become_ready_when_the_self_test_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise InternalError("self-test: bad bytes")

    monkeypatch.setattr("kvpool.store.selftest._pull", fails)
    with pytest.raises(InternalError, match="bad bytes"):
        start_here(folder)
    assert not list(folder.iterdir())


def test_its_sockets_are_private(daemon: RunningDaemon) -> None:
    for path in (daemon.socket, Path(f"{daemon.socket}.fds")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_it_makes_is_private(folder: Path) -> None:
    prepare_folder(folder / "new" / "er")
    assert stat.S_IMODE((folder / "new" / "er").stat().st_mode) == 0o700


def test_a_folder_where_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        start_here(folder)
    assert not list(folder.iterdir())


def test_a_symbolic_link_or_file_at_the_sockets_path_is_left_alone(folder: Path) -> None:
    (folder / "k.sock").symlink_to(folder / "elsewhere")
    with pytest.raises(InvalidError, match="no socket"):
        start_here(folder)
    assert (folder / "k.sock").is_symlink()


def test_a_second_daemon_on_the_same_socket_is_refused(daemon: RunningDaemon, folder: Path) -> None:
    with pytest.raises(InvalidError, match="somebody listens"):
        start_here(folder, {"socket": str(daemon.socket)})
    with Client(daemon.address) as client:
        client.status()


@pytest.mark.parametrize("key", ["http", "tcp"])
def test_a_second_daemon_on_the_same_port_is_refused(
    daemon: RunningDaemon, folder: Path, key: str
) -> None:
    port = daemon.ready["http"].rpartition(":")[2]
    with pytest.raises(InvalidError, match="somebody listens"):
        start_here(folder, {key: f"127.0.0.1:{port}"})
    assert not list(folder.iterdir())


def test_a_pool_beyond_the_available_memory_is_refused_with_figures(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        start_here(folder, {"headroom": "16MiB"}, 40 << 20)
    for figure in (32 << 20, 24 << 20, 16 << 20):
        assert str(figure) in str(caught.value)


def test_it_runs_on_asyncios_own_loop_without_uvloop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    kinds = []

    async def main() -> None:
        kinds.append(type(asyncio.get_running_loop()).__module__)

    run_loop(main())
    assert kinds[0].startswith("asyncio.") and "uvloop is not installed" in caplog.text


def test_a_pool_that_cannot_grow_is_degraded_but_serves(folder: Path) -> None:
    config = load({"socket": str(folder / "k.sock"), "capacity": "512MiB", "populate": False})
    looks = iter([1 << 30, 1 << 20])

    async def main() -> None:
        daemon = Daemon(
            config.config,
            load_tenants(config.config),
            available=lambda _: AvailableMemory(next(looks), "the test"),
        )
        try:
            await daemon.start()
            async with asyncio.timeout(DEADLINE_S):
                while daemon.service.state()[0] != "degraded":
                    await asyncio.sleep(0.001)
            [reason] = daemon.service.state()[1]
            assert f"stays at {256 << 20} of {512 << 20} bytes" in reason
        finally:
            await daemon.close()

    asyncio.run(main())


# ---- what clients do wrong


@pytest.mark.parametrize(
    ("garbage", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "TLS"),
        (b"\xff" * 64, "does not speak kvpool"),
        (b"\0\0\0\3abc", "no request"),
        (b"\0\0\0\2\x32\x00", "must be Hello"),
    ],
)
def test_bytes_of_another_protocol_end_the_connection_with_a_reason(
    daemon: RunningDaemon, garbage: bytes, text: str
) -> None:
    with raw(daemon) as sock:
        sock.sendall(garbage)
        assert text in error_in(until_closed(sock))
    with Client(daemon.address) as client:
        client.status()


def test_a_refused_hello_ends_the_connection(daemon: RunningDaemon) -> None:
    with raw(daemon) as sock:
        bad = wire.Hello(version_min=99, version_max=99)
        sock.sendall(protocol.request_frame(1, bad))
        [body] = frames.FrameDecoder().feed(until_closed(sock))
        _, answer = protocol.parse_response(body)
        assert isinstance(answer, wire.Error) and "99..99" in answer.text


def test_a_ping_is_answered_before_and_after_hello(daemon: RunningDaemon) -> None:
    with dial(daemon.address, 5.0) as stream:
        stream.ping(deadline=5.0)
    with Client(daemon.address) as client:
        client.stream.ping(deadline=5.0)


def test_pipelined_requests_are_answered_in_order(daemon: RunningDaemon) -> None:
    with raw(daemon) as sock:
        burst = protocol.request_frame(1, hello("", "test"))
        burst += b"".join(protocol.request_frame(i, wire.Status()) for i in range(2, 50))
        sock.sendall(burst)
        decoder, ids = frames.FrameDecoder(), list[int]()
        sock.settimeout(5.0)
        while len(ids) < 49:
            ids += [protocol.parse_response(body)[0] for body in decoder.feed(sock.recv(1 << 16))]
    assert ids == list(range(1, 50))


def test_a_client_that_has_mapped_keeps_what_it_holds_after_a_fault_until_it_closes(
    daemon: RunningDaemon,
) -> None:
    chunks = Chunks(namespace(), 2, seed=1)
    with Client(daemon.address) as admin:
        client = Client(daemon.address)
        client.publish(chunks)
        matched = client.match(client.open(chunks.space), chunks.packed)
        assert matched.hits == 2
        client.stream.sock.sendall(b"\xff" * 64)
        with pytest.raises(KvpoolError, match="does not speak kvpool"):
            protocol.parse_response(client.stream.receive(deadline=5.0))
        for _ in range(3):  # deaf, but it holds
            client.stream.sock.sendall(b"\xff" * 4096)
            assert admin.status()["domains"]["local"]["leases"] == 1
        client.close()
        eventually(lambda: not admin.status()["domains"]["local"]["leases"], "the lease ended")


def test_an_attach_token_is_needed_and_good_for_one_use(daemon: RunningDaemon) -> None:
    with Client(daemon.address) as client:
        attached = client.call(wire.Attach())
        assert isinstance(attached, wire.Attached)
        address = client.welcome.attach_address
    for token, first in ((attached.token, b"ok"), (attached.token, None), (b"guess", None)):
        with Stream(connect(address, 5.0), exact=True) as stream:
            stream.send(token, deadline=5.0)
            answer = stream.receive(deadline=5.0)
            if first:
                assert answer == first
                continue
            with pytest.raises(DeniedError):
                protocol.parse_response(answer)


def test_a_silent_client_of_the_descriptor_socket_does_not_keep_others_waiting(
    daemon: RunningDaemon,
) -> None:
    silent = [connect(f"{daemon.address}.fds", 5.0) for _ in range(4)]
    with Client(daemon.address) as client:
        started = time.monotonic()
        _, regions = client.attach(writable=False)
        assert time.monotonic() - started < 1.0
    for region in regions:
        region.close()
    for sock in silent:
        sock.close()


def test_a_frozen_client_does_not_keep_others_waiting(daemon: RunningDaemon, folder: Path) -> None:
    """It has asked much, reads nothing and holds leases."""
    source = (
        "import sys, time\n"
        "from kvpool.proto import session as protocol, wire_pb2 as wire\n"
        "from tests.store.daemons import *\n"
        "client = Client(sys.argv[1]); chunks = Chunks(namespace(), 4, seed=2)\n"
        "client.publish(chunks); client.match(client.open(chunks.space), chunks.packed)\n"
        "client.stream.sock.setblocking(False)\n"
        "frame = protocol.request_frame(9, wire.Status())\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    try: client.stream.sock.send(frame)\n"
        "    except BlockingIOError: print('full', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", source, daemon.address]
    path = os.pathsep.join(filter(None, sys.path))
    frozen = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert frozen.stdout is not None
        assert [frozen.stdout.readline() for _ in range(2)] == ["ready\n", "full\n"]
        frozen.send_signal(signal.SIGSTOP)
        with Client(daemon.address) as client:
            for _ in range(20):
                client.status()
    finally:
        frozen.kill()
        frozen.communicate()
    with Client(daemon.address) as client:
        eventually(lambda: not client.status()["domains"]["local"]["leases"], "its leases ended")


def on_a_loop(
    control: Control, folder: Path, client: Callable[[asyncio.StreamReader, Any], Any]
) -> None:
    """Runs `client(reader, writer)` against `control` alone, both on one event loop."""

    async def main() -> None:
        path = str(folder / "c.sock")
        server = await asyncio.get_running_loop().create_unix_server(control, path)
        reader, writer = await asyncio.open_unix_connection(path)
        async with asyncio.timeout(DEADLINE_S):
            await client(reader, writer)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_client_that_does_not_say_hello_in_time_is_told_and_closed(folder: Path) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.request_frame(1, hello("", "slow"))[:5])
        assert "no Hello within 0.05 s" in error_in(await reader.read())

    on_a_loop(Control(embedded_service(1 << 20), hello_deadline_s=0.05), folder, drip)


def test_a_client_beyond_the_limit_is_told_and_closed(folder: Path) -> None:
    async def come_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.PING)
        assert await reader.readexactly(4) == frames.PING
        path = str(folder / "c.sock")
        second, second_writer = await asyncio.open_unix_connection(path)
        assert "1 connections are open" in error_in(await second.read())
        second_writer.close()
        await second_writer.wait_closed()

    control = Control(embedded_service(1 << 20), connections_max=1)
    on_a_loop(control, folder, come_second)
    assert control.refused == 1


def test_a_flood_of_requests_from_one_client_leaves_room_for_the_loop(folder: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(protocol.request_frame(1, hello("", "flood")))
        writer.write(b"".join(protocol.request_frame(i, wire.Status()) for i in range(2, 1500)))
        turns, answered = 0, 0
        decoder = frames.FrameDecoder()
        while answered < 1499:
            answered += len(decoder.feed(await reader.read(1 << 16)))
            turns += 1
        assert turns > 10

    on_a_loop(Control(embedded_service(1 << 20)), folder, flood)


def test_the_service_catches_up_when_its_clients_pause(folder: Path) -> None:
    service = embedded_service(1 << 20)
    caught_up = asyncio.Event()
    service.catch_up = caught_up.set  # type: ignore[method-assign]

    async def ask_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            caught_up.clear()
            writer.write(frames.PING)
            assert await reader.readexactly(4) == frames.PING
            async with asyncio.timeout(DEADLINE_S):
                await caught_up.wait()

    on_a_loop(Control(service), folder, ask_twice)


def test_a_service_that_fails_to_catch_up_tries_again_after_the_next_answer(folder: Path) -> None:
    service = embedded_service(1 << 20)
    tries = asyncio.Queue[None]()

    def fail() -> None:
        tries.put_nowait(None)
        raise RuntimeError("a policy contradicts itself")

    service.catch_up = fail  # type: ignore[method-assign]

    async def ask_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        failures: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: failures.append(str(told["exception"])))
        for _ in range(2):
            writer.write(frames.PING)
            assert await reader.readexactly(4) == frames.PING
            async with asyncio.timeout(DEADLINE_S):
                await tries.get()
        assert failures == ["a policy contradicts itself"] * 2

    on_a_loop(Control(service), folder, ask_twice)


def test_a_background_loop_survives_its_failures_and_counts_them() -> None:
    runs: list[int] = []

    def action() -> None:
        runs.append(len(runs))
        if len(runs) <= 2:
            raise ValueError("injected")

    async def main() -> None:
        loops = Loops()
        loops.every("work", 0.001, action)
        async with asyncio.timeout(DEADLINE_S):
            while len(runs) < 4:
                await asyncio.sleep(0.001)
        assert loops.failures == {"work": 2}
        assert 0 <= loops.ages["work"] < 10
        await loops.close()

    asyncio.run(main())


# ---- HTTP


def test_health_is_ok_and_metrics_are_there(daemon: RunningDaemon) -> None:
    assert http_get(f"{daemon.ready['http']}/health") == (200, '{"status": "ok", "reasons": []}')
    code, text = http_get(f"{daemon.ready['http']}/metrics")
    assert code == 200 and 'kvpool_state{state="ok"} 1.0' in text


def test_the_event_loop_is_not_held_up_by_bulk_copies(daemon: RunningDaemon) -> None:
    """Clients copy by themselves; the daemon only decides."""
    chunks = Chunks(namespace(512 << 10), 8, seed=3)
    with Client(daemon.address) as client, Client(daemon.address) as other:
        bulk = threading.Thread(target=client.publish, args=(chunks,))
        bulk.start()
        gaps = []
        while bulk.is_alive():
            started = time.monotonic()
            other.stream.ping(deadline=5.0)
            gaps.append(time.monotonic() - started)
        bulk.join()
        assert other.status()["event_loop_lag_s"] < 0.5
    gaps.sort()
    assert gaps[len(gaps) * 99 // 100] < 0.05


# ---- end


def test_sigterm_ends_an_idle_daemon_at_once_and_removes_its_sockets(folder: Path) -> None:
    with running(folder) as daemon, Client(daemon.address):
        started = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started < 5.0
    assert not list(folder.glob("*.sock*"))


def test_sigterm_waits_for_leases_and_refuses_new_ones(folder: Path) -> None:
    chunks = Chunks(namespace(), 2)
    flags = ("--http", "127.0.0.1:0", "--drain-s", "20")
    with running(folder, *flags) as daemon, Client(daemon.address) as client:
        client.publish(chunks)
        space = client.open(chunks.space)
        matched = client.match(space, chunks.packed)
        daemon.signal(signal.SIGTERM)
        eventually(lambda: client.status()["draining"], "it drains")
        with pytest.raises(BusyError, match="draining"):
            client.match(space, chunks.packed)
        code, text = http_get(f"{daemon.ready['http']}/health")
        assert code == 503 and '"draining"' in text
        with pytest.raises(UnreachableError):
            Client(daemon.address)
        assert daemon.process.poll() is None
        client.call(wire.Release(leases=matched.lease))
        assert daemon.process.wait(5.0) == 0


def test_sigterm_waits_no_longer_than_told(folder: Path) -> None:
    chunks = Chunks(namespace(), 1)
    with running(folder, "--drain-s", "0.3") as daemon, Client(daemon.address) as client:
        client.publish(chunks)
        client.match(client.open(chunks.space), chunks.packed)
        started = time.monotonic()
        assert daemon.stop() == 0
        assert 0.3 < time.monotonic() - started < 5.0
        assert "although 1 leases are held" in daemon.log.read_text()


def test_a_killed_daemon_leaves_nothing_and_the_next_one_takes_its_place(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with running(folder) as first:
        client = Client(first.address)
        client.publish(Chunks(namespace(), 1))
        epoch = client.welcome.epoch
        first.kill()
        assert set(os.listdir("/dev/shm")) <= before
        with running(folder) as second, Client(second.address) as again:
            assert again.welcome.epoch != epoch
            space = again.open(namespace())
            assert not again.match(space, Chunks(namespace(), 1).packed).hits
        client.close()


def test_an_overdue_lease_ends_without_any_traffic(daemon: RunningDaemon) -> None:
    chunks = Chunks(namespace(), 1, seed=4)
    with Client(daemon.address) as client:
        client.publish(chunks)
        before = client.status()["domains"]["local"]["counters"]["expired_leases"]
        lease = client.match(client.open(chunks.space), chunks.packed, lease_ms=50).lease

        def local() -> dict[str, Any]:
            figures: dict[str, Any] = client.status()["domains"]["local"]
            return figures

        eventually(lambda: local()["counters"]["expired_leases"] > before, "the lease expired")
        assert local()["bytes"]["quarantined"] > 0
        verdict = client.call(wire.Touch(lease=lease))
        assert isinstance(verdict, wire.Verdict)
        assert verdict.outcomes == bytes([Outcome.EXPIRED])
        client.call(wire.Release(leases=lease))
        assert not local()["bytes"]["quarantined"]
