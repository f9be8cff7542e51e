"""A daemon that is stopped, killed and started again, under clients that go on."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, Outcome, Session, connect, connect_async
from kvpool.client.extents import PartFormat
from kvpool.proto.errors import UnreachableError
from tests.client.samples import kv, namespace, opaque, prompt
from tests.store.daemons import RunningDaemon, eventually

DEADLINE_S = 0.4
SOON_S = 2.0
FLAGS = ("--tcp", "127.0.0.1:0", "--no-populate", "--headroom", "0")


class Life:
    """A daemon that can be started again on the same socket, and on the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = RunningDaemon(folder, *FLAGS)
        self.tcp = str(self.daemon.ready["tcp"])

    def again(self) -> None:
        flags = ("--tcp", self.tcp.removeprefix("tcp://"), *FLAGS[2:])
        self.daemon.close()
        self.daemon = RunningDaemon(self.folder, *flags)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    made = Life(tmp_path_factory.mktemp("d"))
    yield made
    made.daemon.close()


def bounded(call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    result = call()
    assert time.monotonic() - started < SOON_S
    return result


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_every_call_of_a_stopped_daemon_ends_with_its_deadline(life: Life, carrier: str) -> None:
    address = life.daemon.address if carrier == "unix" else life.tcp
    tokens, stored = prompt(1), kv(1)
    with connect(address, deadline_s=DEADLINE_S) as client, connect(address) as fresh:
        session = client.open(namespace())
        assert session.publish(tokens, list(stored), deadline_s=5).stored
        match = session.match(tokens)
        life.daemon.signal(signal.SIGSTOP)
        try:
            assert bounded(lambda: session.match(tokens)).outcome == Outcome.UNREACHABLE
            missed = bounded(lambda: session.publish(prompt(1, seed=1), list(stored)))
            assert missed.outcomes.tolist() == [Outcome.UNREACHABLE]
            assert bounded(lambda: session.renew(match)) == Outcome.UNREACHABLE
            assert bounded(lambda: session.adopt(bytes(16), b"")).outcome == Outcome.UNREACHABLE
            verbs: list[Callable[[], Any]] = [
                client.status,
                client.ping,
                client.clear,
                lambda: list(client.keys()),
                lambda: session.pin(tokens),
                lambda: session.unpin(tokens),
                lambda: session.delete(tokens),
                lambda: session.explain(tokens),
                lambda: session.publication(tokens),
                lambda: fresh.status(deadline_s=DEADLINE_S),
            ]
            for verb in verbs:
                with pytest.raises(UnreachableError):
                    bounded(verb)
            bounded(lambda: session.hint(tokens, ended=True))
            bounded(lambda: session.match(tokens).release())
        finally:
            life.daemon.signal(signal.SIGCONT)
        eventually(lambda: session.match(tokens).chunks == 1, "it is asked again")
        out = np.zeros_like(stored)
        assert session.pull(match, out, deadline_s=5).ok and np.array_equal(out, stored)
        match.release()
        eventually(lambda: _leases(client) == 0, "late answers hold nothing")


def _leases(client: Client) -> int:
    leases: int = client.status(deadline_s=5)["domains"]["local"]["leases"]
    return leases


def works(session: Session, tokens: list[int], stored: Any) -> bool:
    if not session.publish(tokens, list(stored)).stored:
        return False
    with session.match(tokens) as match:
        out = np.zeros_like(stored)
        return session.pull(match, out).ok and np.array_equal(out, stored)


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_clients_of_a_killed_daemon_go_on_with_the_next_one(life: Life, carrier: str) -> None:
    tokens, stored = prompt(2), kv(2)
    with connect(life.daemon.address if carrier == "unix" else life.tcp) as client:
        first, second = client.open(namespace()), client.open(namespace())
        assert works(first, tokens, stored) and works(second, tokens, stored)
        old = first.match(tokens)
        publication = first.publication(prompt(1, seed=3))
        publication.write(0, stored[0])
        life.daemon.kill()
        assert first.pull(old, np.zeros_like(stored)).outcomes.tolist() == [Outcome.STALE_EPOCH] * 2
        assert publication.commit()[0] in (Outcome.STALE_EPOCH, Outcome.UNREACHABLE)
        assert first.match(tokens).outcome == Outcome.UNREACHABLE
        life.again()
        restarted = time.monotonic()
        eventually(lambda: works(second, tokens, stored), "the second session goes on")
        assert time.monotonic() - restarted < 5
        assert first.match(tokens).chunks == 0 and works(first, tokens, stored)
        pulled = first.pull(old, np.zeros_like(stored))
        assert pulled.outcomes.tolist() == [Outcome.STALE_EPOCH] * 2
        assert first.renew(old) == Outcome.STALE_EPOCH
        old.release()
        publication.abort()
        eventually(lambda: _leases(client) == 0, "nothing of the old life is held")


@pytest.mark.parametrize("at", [1, 9, 41])
def test_a_daemon_killed_amid_a_publish_is_told_by_the_outcomes(
    life: Life, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Requests are under way at that moment: room for the next batch, the commit of the last."""
    write, written = PartFormat.write_payload, [0]

    def kill(*args: Any) -> Any:
        written[0] += 1
        if written[0] == at:
            life.daemon.kill()
        return write(*args)

    with connect(life.daemon.address) as client:
        session = client.open(namespace(opaque(nbytes=64)))
        tokens, stored = prompt(80), [bytes([chunk]) * 64 for chunk in range(80)]
        with monkeypatch.context() as patched:
            patched.setattr(PartFormat, "write_payload", kill)
            published = bounded(lambda: session.publish(tokens, stored))
        lost = {Outcome.STALE_EPOCH, Outcome.UNREACHABLE}
        sure = max(0, at - 1 - 32)  # the last commit before the kill may not have been answered
        assert set(published.outcomes[:sure]) <= {Outcome.OK}
        assert set(published.outcomes[sure : at - 1]) <= {Outcome.OK, *lost}
        assert set(published.outcomes[at - 1 :]) <= lost and published.text
        assert published.nbytes == 64 * int((published.outcomes == Outcome.OK).sum())
        life.again()
        eventually(lambda: session.publish(tokens, stored).stored, "it goes on")
        assert _leases(client) == 0


def test_a_restart_between_two_calls_is_not_noticed(life: Life) -> None:
    with connect(life.daemon.address) as client:
        session = client.open(namespace())
        assert works(session, prompt(1), kv(1))
        life.again()
        assert session.match(prompt(1)).outcome == Outcome.MISS


def test_an_asyncio_client_goes_on_with_the_next_daemon(life: Life) -> None:
    tokens, stored = prompt(2), kv(2)

    async def main() -> None:
        async with connect_async(life.daemon.address) as client:
            session = await client.open(namespace())
            assert (await session.publish(tokens, list(stored))).stored
            old = await session.match(tokens)
            life.daemon.kill()
            await asyncio.sleep(0.05)
            out = np.zeros_like(stored)
            pulled = await session.pull(old, out)
            assert pulled.outcomes.tolist() == [Outcome.STALE_EPOCH] * 2
            assert (await session.match(tokens)).outcome == Outcome.UNREACHABLE
            await asyncio.to_thread(life.again)
            for _ in range(100):
                if (await session.publish(tokens, list(stored))).stored:
                    break
                await asyncio.sleep(0.05)
            with await session.match(tokens) as match:
                assert (await session.pull(match, out)).ok and np.array_equal(out, stored)

    asyncio.run(main())


def test_a_daemon_killed_under_load_costs_misses_and_nothing_else(life: Life) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []
    pulls = [0] * 4

    def converse(number: int, client: Client) -> None:
        try:
            session = client.open(namespace())
            tokens, stored = prompt(3, seed=number), kv(3, seed=number)
            while not stop.is_set():
                session.publish(tokens, list(stored))
                with session.match(tokens) as match:
                    out = np.zeros((match.chunks, *stored.shape[1:]), stored.dtype)
                    pulled = session.pull(match, out)
                    good = pulled.outcomes == Outcome.HIT
                    assert np.array_equal(out[good], stored[: match.chunks][good])
                    pulls[number] += int(good.sum())
        except BaseException as error:
            errors.append(error)

    addresses = [life.daemon.address, life.daemon.address, life.tcp, life.tcp]
    clients = [connect(address) for address in addresses]
    threads = [
        threading.Thread(target=converse, args=(number, client))
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: errors or min(pulls) > 3, "everybody pulls")
        life.daemon.kill()
        life.again()
        before = list(pulls)
        eventually(
            lambda: errors or all(p > b + 3 for p, b in zip(pulls, before, strict=True)),
            "everybody pulls again",
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert not errors, errors
