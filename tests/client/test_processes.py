"""Engines in processes of their own, killed and stopped at the worst moment."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, Outcome, Session, connect
from kvpool.proto.errors import DeniedError, InvalidError
from tests.client.roles import NBYTES, check, payloads, space
from tests.client.samples import kv, namespace, prompt
from tests.store.daemons import RunningDaemon, eventually, running

CAPACITY = 32 << 20


class Engine:
    """A process that plays a role of `tests.client.roles`."""

    def __init__(self, role: str, address: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.client.roles", role, address, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def hear(self, word: str) -> list[Any]:
        """What the process says next, which must begin with `word`."""
        assert self.process.stdout is not None
        said, _, rest = self.process.stdout.readline().strip().partition(" ")
        assert said == word
        return list(ast.literal_eval(f"[{rest.replace('] [', '], [')}]"))

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


StartEngine = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[StartEngine]:
    """Starts engines; whatever is alive at the end is killed."""
    engines: list[Engine] = []

    def start(role: str, address: str, *arguments: object) -> Engine:
        engines.append(Engine(role, address, *arguments))
        return engines[-1]

    yield start
    for one in engines:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with room for about 30 chunks."""
    flags = ("--capacity", str(CAPACITY), "--headroom", "0", "--segment-bytes", "4MiB")
    with running(tmp_path_factory.mktemp("d"), *flags, "--tcp", "127.0.0.1:0") as started:
        yield started


@pytest.fixture
def client(small: RunningDaemon) -> Iterator[Client]:
    with connect(small.address) as made:
        made.clear()
        yield made


def leases(client: Client) -> int:
    return int(client.status()["domains"]["local"]["leases"])


