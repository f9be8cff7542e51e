"""Places to connect to. The daemon is one for all tests: each uses a namespace of its own."""

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvpool.client import Client, connect, connect_async
from tests.client.scripted import Connect, ScriptedDaemon
from tests.client.stores import CARRIERS, EVERY_CARRIER, Blocking, Place
from tests.store.daemons import RunningDaemon, running


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    flags = ("--tcp", "127.0.0.1:0", "--capacity", "128MiB", "--no-populate", "--headroom", "0")
    with running(tmp_path_factory.mktemp("d"), *flags) as started:
        yield started


def _place(request: pytest.FixtureRequest) -> Iterator[Place]:
    embedded = request.param.startswith("embedded")
    made = Place(request.param, None if embedded else request.getfixturevalue("daemon"))
    yield made
    made.close()


place = pytest.fixture(params=CARRIERS)(_place)
every_place = pytest.fixture(params=EVERY_CARRIER)(_place)


@pytest.fixture
def embedded() -> Iterator[Place]:
    made = Place("embedded")
    yield made
    made.close()


@pytest.fixture
def unix(daemon: RunningDaemon) -> Iterator[Place]:
    made = Place("unix", daemon)
    yield made
    made.close()


@pytest.fixture
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(tmp_path_factory.mktemp("s"))
    yield daemon
    daemon.reading.set()
    daemon.close()


@pytest.fixture(params=["blocking", "async"])
def dial(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects in both ways; everything is closed at the end."""
    loop = asyncio.new_event_loop()
    clients: list[Any] = []

    def to(address: str, **options: Any) -> Client:
        if request.param == "blocking":
            clients.append(connect(address, **options))
        else:
            clients.append(Blocking(connect_async(address, **options), loop))
        return cast(Client, clients[-1])

    yield to
    for client in clients:
        client.close()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
