"""Threads and tasks that share a client, cancellation, forks, and a long life."""

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import (
    AsyncClient,
    Client,
    LocalStore,
    Match,
    Outcome,
    Session,
    connect,
    connect_async,
)
from kvpool.client.extents import PartFormat
from kvpool.proto.errors import InvalidError, StaleError
from tests.client.samples import blob, generation_of, kv, namespace, opaque, prompt
from tests.client.stores import Place
from tests.store.daemons import RunningDaemon, eventually


def check_pull(session: Session, tokens: list[int], stored: Any) -> None:
    with session.match(tokens) as match:
        out = np.zeros_like(stored)
        assert session.pull(match, out).ok and np.array_equal(out, stored)


# ---- threads


@pytest.mark.parametrize("carrier", ["embedded", "unix", "tcp"])
def test_threads_may_share_a_session(carrier: str, daemon: RunningDaemon) -> None:
    place = Place(carrier, None if carrier == "embedded" else daemon)
    session = place.connect().open(namespace(opaque(nbytes=8192)))
    errors: list[BaseException] = []

    def converse(number: int) -> None:
        try:
            tokens = prompt(4, seed=number)
            keys = session.keys(tokens)
            stored = np.stack([blob(keys[i * 32 : i * 32 + 32], number, 8192) for i in range(4)])
            for length in (1, 2, 4, 4):
                assert session.publish(tokens[: length * 16], list(stored[:length])).stored
                check_pull(session, tokens[: length * 16], stored[:length])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    place.close()
    assert not errors, errors


def test_threads_that_publish_one_key_agree_on_one_version(unix: Place) -> None:
    space = namespace(opaque(nbytes=8192))
    sessions = [unix.connect().open(space) for _ in range(6)]
    key = sessions[0].keys(prompt(1))
    start = threading.Barrier(6)
    outcomes: list[int] = []

    def publish(number: int) -> None:
        start.wait()
        published = sessions[number].publish(prompt(1), [blob(key, number, 8192)])
        outcomes.append(int(published.outcomes[0]))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(Outcome.OK) == 1
    assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS, Outcome.WRITING}
    with sessions[0].match(prompt(1)) as match:
        out = sessions[0].payload(1)
        assert sessions[0].pull(match, out).ok
    assert generation_of(out[0], key) in range(6)


# ---- tasks