def worker_of(daemon: RunningDaemon) -> int:
    """Process id of the only data worker."""
    pid = daemon.process.pid
    (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(worker)


def refill(session: Session, capacities: int, generation: int = 1) -> None:
    """Publishes, reads and checks chunks of `capacities` times the pool."""
    for seed in range(100, 100 + capacities * CAPACITY // NBYTES // 4):
        tokens = prompt(4, seed=seed)
        session.publish(tokens, payloads(session, tokens, generation))
        check(session, tokens)


@pytest.mark.parametrize("moment", ["reserved", "written"])
def test_what_a_killed_writer_left_can_be_written_again(
    small: RunningDaemon, client: Client, engine: StartEngine, moment: str
) -> None:
    session = client.open(space("killed writer"))
    writer = engine("writer", small.address, session.namespace.salt, 0, 30)
    assert writer.hear("reserved") == [[255, 255]]
    if moment == "written":
        writer.go_on()
        writer.hear("written")
    other = session.publish(prompt(2), payloads(session, prompt(2), 1))
    assert other.outcomes.tolist() == [Outcome.WRITING] * 2
    writer.kill()
    eventually(lambda: leases(client) == 0, "its space comes back")
    published = session.publish(prompt(2), payloads(session, prompt(2), 1))
    assert published.outcomes.tolist() == [Outcome.OK] * 2
    assert check(session, prompt(2)) == 2


def test_a_silent_writers_space_comes_back_by_time_alone(
    small: RunningDaemon, client: Client, engine: StartEngine
) -> None:
    session = client.open(space("silent writer"))
    writer = engine("writer", small.address, session.namespace.salt, 0, 0.3)
    writer.hear("reserved")
    eventually(
        lambda: (
            session.publish(prompt(2), payloads(session, prompt(2), 1)).outcomes.tolist()
            == [Outcome.OK] * 2
        ),
        "the same chunks can be written by somebody else",
    )
    writer.kill()


def test_late_bytes_of_a_stopped_writer_are_never_read(
    small: RunningDaemon, client: Client, engine: StartEngine
) -> None:
    """A time to live ends a right, never a mapping: what it may still write to is not reused."""
    session = client.open(space("stopped writer"))
    writer = engine("writer", small.address, session.namespace.salt, 0, 0.2)
    writer.hear("reserved")
    writer.signal(signal.SIGSTOP)
    time.sleep(0.5)
    refill(session, 2)
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            with connect(small.address) as mine:
                looking = mine.open(session.namespace)
                while not stop.is_set():
                    for seed in range(100, 116):
                        check(looking, prompt(4, seed=seed))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    writer.signal(signal.SIGCONT)
    writer.go_on()
    writer.hear("written")
    refill(session, 1, generation=2)
    writer.go_on()
    assert writer.hear("committed") == [[Outcome.EXPIRED] * 2]
    stop.set()
    thread.join()
    assert not errors, errors
    assert session.match(prompt(2)).chunks == 0
    writer.process.wait(10)
    eventually(lambda: leases(client) == 0, "its space comes back")
    refill(session, 1, generation=3)


def test_a_slow_pull_gets_its_own_bytes_whatever_is_evicted(
    small: RunningDaemon, client: Client, engine: StartEngine
) -> None:
    session = client.open(space("slow reader"))
    tokens = prompt(4, seed=7)
    assert session.publish(tokens, payloads(session, tokens, 41)).stored
    reader = engine("reader", small.address, session.namespace.salt, 7, 0.3)
    reader.hear("pulling")
    refill(session, 10)
    for _ in range(3):
        reader.hear("pulling")
    assert reader.hear("pulled") == [[Outcome.HIT] * 4, [41] * 4]


def test_a_killed_reader_gives_everything_back(
    small: RunningDaemon, client: Client, engine: StartEngine
) -> None:
    session = client.open(space("killed reader"))
    tokens = prompt(4, seed=7)
    session.publish(tokens, payloads(session, tokens, 1))
    reader = engine("reader", small.address, session.namespace.salt, 7, 30)
    reader.hear("pulling")
    assert leases(client) == 1
    reader.kill()
    eventually(lambda: leases(client) == 0, "its lease ends")
    assert check(session, tokens) == 4


def test_rivals_that_publish_one_key_agree_on_one_whole_version(
    small: RunningDaemon, client: Client, engine: StartEngine
) -> None:
    session = client.open(space("rivals"))
    rivals = [engine("rival", small.address, session.namespace.salt, n) for n in range(8)]
    for one in rivals:
        one.hear("ready")
    for one in rivals:
        one.go_on()
    outcomes = [outcome for one in rivals for outcome in one.hear("published")[0]]
    assert outcomes.count(Outcome.OK) == 2
    assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS, Outcome.WRITING, Outcome.NO_PARENT}
    eventually(lambda: leases(client) == 0, "nothing stays reserved")
    assert check(session, prompt(2)) == 2


def test_a_killed_data_worker_costs_misses_until_the_next_one_runs(
    small: RunningDaemon, client: Client
) -> None:
    with connect(small.ready["tcp"]) as remote:
        session = remote.open(space("killed worker"))
        tokens = prompt(2)
        assert session.publish(tokens, payloads(session, tokens, 1)).stored
        match = session.match(tokens)
        out = session.payload(2)
        assert session.pull(match, out).ok
        os.kill(worker_of(small), signal.SIGKILL)
        lost = session.pull(match, out)
        assert lost.outcomes.tolist() == [Outcome.UNREACHABLE] * 2 and lost.error
        match.release()

        def streamed() -> bool:
            """The next worker has another port, which only a new Welcome tells."""
            with session.match(tokens) as again:
                return again.chunks == 2 and session.pull(again, out).ok

        eventually(streamed, "bytes are streamed again")
        assert check(session, tokens) == 2


def test_a_stopped_data_worker_costs_a_deadline(small: RunningDaemon, client: Client) -> None:
    with connect(small.ready["tcp"]) as remote:
        session = remote.open(space("stopped worker"))
        tokens = prompt(2)
        assert session.publish(tokens, payloads(session, tokens, 1)).stored
        with session.match(tokens) as match:
            out = session.payload(2)
            worker = worker_of(small)
            os.kill(worker, signal.SIGSTOP)
            started = time.monotonic()
            late = session.pull(match, out, deadline_s=0.3)
            missed = session.publish(prompt(1, seed=1), [bytes(NBYTES)], deadline_s=0.3)
            assert time.monotonic() - started < 4
            os.kill(worker, signal.SIGCONT)
            assert late.outcomes.tolist() == [Outcome.UNREACHABLE] * 2 and late.error
            assert missed.outcomes.tolist() == [Outcome.UNREACHABLE]
            assert session.pull(match, out).ok
    eventually(lambda: leases(client) == 0, "nothing is held")


# ---- trust domains

TENANTS = """
[tenants.a]
token = "aaaaaaaaaaaaaaaaaaaa"
domain = "shared"
[tenants.b]
token = "bbbbbbbbbbbbbbbbbbbb"
domain = "shared"
map = false
[tenants.c]
token = "cccccccccccccccccccc"
domain = "apart"
[domains.shared]
capacity = "16MiB"
[domains.apart]
capacity = "16MiB"
"""


@pytest.fixture(scope="module")
def two_domains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("d")
    (folder / "tenants.toml").write_text(TENANTS)
    flags = ("--tenants", str(folder / "tenants.toml"), "--headroom", "0", "--no-populate")
    with running(folder, *flags) as started:
        yield started


def test_tenants_share_a_daemon_and_nothing_else(two_domains: RunningDaemon) -> None:
    one = namespace()
    clients = {name: connect(two_domains.address, token=name * 20) for name in "abc"}
    sessions = {name: client.open(one) for name, client in clients.items()}
    tokens = prompt(2)
    for seed, (name, session) in enumerate(sessions.items()):
        assert session.match(tokens).chunks == 0, name
        assert session.publish(tokens, list(kv(2, seed=seed))).stored
    for seed, (name, session) in enumerate(sessions.items()):
        with session.match(tokens) as match:
            out = np.zeros_like(kv(2))
            assert session.pull(match, out).ok, name
            assert np.array_equal(out, kv(2, seed=seed))
        assert clients[name].clear() == 2
    assert len({session.keys(tokens) for session in sessions.values()}) == 3
    for client in clients.values():
        client.close()


def test_a_lease_of_another_tenant_or_domain_is_worth_nothing(two_domains: RunningDaemon) -> None:
    one = namespace()
    with connect(two_domains.address, token="a" * 20) as mine:
        session = mine.open(one)
        session.publish(prompt(1), list(kv(1)))
        with session.match(prompt(1)) as match:
            for name in "bc":
                with connect(two_domains.address, token=name * 20) as theirs:
                    adopted = theirs.open(one).adopt(match.lease, match.keys)
                    assert adopted.chunks == 0 and adopted.outcome == Outcome.STALE_EPOCH
        mine.clear()


def test_who_may_not_map_gets_bytes_over_a_stream_and_no_descriptor(
    two_domains: RunningDaemon,
) -> None:
    with connect(two_domains.address, token="b" * 20) as client:
        session = client.open(namespace())
        assert session.publish(prompt(1), list(kv(1))).stored
        with session.match(prompt(1)) as match:
            with pytest.raises(InvalidError, match="pull instead"):
                session.borrow(match)
            connection = client.core.connection
            assert connection is not None and not connection.welcome.attach_address
            for writable in (False, True):
                with pytest.raises(DeniedError, match="may not map"):
                    client.run(connection.regions(0, writable=writable), None)
            assert session.pull(match, np.zeros_like(kv(1))).ok
        client.clear()


def test_a_wrong_token_is_refused(two_domains: RunningDaemon) -> None:
    for token in ("", "wrong"):
        with connect(two_domains.address, token=token) as client:
            with pytest.raises(DeniedError):
                client.open(namespace())
            with pytest.raises(DeniedError):
                client.status()
