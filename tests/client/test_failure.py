"""A daemon that is away, silent, late, or talks nonsense: every call ends in time, and says so."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.client import Outcome, Session, connect, connect_async
from kvpool.client.pacing import Backoff
from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BY_CODE,
    BusyError,
    DeadlineError,
    DeniedError,
    KvpoolError,
    NamespaceError,
    ProtocolError,
    TooLargeError,
    UnreachableError,
    VersionError,
)
from tests.client.samples import kv, namespace, opaque, prompt
from tests.client.scripted import (
    Answer,
    Connect,
    Script,
    ScriptedDaemon,
    half,
    hang_up,
    late,
    never,
    says,
)
from tests.store.daemons import eventually

SOON = 2.0
"""Seconds that a call with a short deadline may take on a busy machine."""
SHORT = 0.1


def rest() -> None:
    """Longer than the first pause of the back-off."""
    time.sleep(0.07)


def in_time(call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    result = call()
    assert time.monotonic() - started < SOON
    return result


# ---- away


def test_an_engine_may_start_before_its_daemon(
    dial: Connect, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    client = dial(f"unix:{folder}/s", deadline_s=1)
    session = client.open(namespace())
    tokens, stored = prompt(2), kv(2)
    match = in_time(lambda: session.match(tokens))
    assert match.outcome == Outcome.UNREACHABLE and match.chunks == 0 and match.error
    published = in_time(lambda: session.publish(tokens, list(stored)))
    assert published.outcomes.tolist() == [Outcome.UNREACHABLE] * 2 and published.text
    assert not published.stored and session.hint(tokens, ended=True) is False
    assert session.adopt(bytes(16), b"").outcome == Outcome.UNREACHABLE
    assert session.pull(match, np.empty(0)).ok
    for verb in (client.status, client.ping, lambda: session.pin(tokens), session.clear):
        with pytest.raises(UnreachableError):
            in_time(verb)
    with pytest.raises(UnreachableError, match="tenant"):
        session.keys(tokens)
    with pytest.raises(UnreachableError):
        session.publication(tokens)
    daemon = ScriptedDaemon(folder)
    eventually(lambda: session.publish(tokens, list(stored)).stored, "the session joins")
    with session.match(tokens) as match:
        out = np.zeros_like(stored)
        assert session.pull(match, out).ok and np.array_equal(out, stored)
    daemon.close()


def test_clearing_before_the_session_has_joined_clears_only_its_own_namespace(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    """The number 0 stands for every namespace, and a session that has not joined has no number."""
    first = dial(scripted.address).open(namespace())
    first.publish(prompt(1), list(kv(1)))
    scripted.script["open"] = says(protocol.error_body(BusyError("starting")))
    client = dial(scripted.address)
    second = client.open(namespace())
    del scripted.script["open"]
    assert second.clear() == 0 and first.match(prompt(1)).chunks == 1


def test_dialling_pauses_longer_after_each_failure() -> None:
    now = [0.0]
    backoff = Backoff(clock=lambda: now[0])
    backoff.check()
    pauses = []
    for _ in range(8):
        backoff.failed(DeniedError("wrong token"))
        start = now[0]
        while True:
            try:
                backoff.check()
                break
            except DeniedError as error:
                assert "wrong token" in str(error)
                now[0] += 0.01
        pauses.append(round(now[0] - start, 2))
    assert pauses == sorted(pauses) and pauses[0] < 0.07 and 0.9 < pauses[-1] < 1.1
    assert backoff.patience == 1
    backoff.succeeded()
    backoff.check()
    assert backoff.patience > 1e9


def test_a_daemon_that_refuses_us_is_not_asked_every_time(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    scripted.script["hello"] = says(protocol.error_body(DeniedError("who are you?")))
    client = dial(scripted.address)
    with pytest.raises(DeniedError):
        client.open(namespace())
    for _ in range(50):
        with pytest.raises(DeniedError, match="who are you"):
            client.status()
    assert scripted.connections < 10


# ---- silent or late


@pytest.mark.parametrize("verb", ["hello", "open", "match", "reserve", "commit"])
def test_a_verb_that_is_never_answered_ends_with_its_deadline(
    scripted: ScriptedDaemon, dial: Connect, verb: str
) -> None:
    client = dial(scripted.address, deadline_s=SHORT)
    scripted.script[verb] = never
    session = in_time(lambda: client.open(namespace()))
    match = in_time(lambda: session.match(prompt(1)))
    if verb in ("hello", "open", "match"):
        assert match.outcome == Outcome.UNREACHABLE and match.error
    rest()
    published = in_time(lambda: session.publish(prompt(1), list(kv(1))))
    assert published.outcomes.tolist() in ([Outcome.UNREACHABLE], [Outcome.OK])
    del scripted.script[verb]
    eventually(lambda: session.publish(prompt(1), list(kv(1))).stored, "it works again")


@pytest.mark.parametrize(
    "verb", ["touch", "adopt", "pin", "delete", "clear", "explain", "keys", "status", "attach"]
)
def test_the_other_verbs_end_with_their_deadline_too(
    scripted: ScriptedDaemon, dial: Connect, verb: str
) -> None:
    client = dial(scripted.address)
    session = client.open(namespace())
    session.publish(prompt(1), list(kv(1)))
    reader = dial(scripted.address).open(session.namespace)
    match = session.match(prompt(1))
    other = reader.match(prompt(1))
    scripted.script[verb] = never
    calls: dict[str, Callable[[], Any]] = {
        "touch": lambda: session.renew(match, deadline_s=SHORT),
        "adopt": lambda: session.adopt(match.lease, match.keys, deadline_s=SHORT).outcome,
        "attach": lambda: Outcome(
            reader.pull(other, np.zeros_like(kv(1)), deadline_s=SHORT).outcomes[0]
        ),
        "pin": lambda: session.pin(prompt(1), deadline_s=SHORT),
        "delete": lambda: session.delete(prompt(1), deadline_s=SHORT),
        "clear": lambda: session.clear(deadline_s=SHORT),
        "explain": lambda: session.explain(prompt(1), deadline_s=SHORT),
        "keys": lambda: list(client.keys(deadline_s=SHORT)),
        "status": lambda: client.status(deadline_s=SHORT),
    }
    if verb in ("touch", "adopt", "attach"):
        assert in_time(calls[verb]) == Outcome.UNREACHABLE
    else:
        with pytest.raises(DeadlineError):
            in_time(calls[verb])
    match.release()
    other.release()


def test_a_late_answer_is_ignored_and_its_lease_released(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    client = dial(scripted.address)
    session = client.open(namespace())
    stored = kv(1)
    session.publish(prompt(1), list(stored))
    leases = scripted.store.service.domains["local"].store.leases
    scripted.script["match"] = late(0.3)
    assert session.match(prompt(1), deadline_s=0.1).outcome == Outcome.UNREACHABLE
    del scripted.script["match"]
    eventually(lambda: session.match(prompt(1)).chunks == 1, "a fresh answer")
    scripted.script["reserve"] = late(0.3)
    other = prompt(1, seed=1)
    published = session.publish(other, list(kv(1)), deadline_s=0.1)
    assert published.outcomes.tolist() == [Outcome.UNREACHABLE]
    del scripted.script["reserve"]
    eventually(lambda: session.match(prompt(1)).chunks == 1, "a fresh answer")
    eventually(lambda: client.ping() and len(leases) == 0, "late leases are given back")
    assert session.publish(other, list(stored)).outcomes.tolist() == [Outcome.OK]


def test_a_silent_daemon_costs_one_deadline_not_one_per_call(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    session = dial(scripted.address, deadline_s=0.5).open(namespace())
    scripted.reading.clear()
    started = time.monotonic()
    for _ in range(20):
        assert session.match(prompt(1)).outcome == Outcome.UNREACHABLE
    assert time.monotonic() - started < 5
    scripted.reading.set()
    eventually(lambda: session.match(prompt(1)).outcome == Outcome.MISS, "it is asked again")


def test_one_way_messages_never_wait_for_a_daemon_that_does_not_read(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    session = dial(scripted.address).open(namespace(opaque(nbytes=64)))
    tokens = prompt(200)
    session.publish(tokens, [bytes(64)] * 200)
    matches = [session.match(tokens) for _ in range(20)]
    scripted.reading.clear()

    def flood() -> None:
        for match in matches:
            match.release()
        for _ in range(200):
            session.hint(tokens, will_continue=1)  # 6.4 KB each

    started = time.monotonic()
    flood()
    assert time.monotonic() - started < 10
    scripted.reading.set()
    eventually(lambda: session.match(tokens).chunks == 200, "it goes on", 20)


def test_a_call_does_not_wait_for_another_threads_longer_than_its_deadline(
    scripted: ScriptedDaemon,
) -> None:
    with connect(scripted.address) as client:
        session = client.open(namespace())
        scripted.script["status"] = late(1)
        slow = threading.Thread(target=client.status)
        slow.start()
        eventually(lambda: scripted.count("status") == 1, "the slow call is under way")
        started = time.monotonic()
        match = session.match(prompt(1), deadline_s=0.1)
        assert match.outcome == Outcome.UNREACHABLE and time.monotonic() - started < 0.8
        slow.join()
        assert session.match(prompt(1)).outcome == Outcome.MISS


# ---- nonsense


def frame(body: bytes) -> bytes:
    return frames.encode(body)


def response(request_id: int, body: Any) -> bytes:
    return frame(protocol.response_body(request_id, body))


NONSENSE: dict[str, Script] = {
    "half a frame": half,
    "a closed connection": hang_up,
    "a length that no frame has": says(b"\xff" * 64),
    "HTTP": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "bytes that are no message": says(frame(b"\xff\xff\xff\xff")),
    "another kind of message": says(wire.Count(count=3)),
    "an empty message": says(wire.Matched(hits=7)),
    "an error about the connection": says(response(0, protocol.error_body(BusyError("full")))),
}


@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("verb", ["hello", "match"])
def test_nonsense_is_an_unreachable_store_and_then_a_new_connection(
    scripted: ScriptedDaemon, dial: Connect, what: str, verb: str
) -> None:
    session = dial(scripted.address).open(namespace())
    session.publish(prompt(1), list(kv(1)))
    if verb != "match":
        scripted.cut()
        rest()
    scripted.script[verb] = NONSENSE[what]
    match = in_time(lambda: session.match(prompt(1), deadline_s=SHORT))
    assert match.chunks == 0 and match.error
    assert match.outcome in (Outcome.UNREACHABLE, Outcome.BUSY)
    assert match.outcome != Outcome.BUSY or "full" in match.error
    del scripted.script[verb]
    eventually(lambda: session.match(prompt(1)).chunks == 1, "a new connection works")


def test_an_answer_to_nobody_is_ignored(scripted: ScriptedDaemon, dial: Connect) -> None:
    session = dial(scripted.address).open(namespace())

    def twice(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        return response(999, wire.Count()) + response(request.id, wire.Matched(miss_outcome=1))

    scripted.script["match"] = twice
    assert session.match(prompt(1)).outcome == Outcome.MISS


@pytest.mark.parametrize("error", BY_CODE.values())
def test_every_error_of_the_store_is_an_outcome_of_match_and_publish(
    scripted: ScriptedDaemon, error: type[KvpoolError]
) -> None:
    client = connect(scripted.address)
    session = client.open(namespace())
    body = protocol.error_body(error("because"))
    scripted.script["match"] = scripted.script["reserve"] = says(body)
    match = session.match(prompt(2))
    assert match.chunks == 0 and match.outcome not in (Outcome.HIT, Outcome.OK)
    assert "because" in match.error
    rest()
    published = session.publish(prompt(2), list(kv(2)))
    assert set(published.outcomes) <= {
        Outcome.UNREACHABLE,
        Outcome.BUSY,
        Outcome.DENIED,
        Outcome.INVALID,
        Outcome.TOO_LARGE,
        Outcome.STALE_EPOCH,
    }
    assert "because" in published.text and not published.stored
    client.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (protocol.error_body(VersionError("1..1 and 7..9")), VersionError),
        (wire.Welcome(version=99, reserve_max=1, keys_max=1), VersionError),
        (wire.Welcome(version=1), ProtocolError),
        (wire.Opened(), ProtocolError),
        (protocol.error_body(NamespaceError("another digest")), NamespaceError),
    ],
)
def test_opening_says_what_cannot_be_mended_by_waiting(
    scripted: ScriptedDaemon, dial: Connect, answer: Any, error: type[KvpoolError]
) -> None:
    scripted.script["hello"] = says(answer)
    with pytest.raises(error):
        dial(scripted.address).open(namespace())


# ---- one connection, many users


def test_threads_that_reconnect_at_once_make_one_connection(scripted: ScriptedDaemon) -> None:
    with connect(scripted.address) as client:
        sessions = [client.open(namespace()) for _ in range(4)]
        scripted.cut()
        scripted.script["hello"] = late(0.05)
        before = scripted.connections
        found: list[Outcome] = []

        def match(session: Session) -> None:
            found.append(session.match(prompt(1)).outcome)

        threads = [threading.Thread(target=match, args=(s,)) for s in sessions * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [Outcome.MISS] * 16
        assert scripted.connections == before + 1


def test_tasks_that_reconnect_at_once_make_one_connection(scripted: ScriptedDaemon) -> None:
    async def main() -> None:
        async with connect_async(scripted.address) as client:
            sessions = [await client.open(namespace()) for _ in range(4)]
            scripted.cut()
            scripted.script["hello"] = late(0.05)
            before = scripted.connections
            await asyncio.sleep(0.02)
            matches = await asyncio.gather(*(s.match(prompt(1)) for s in sessions * 4))
            assert [match.outcome for match in matches] == [Outcome.MISS] * 16
            assert scripted.connections == before + 1

    asyncio.run(main())


def test_one_refused_namespace_does_not_lock_the_others_out(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    client = dial(scripted.address)
    small, large = client.open(namespace()), client.open(namespace(opaque(nbytes=1 << 20)))
    scripted.renew()
    scripted.cut()
    rest()

    def refuse_large(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        if request.open.namespace.parts[0].planes[0].nbytes == 1 << 20:
            return protocol.error_body(TooLargeError("raise --capacity"))
        return truth()

    scripted.script["open"] = refuse_large
    eventually(lambda: small.publish(prompt(1), list(kv(1))).stored, "a new connection")
    refused = large.match(prompt(1))
    assert refused.outcome == Outcome.TOO_LARGE and "capacity" in refused.error
    assert small.match(prompt(1)).chunks == 1


def test_a_new_life_of_the_daemon_numbers_namespaces_anew(
    scripted: ScriptedDaemon, dial: Connect
) -> None:
    """A number of the old life must never reach the new one: there it is another namespace, whose
    extents have another size."""
    client = dial(scripted.address)
    first = client.open(namespace())
    second = client.open(namespace(opaque(nbytes=64)))
    old = (first.core.id, second.core.id)
    first.publish(prompt(1), list(kv(1)))
    held = first.match(prompt(1))
    publication = first.publication(prompt(3))
    scripted.renew()
    scripted.cut()
    rest()
    eventually(lambda: second.publish(prompt(1), [bytes(64)]).stored, "a new connection")
    publication.write(1, kv(1)[0])
    assert publication.commit().tolist() == [Outcome.EXISTS] + [Outcome.STALE_EPOCH] * 2
    assert first.pull(held, np.zeros_like(kv(1))).outcomes.tolist() == [Outcome.STALE_EPOCH]
    assert first.renew(held) == Outcome.STALE_EPOCH
    assert first.borrow(held).outcomes.tolist() == [Outcome.STALE_EPOCH]
    assert first.publish(prompt(1), list(kv(1))).stored
    assert (second.core.id, first.core.id) == old
    with first.match(prompt(1)) as match:
        out = np.zeros_like(kv(1))
        assert first.pull(match, out).ok and np.array_equal(out, kv(1))
    held.release()


# ---- copies and connections


def test_a_connection_is_not_closed_under_a_copy(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon reuses what a connection holds as soon as it is closed."""
    from kvpool.client.extents import PartFormat

    leases = scripted.store.service.domains["local"].store.leases
    entered, go_on = threading.Event(), threading.Event()
    deliver = PartFormat.deliver

    def slow(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return deliver(*args)

    with connect(scripted.address) as client:
        session = client.open(namespace())
        session.publish(prompt(1), list(kv(1)))
        match = session.match(prompt(1))
        monkeypatch.setattr(PartFormat, "deliver", slow)
        pulls: list[Any] = []
        out = np.zeros_like(kv(1))
        puller = threading.Thread(target=lambda: pulls.append(session.pull(match, out)))
        puller.start()
        assert entered.wait(10)
        scripted.script["match"] = says(b"\xff" * 64)  # nonsense: a new connection is needed
        assert session.match(prompt(1)).outcome == Outcome.UNREACHABLE
        del scripted.script["match"]
        rest()
        assert session.match(prompt(2), peek=True).chunks == 1
        assert len(leases) == 1, "the old connection still holds what is being copied"
        go_on.set()
        puller.join()
        assert Outcome.CORRUPT not in pulls[0].outcomes
        eventually(lambda: len(leases) == 0, "now it is closed")


def test_closing_waits_for_copies_and_says_busy_if_they_do_not_end(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.client.extents import PartFormat

    entered, go_on = threading.Event(), threading.Event()
    deliver = PartFormat.deliver

    def slow(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return deliver(*args)

    client = connect(scripted.address)
    session = client.open(namespace())
    session.publish(prompt(1), list(kv(1)))
    match = session.match(prompt(1))
    monkeypatch.setattr(PartFormat, "deliver", slow)
    out = np.zeros_like(kv(1))
    pulls: list[Any] = []
    puller = threading.Thread(target=lambda: pulls.append(session.pull(match, out)))
    puller.start()
    assert entered.wait(10)
    with pytest.raises(BusyError, match="1 copies"):
        client.close(deadline_s=0.05)
    threading.Timer(0.1, go_on.set).start()
    client.close()
    puller.join()
    assert pulls[0].ok and np.array_equal(out, kv(1))
    match.release()


def test_borrowed_views_keep_their_connection_and_their_match_alive(
    scripted: ScriptedDaemon,
) -> None:
    leases = scripted.store.service.domains["local"].store.leases
    with connect(scripted.address) as client:
        session = client.open(namespace())
        session.publish(prompt(2), list(kv(2)))
        view = session.borrow(session.match(prompt(2)))[1]
        assert len(leases) == 1
        scripted.script["match"] = says(b"\xff" * 64)
        session.match(prompt(1))
        del scripted.script["match"]
        rest()
        assert session.match(prompt(1), peek=True).chunks == 1
        assert len(leases) == 1 and view.tobytes() == kv(2)[1].tobytes()
        del view
        eventually(lambda: len(leases) == 0, "the last view is gone")