@pytest.mark.parametrize("operation", ["pull", "publish", "write"])
def test_a_cancelled_task_gives_nothing_back_while_a_thread_still_copies(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    nbytes = 1 << 20
    running, go_on = threading.Event(), threading.Event()
    slowed = "deliver" if operation == "pull" else "write_payload"
    original = getattr(PartFormat, slowed)

    def slow(*args: Any) -> Any:
        running.set()
        assert go_on.wait(10)
        return original(*args)

    async def main() -> None:
        async with connect_async(daemon.address) as client, connect_async(daemon.address) as admin:
            session = await client.open(namespace(opaque(nbytes=nbytes)))
            await session.publish(prompt(1), [bytes(nbytes)])
            monkeypatch.setattr(PartFormat, slowed, slow)

            async def pull() -> None:
                with await session.match(prompt(1)) as match:
                    await session.pull(match, bytearray(nbytes))

            async def publish() -> None:
                await session.publish(prompt(1, seed=1), [bytes(nbytes)])

            async def write() -> None:
                with await session.publication(prompt(1, seed=2)) as publication:
                    await publication.write(0, bytes(nbytes))

            operations: dict[str, Callable[[], Any]] = {
                "pull": pull,
                "publish": publish,
                "write": write,
            }
            task = asyncio.create_task(operations[operation]())
            await asyncio.to_thread(running.wait, 10)
            task.cancel()
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
            assert (await admin.status())["domains"]["local"]["leases"] == 1
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.status())["domains"]["local"]["leases"] == 0

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_it_waits_leaves_no_lease(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with connect_async(daemon.address) as client:
            session = await client.open(namespace())
            await session.publish(prompt(1), list(kv(1)))
            for turns in range(12):
                task = asyncio.create_task(session.match(prompt(1)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                matches = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(matches[0], asyncio.CancelledError | Match)
                del matches, task
            await asyncio.sleep(0.05)
            assert (await client.status())["domains"]["local"]["leases"] == 0

    asyncio.run(main())


def test_a_match_may_be_released_in_any_thread(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with connect_async(daemon.address) as client:
            session = await client.open(namespace())
            await session.publish(prompt(1), list(kv(1)))
            match = await session.match(prompt(1))
            await asyncio.to_thread(match.release)
            await asyncio.sleep(0)
            assert (await client.status())["domains"]["local"]["leases"] == 0

    asyncio.run(main())


def test_a_client_belongs_to_one_event_loop(daemon: RunningDaemon) -> None:
    async def elsewhere(client: AsyncClient) -> None:
        with pytest.raises(InvalidError, match="another event loop"):
            await client.ping()

    async def main() -> None:
        async with connect_async(daemon.address) as client:
            await client.ping()
            await asyncio.to_thread(asyncio.run, elsewhere(client))
            await client.ping()

    asyncio.run(main())


# ---- fork and spawn


def run_in_fork(function: Callable[[], None]) -> None:
    """Fails unless `function` ends well in a fork child within 3 seconds."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


@pytest.mark.parametrize("address", ["unix", "tcp"])
def test_a_client_goes_on_in_a_fork_child_and_in_its_parent(
    daemon: RunningDaemon, address: str
) -> None:
    with connect(daemon.address if address == "unix" else daemon.ready["tcp"]) as client:
        session = client.open(namespace())
        session.publish(prompt(2), list(kv(2)))
        held = session.match(prompt(2))

        def child() -> None:
            stale = session.pull(held, np.zeros_like(kv(2)))
            assert stale.outcomes.tolist() == [Outcome.STALE_EPOCH] * 2
            held.release()
            check_pull(session, prompt(2), kv(2))
            assert session.publish(prompt(1, seed=1), list(kv(1))).stored
            client.close()

        run_in_fork(child)
        out = np.zeros_like(kv(2))
        assert session.pull(held, out).ok and np.array_equal(out, kv(2))
        held.release()
        check_pull(session, prompt(1, seed=1), kv(1))


def test_a_fork_amid_a_call_of_another_thread_does_not_hang_the_child(
    daemon: RunningDaemon,
) -> None:
    with connect(daemon.address) as client:
        session = client.open(namespace())
        session.publish(prompt(1), list(kv(1)))
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                check_pull(session, prompt(1), kv(1))

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                run_in_fork(lambda: check_pull(session, prompt(1), kv(1)))
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_an_embedded_store_says_that_it_does_not_cross_a_fork() -> None:
    store = LocalStore(4 << 20, chunks=1024)
    with connect(store) as client:
        session = client.open(namespace())
        session.publish(prompt(1), list(kv(1)))

        def child() -> None:
            match = session.match(prompt(1))
            assert match.outcome == Outcome.STALE_EPOCH and "fork" in match.error
            with pytest.raises(StaleError, match="connect anew"):
                client.status()
            with connect(capacity=4 << 20) as anew:
                assert anew.open(namespace()).publish(prompt(1), list(kv(1))).stored

        run_in_fork(child)
        check_pull(session, prompt(1), kv(1))
    store.close()


def test_an_asyncio_client_says_that_it_does_not_cross_a_fork(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with connect_async(daemon.address) as client:
            session = await client.open(namespace())
            await session.publish(prompt(1), list(kv(1)))

            def child() -> None:
                async def use() -> None:
                    with pytest.raises(InvalidError, match="another event loop"):
                        await client.ping()
                    async with connect_async(daemon.address) as anew:
                        again = await anew.open(session.namespace)
                        with await again.match(prompt(1)) as match:
                            assert match.chunks == 1

                asyncio.new_event_loop().run_until_complete(use())

            await asyncio.to_thread(run_in_fork, child)
            with await session.match(prompt(1)) as match:
                out = np.zeros_like(kv(1))
                assert (await session.pull(match, out)).ok and np.array_equal(out, kv(1))

    asyncio.run(main())


def _spawned(address: str, salt: str, report: Any) -> None:
    with connect(address) as client:
        session = client.open(namespace(salt=salt))
        with session.match(prompt(1)) as match:
            out = np.zeros_like(kv(1))
            report.put(bool(session.pull(match, out).ok and np.array_equal(out, kv(1))))


def test_a_spawned_process_finds_what_its_parent_published(daemon: RunningDaemon) -> None:
    context = multiprocessing.get_context("spawn")
    with connect(daemon.address) as client:
        session = client.open(namespace())
        session.publish(prompt(1), list(kv(1)))
        report = context.Queue()
        arguments = (daemon.address, session.namespace.salt, report)
        process = context.Process(target=_spawned, args=arguments)
        process.start()
        assert report.get(timeout=20) is True
        process.join()
        report.close()
        report.join_thread()


# ---- a long life


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_long_life_leaves_nothing_behind(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(namespace(opaque(nbytes=64)))
        tokens = prompt(8)
        session.publish(tokens, [bytes(64)] * 8)
        keys = session.keys(tokens)
        out = session.payload(8)

        def cycles(count: int) -> None:
            for number in range(count):
                with session.match(keys) as match:
                    if number % 100 == 0:
                        assert session.pull(match, out).ok

        def cut() -> None:
            assert client.core.connection is not None
            client.core.connection.channel.close()
            eventually(lambda: session.match(keys).chunks == 8, "a new connection")

        cycles(500)
        for _ in range(3):
            cut()
        gc.collect()
        before = open_files(), threading.active_count(), resident_bytes()
        cycles(3_000)
        for _ in range(100):
            cut()
            cycles(1)
        gc.collect()
        after = open_files(), threading.active_count(), resident_bytes()
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 8 << 20
        assert client.status()["domains"]["local"]["leases"] == 0


def test_an_embedded_store_ends_with_its_client() -> None:
    def life() -> None:
        with connect(capacity=4 << 20) as client:
            session = client.open(namespace())
            session.publish(prompt(1), list(kv(1)))
            check_pull(session, prompt(1), kv(1))

    life()
    before = open_files()
    for _ in range(5):
        life()
    assert open_files() == before


def test_a_store_that_is_shared_outlives_its_clients() -> None:
    store = LocalStore(4 << 20, chunks=1024)
    space = namespace()
    with connect(store) as client:
        client.open(space).publish(prompt(1), list(kv(1)))
    with connect(store) as client:
        check_pull(client.open(space), prompt(1), kv(1))
    store.close()
    with connect(store) as client, pytest.raises(StaleError, match="closed"):
        client.status()


def test_connections_that_were_cut_release_their_data_connections(daemon: RunningDaemon) -> None:
    def client_life(client: Client, session: Session) -> None:
        check_pull(session, prompt(1), kv(1))
        assert client.core.connection is not None
        client.core.connection.channel.close()
        eventually(lambda: session.match(prompt(1)).chunks == 1, "a new connection")

    with connect(daemon.ready["tcp"]) as client:
        session = client.open(namespace())
        session.publish(prompt(1), list(kv(1)))
        for _ in range(3):
            client_life(client, session)
        before = open_files()
        for _ in range(20):
            client_life(client, session)
        assert open_files() == before
