"""The way that bytes take is chosen by what works, and shown with its reason."""

import logging
from pathlib import Path

import numpy as np
import pytest

from kvpool.client import Client, connect
from tests.client.samples import kv, namespace, prompt
from tests.store.daemons import running


def round_trip(client: Client) -> bool:
    """Publishes three chunks and pulls them; whether they came whole."""
    session = client.open(namespace())
    source = kv(3)
    published = session.publish(prompt(3), list(source))
    target = np.zeros_like(source)
    with session.match(prompt(3)) as match:
        pulled = session.pull(match, target)
    return published.stored and pulled.ok and np.array_equal(source, target)


def test_the_embedded_store_is_in_process() -> None:
    with connect(capacity=16 << 20) as client:
        assert client.route().name == "in-process"


def test_a_same_host_session_maps_and_a_tcp_session_streams(tmp_path: Path) -> None:
    with running(tmp_path, "--tcp", "127.0.0.1:0") as daemon:
        with connect(daemon.address) as client:
            assert round_trip(client)
            assert client.route().name == "shm"
        with connect(daemon.ready["tcp"]) as client:
            assert round_trip(client)
            route = client.route()
            assert route.name == "stream" and "may not map" in route.reason


def test_without_shared_memory_bytes_are_streamed_and_the_route_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As between two containers that share only the control socket."""
    with running(tmp_path, "--tcp", "127.0.0.1:0") as daemon, connect(daemon.address) as writer:
        session = writer.open(namespace())
        source = kv(3)
        assert session.publish(prompt(3), list(source)).stored
        Path(f"{daemon.socket}.fds").unlink()
        with connect(daemon.address) as client, caplog.at_level(logging.WARNING, "kvpool"):
            reader = client.open(session.namespace)
            target = np.zeros_like(source)
            with reader.match(prompt(3)) as match:
                assert reader.pull(match, target).ok  # at the first try, by the other way
            assert np.array_equal(source, target)
            assert round_trip(client)
            route = client.route()
            assert route.name == "stream" and "cannot be mapped" in route.reason
            assert len([r for r in caplog.records if "streamed" in r.message]) == 1


def test_without_shared_memory_and_without_a_stream_the_store_is_unreachable(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as daemon:
        Path(f"{daemon.socket}.fds").unlink()
        with connect(daemon.address) as client:
            session = client.open(namespace())
            published = session.publish(prompt(3), list(kv(3)))
            assert not published.stored and ".fds" in published.text
