"""Places to connect to. The daemon is one for all tests: each uses a namespace of its own."""

from collections.abc import Iterator

import pytest

from tests.client.stores import CARRIERS, EVERY_CARRIER, Place
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
