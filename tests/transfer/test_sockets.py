"""Addresses are parsed strictly; listeners replace the dead and respect the living."""

import fcntl
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kvpool.proto.errors import DeadlineError, InvalidError, KvpoolError, UnreachableError
from kvpool.transfer.sockets import (
    TcpAddress,
    UnixAddress,
    address_of,
    close_listener,
    connect,
    listen,
    parse,
)

LONG = 20.0


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("unix:/run/kvpool.sock", UnixAddress("/run/kvpool.sock")),
        ("unix:relative", UnixAddress("relative")),
        ("tcp://localhost:1", TcpAddress("localhost", 1)),
        ("tcp://10.0.0.1:65535", TcpAddress("10.0.0.1", 65535)),
        ("tcp://[::1]:80", TcpAddress("::1", 80)),
    ],
)
def test_addresses_are_parsed(address: str, parsed: object) -> None:
    assert parse(address) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:" + "x" * 108,
        "/run/kvpool.sock",
        "tcp:localhost:1",
        "tcp://localhost",
        "tcp://:80",
        "tcp://localhost:",
        "tcp://localhost:65536",
        "tcp://localhost:-1",
        "tcp://localhost:²",
        "tcp://::1:80",
        "http://localhost:80",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidError):
        parse(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_tcp_listeners_are_reached_by_number_and_name(host: str) -> None:
    with listen(f"tcp://{host}:0") as listener:
        port = listener.getsockname()[1]
        with connect(f"tcp://{host}:{port}", LONG) as client:
            assert client.getpeername()[1] == port


def test_a_unix_listener_is_for_its_user_only(socket_folder: Path) -> None:
    listener = listen(f"unix:{socket_folder}/s")
    assert stat.S_IMODE(os.stat(socket_folder / "s").st_mode) == 0o600
    with connect(address_of(listener), LONG):
        pass
    close_listener(listener)
    assert list(socket_folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_live_listener_is_respected(socket_folder: Path, kind: str) -> None:
    listener = listen(f"unix:{socket_folder}/s" if kind == "unix" else "tcp://127.0.0.1:0")
    with listener:
        with pytest.raises(InvalidError, match="listens on"):
            listen(address_of(listener))
        with connect(address_of(listener), LONG):
            pass


def test_a_live_listener_with_a_full_backlog_is_respected(socket_folder: Path) -> None:
    path = str(socket_folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with connect(f"unix:{path}", LONG), pytest.raises(InvalidError, match="listens on"):
            listen(f"unix:{path}")


def test_the_socket_file_of_a_dead_listener_is_replaced(socket_folder: Path) -> None:
    address = f"unix:{socket_folder}/s"
    listen(address).close()
    assert (socket_folder / "s").exists()
    listener = listen(address)
    with connect(address, LONG):
        pass
    close_listener(listener)


def test_a_file_that_is_no_socket_is_left_alone(socket_folder: Path) -> None:
    file = socket_folder / "s"
    file.write_text("precious")
    with pytest.raises(InvalidError, match="no socket"):
        listen(f"unix:{file}")
    assert file.read_text() == "precious"


def test_of_many_that_start_at_once_exactly_one_listens(socket_folder: Path) -> None:
    address = f"unix:{socket_folder}/s"
    listen(address).close()
    outcomes: list[socket.socket | KvpoolError] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        try:
            outcomes.append(listen(address))
        except KvpoolError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [one for one in outcomes if isinstance(one, socket.socket)]
    assert len(outcomes) == 8
    assert len(winners) == 1
    with connect(address, LONG):
        pass
    close_listener(winners[0])


def test_nobody_takes_an_address_while_another_does(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.transfer.sockets.LISTEN_DEADLINE_S", 0.02)
    folder = os.open(socket_folder, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(UnreachableError, match="cannot listen"):
        listen(f"unix:{socket_folder}/s")
    os.close(folder)
    close_listener(listen(f"unix:{socket_folder}/s"))


def test_closing_leaves_the_file_of_a_successor(socket_folder: Path) -> None:
    address = f"unix:{socket_folder}/s"
    first = listen(address)
    os.unlink(socket_folder / "s")
    second = listen(address)
    close_listener(first)
    with connect(address, LONG):
        pass
    close_listener(second)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="nowhere"):
        listen("unix:/nowhere/at/all")


def test_nobody_there_is_unreachable(socket_folder: Path) -> None:
    with listen("tcp://127.0.0.1:0") as listener:
        address = address_of(listener)
    for dead in (address, f"unix:{socket_folder}/none"):
        with pytest.raises(UnreachableError, match="cannot reach"):
            connect(dead, LONG)


def test_no_time_left_is_a_deadline(socket_folder: Path) -> None:
    with pytest.raises(DeadlineError):
        connect(f"unix:{socket_folder}/none", 0)


def test_a_resolver_that_hangs_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait() and [])
    with pytest.raises(DeadlineError, match="not resolved"):
        connect("tcp://slow.example:1", 0.05)
    released.set()


FORK = """
    import os, sys
    from kvpool.proto.errors import UnreachableError
    from kvpool.transfer.sockets import close_listener, connect, listen
    address = sys.argv[1]
    listener = listen(address)
    ready, done = os.pipe(), os.pipe()
    if not os.fork():
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    listener.close()
    close_listener(listen(address))
    os.write(done[1], b"x")
    print("free")
    """


def test_a_fork_child_does_not_keep_an_address_alive(spawn: Any, socket_folder: Path) -> None:
    output, _ = spawn(FORK, f"unix:{socket_folder}/s").communicate(timeout=LONG)
    assert output == "free\n"
