"""Requests that are posted now and answered later, and publishing, which hides them by copies."""

import asyncio
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, LocalStore, Outcome, Publish, Session, connect
from kvpool.client.awaiting import AsyncLocalChannel, AsyncSocketChannel
from kvpool.client.blocking import AWAKE_S, NAPS, BlockingLink, SocketChannel
from kvpool.client.effects import Await, Effect, Post, Steps, Work
from kvpool.client.extents import PartFormat
from kvpool.client.local import LocalChannel
from kvpool.client.publication import Scope
from kvpool.client.publishing import publish
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, DeadlineError, UnreachableError
from kvpool.transfer.stream import Stream
from tests.client.samples import namespace, opaque, prompt
from tests.client.scripted import Answer, Connect, ScriptedDaemon, hang_up, late
from tests.client.stores import Place
from tests.store.daemons import eventually

NBYTES = 64


def payloads(count: int) -> list[bytes]:
    return [bytes([chunk]) * NBYTES for chunk in range(count)]


def soon() -> float:
    return time.monotonic() + 10


def has_come(channel: Any) -> bool:
    """Whether a response lies in the socket."""
    return bool(select.select([channel._fd], [], [], 10)[0])


def leases(store: LocalStore) -> int:
    return len(store.service.domains["local"].store.leases)


# ---- one channel


def greeted(scripted: ScriptedDaemon) -> tuple[SocketChannel, wire.Reserve]:
    """A channel on which a namespace is open, and a request for room in it."""
    channel = SocketChannel.dial(scripted.address, soon())
    space = namespace(opaque(nbytes=NBYTES))
    channel.call(wire.Hello(version_min=1, version_max=1), soon())
    record, digest = space.to_record(), space.digest("default")
    opened = channel.call(wire.Open(namespace=record, digest=digest), soon())
    assert isinstance(opened, wire.Opened)
    return channel, wire.Reserve(namespace=opened.namespace, keys=bytes(range(64)), parts=1)


@pytest.fixture
def channel(scripted: ScriptedDaemon) -> Iterator[tuple[SocketChannel, wire.Reserve]]:
    made = greeted(scripted)
    yield made
    made[0].close()


Greeted = tuple[SocketChannel, wire.Reserve]


def test_a_response_that_comes_while_another_is_awaited_is_kept(channel: Greeted) -> None:
    first = channel[0].post(wire.Status(), soon())
    second = channel[0].post(wire.Keys(), soon())
    assert isinstance(channel[0].call(wire.Clear(), soon()), wire.Count)
    assert isinstance(channel[0].wait(second, soon()), wire.KeyPage)
    assert isinstance(channel[0].wait(first, soon()), wire.StatusReport)


def test_threads_that_post_on_one_channel_get_their_own_responses(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    scripted.script["keys"] = lambda request, truth: wire.KeyPage(cursor=request.keys.cursor)
    wrong: list[Any] = []

    def converse(number: int) -> None:
        for turn in range(30):
            wanted = [1 + number * 1000 + turn * 10 + i for i in range(3)]
            tickets = [channel[0].post(wire.Keys(cursor=cursor), soon()) for cursor in wanted]
            pages = [channel[0].wait(ticket, soon()) for ticket in reversed(tickets)]
            got = [page.cursor for page in reversed(pages) if isinstance(page, wire.KeyPage)]
            if got != wanted:
                wrong.append((wanted, got))

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_waits_stays_awake_only_while_answers_come_soon(
    scripted: ScriptedDaemon, channel: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    look = Stream._look

    def counted(stream: Stream, seconds: float) -> bytes | None:
        looked.append(seconds)
        return look(stream, seconds)

    monkeypatch.setattr(Stream, "_look", counted)
    channel[0]._naps = 0
    scripted.script["status"] = late(0.1)
    channel[0].call(wire.Status(), soon())
    assert looked == [AWAKE_S]
    for _ in range(NAPS):
        channel[0].call(wire.Keys(), soon())
    assert looked == [AWAKE_S]
    channel[0].call(wire.Keys(), soon())
    assert looked == [AWAKE_S] * 2


def test_a_response_that_has_come_counts_after_the_deadline(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    ticket = channel[0].post(wire.Status(), soon())
    assert isinstance(channel[0].call(wire.Keys(), soon()), wire.KeyPage)
    assert isinstance(channel[0].wait(ticket, time.monotonic() - 1), wire.StatusReport)
    scripted.script["status"] = late(0.2)
    ticket = channel[0].post(wire.Status(), soon())
    with pytest.raises(DeadlineError):
        channel[0].wait(ticket, time.monotonic() - 1)


def test_what_a_dropped_ticket_was_granted_goes_back_at_once(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    ticket = channel[0].post(channel[1], soon())
    assert has_come(channel[0]) and leases(scripted.store) == 1
    channel[0].drop(ticket)
    eventually(lambda: leases(scripted.store) == 0, "without another request")


def test_what_a_dropped_ticket_is_granted_later_goes_back_with_the_next_request(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    scripted.script["reserve"] = late(0.2)
    channel[0].drop(channel[0].post(channel[1], soon()))
    assert not channel[0].silent
    eventually(lambda: leases(scripted.store) == 1, "room is reserved")
    channel[0].call(wire.Status(), soon())
    eventually(lambda: leases(scripted.store) == 0, "it is given back")


def test_a_ticket_may_be_dropped_while_another_thread_waits(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    ticket = channel[0].post(channel[1], soon())
    scripted.script["status"] = late(0.3)
    caller = threading.Thread(target=channel[0].call, args=(wire.Status(), soon()))
    caller.start()
    eventually(lambda: scripted.count("status") == 1, "the other thread waits")
    channel[0].drop(ticket)
    caller.join()
    eventually(lambda: leases(scripted.store) == 0, "it is given back")


def test_what_was_posted_to_a_daemon_that_dies_is_unreachable(
    scripted: ScriptedDaemon, channel: Greeted
) -> None:
    scripted.script["keys"] = hang_up
    channel[0].call(wire.Status(), soon())
    tickets = [channel[0].post(body, soon()) for body in (wire.Status(), wire.Keys())]
    assert isinstance(channel[0].wait(tickets[0], soon()), wire.StatusReport)
    with pytest.raises(UnreachableError):
        channel[0].wait(tickets[1], soon())
    channel[0].drop(tickets[1])
    assert not channel[0].alive


def test_an_async_channel_gives_back_what_dropped_tickets_are_granted(
    scripted: ScriptedDaemon,
) -> None:
    async def main() -> None:
        space = namespace(opaque(nbytes=NBYTES))
        channel = await AsyncSocketChannel.dial(scripted.address, soon())
        await channel.call(wire.Hello(version_min=1, version_max=1), soon())
        body = wire.Open(namespace=space.to_record(), digest=space.digest("default"))
        opened = await channel.call(body, soon())
        assert isinstance(opened, wire.Opened)
        room = wire.Reserve(namespace=opened.namespace, keys=bytes(range(64)), parts=1)
        come, coming = channel.post(room, soon()), channel.post(wire.Keys(), soon())
        assert isinstance(await channel.call(wire.Status(), soon()), wire.StatusReport)
        assert isinstance(await channel.wait(coming, time.monotonic() - 1), wire.KeyPage)
        channel.drop(come)
        await channel.call(wire.Status(), soon())
        assert leases(scripted.store) == 0
        channel.drop(channel.post(room, soon()))
        await channel.call(wire.Status(), soon())
        await channel.call(wire.Status(), soon())
        assert leases(scripted.store) == 0
        lost = channel.post(wire.Keys(), soon())
        channel.close()
        await asyncio.sleep(0)
        with pytest.raises(UnreachableError):
            await channel.wait(lost, soon())

    asyncio.run(main())


@pytest.mark.parametrize("kind", [LocalChannel, AsyncLocalChannel])
def test_the_embedded_store_takes_back_what_a_dropped_ticket_was_granted(kind: Any) -> None:
    store = LocalStore(1 << 20, chunks=64)
    channel = store.open_channel(kind)
    space = namespace(opaque(nbytes=NBYTES))
    channel.drop(channel.post(wire.Hello(version_min=1, version_max=1), soon()))
    body = wire.Open(namespace=space.to_record(), digest=space.digest("default"))
    channel.drop(channel.post(body, soon()))
    ticket = channel.post(wire.Reserve(namespace=1, keys=bytes(range(64)), parts=1), soon())
    assert leases(store) == 1
    channel.drop(ticket)
    assert leases(store) == 0
    channel.close()
    store.close()


# ---- publishing


@pytest.fixture
def session(scripted: ScriptedDaemon, dial: Connect) -> Session:
    return dial(scripted.address).open(namespace(opaque(nbytes=NBYTES)))


def watched(client: Client, steps: Steps[Publish], told: list[str]) -> Steps[Publish]:
    """`steps`, writing down what is posted, awaited and copied."""
    names: dict[int, str] = {}
    counts = {wire.Reserve: 0, wire.Commit: 0}
    effect: Effect = next(steps)
    while True:
        if isinstance(effect, Await):
            told.append(f"await {names[effect.ticket]}")
        elif isinstance(effect, Work) and effect.nbytes:
            told.append(f"copy {effect.nbytes // NBYTES}")
        result = yield effect
        if isinstance(effect, Post):
            kind = type(effect.body)
            names[result] = f"{kind.__name__.lower()} {counts[kind]}"
            counts[kind] += 1
            told.append(f"post {names[result]}")
        try:
            effect = steps.send(result)
        except StopIteration as stop:
            value: Publish = stop.value
            return value


def test_room_is_made_ahead_of_the_copies_and_commits_end_behind_them(unix: Place) -> None:
    client = unix.connect()
    session = client.open(namespace(opaque(nbytes=NBYTES)))
    assert session.publish(prompt(1, seed=9), payloads(1)).stored  # the memory is mapped
    told: list[str] = []
    steps = publish(session.core, payloads(80), Scope(prompt(80), 0, 80))
    published = client.run(watched(client, steps, told), None)
    assert published.outcomes.tolist() == [Outcome.OK] * 80
    assert told == [
        "post reserve 0",
        "await reserve 0",
        "post reserve 1",
        "copy 8",
        "post commit 0",
        "await reserve 1",
        "post reserve 2",
        "copy 32",
        "await commit 0",
        "post commit 1",
        "await reserve 2",
        "post reserve 3",
        "copy 32",
        "await commit 1",
        "post commit 2",
        "await reserve 3",
        "copy 8",
        "await commit 2",
        "post commit 3",
        "await commit 3",
    ]


def test_at_most_two_batches_are_reserved_at_a_time(
    scripted: ScriptedDaemon, session: Session
) -> None:
    held: list[int] = []

    def count(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        answer = truth()
        held.append(leases(scripted.store))
        return answer

    scripted.script["reserve"] = count
    assert session.publish(prompt(140), payloads(140)).stored
    assert held == [1, 2, 2, 2, 2, 2]
    assert session.match(prompt(140), peek=True).chunks == 140


def test_a_store_that_is_busy_amid_a_publish_is_asked_no_more(
    scripted: ScriptedDaemon, session: Session
) -> None:
    """What was asked for before counts: its verdict comes after the refusal."""

    def second(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        busy = protocol.error_body(BusyError("draining"))
        return busy if scripted.count("reserve") == 2 else truth()

    scripted.script["reserve"] = second
    scripted.script["commit"] = late(0.1)
    published = session.publish(prompt(80), payloads(80))
    assert published.outcomes.tolist() == [Outcome.OK] * 8 + [Outcome.BUSY] * 72
    assert "draining" in published.text and published.nbytes == 8 * NBYTES
    assert scripted.count("reserve") == 2 and leases(scripted.store) == 0


def test_a_batch_without_room_for_all_ends_the_publish(embedded: Place) -> None:
    """About 30 chunks fit: the first batch and a part of the second."""
    told: list[str] = []
    client = embedded.connect()
    session = client.open(namespace(opaque(nbytes=1 << 20)))
    steps = publish(session.core, [bytes(1 << 20)] * 80, Scope(prompt(80), 0, 80))
    published = client.run(watched(client, steps, told), None)
    stored = int((published.outcomes == Outcome.OK).sum())
    assert 20 < stored < 40 and set(published.outcomes[stored:]) == {Outcome.BUSY}
    assert "post reserve 1" in told and "post reserve 2" not in told
    assert session.match(prompt(80), peek=True).chunks == stored
    assert client.status()["domains"]["local"]["leases"] == 0


def test_a_commit_that_is_refused_gives_back_what_was_reserved_too_early(
    scripted: ScriptedDaemon, session: Session
) -> None:
    def refused(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        return wire.Verdict(outcomes=bytes([Outcome.NO_PARENT]))

    scripted.script["commit"] = refused
    published = session.publish(prompt(80), payloads(80))
    assert published.outcomes.tolist() == [Outcome.NO_PARENT] * 80
    assert scripted.count("commit") == 1 and scripted.count("reserve") <= 3
    scripted.script.clear()
    assert session.publish(prompt(1, seed=1), payloads(1)).stored
    eventually(lambda: leases(scripted.store) <= 1, "only what the script lied about is open")


def test_what_was_committed_before_the_deadline_counts(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.publish(prompt(1, seed=9), payloads(1)).stored
    write, written = PartFormat.write_payload, [0]

    def late_at_the_tenth(*args: Any) -> Any:
        written[0] += 1
        if written[0] == 10:  # in the second batch
            raise DeadlineError("the deadline passed")
        return write(*args)

    monkeypatch.setattr(PartFormat, "write_payload", late_at_the_tenth)
    published = session.publish(prompt(80), payloads(80))
    assert published.outcomes.tolist() == [Outcome.OK] * 8 + [Outcome.UNREACHABLE] * 72
    assert "deadline" in published.text
    assert session.match(prompt(80), peek=True).chunks == 8


def test_an_operation_that_is_closed_amid_a_copy_gives_everything_back(
    scripted: ScriptedDaemon,
) -> None:
    with connect(scripted.address) as client:
        session = client.open(namespace(opaque(nbytes=NBYTES)))
        link = BlockingLink(lambda end: SocketChannel.dial(scripted.address, end))
        assert session.publish(prompt(1, seed=9), payloads(1)).stored
        steps = publish(session.core, payloads(80), Scope(prompt(80), 0, 80))
        effect = next(steps)
        while not isinstance(effect, Work):
            effect = steps.send(link._perform(effect, soon()))
        assert client.core.connection is not None
        assert has_come(client.core.connection.channel) and leases(scripted.store) == 2
        steps.close()
        eventually(lambda: leases(scripted.store) == 0, "without another request")
        assert session.match(prompt(80), peek=True).chunks == 0


def test_an_error_of_the_engine_amid_a_publish_gives_everything_back(
    scripted: ScriptedDaemon, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise MemoryError("no room for a view")

    with monkeypatch.context() as patched:
        patched.setattr(PartFormat, "write_payload", broken)
        with pytest.raises(MemoryError):
            session.publish(prompt(80), payloads(80))
    assert session.publish(prompt(80), payloads(80)).stored
    eventually(lambda: leases(scripted.store) == 0, "nothing is held")
    assert np.all(session.publish(prompt(80), payloads(80)).outcomes == Outcome.EXISTS)
