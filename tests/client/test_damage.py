"""Wrong, missing or late bytes: exactly the chunk that fails fails, and nobody gets wrong ones."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, Match, Outcome, Reason, Session
from kvpool.client.extents import PartFormat
from kvpool.client.pulling import Pulling
from kvpool.proto.chunk import HEADER_BYTES
from kvpool.proto.errors import ProtocolError
from kvpool.transfer.copying import Bytes
from tests.client.samples import CHUNK, LAYERS, kv, namespace, prompt
from tests.client.stores import Place, extent
from tests.store.daemons import eventually

CHUNKS = 5


@pytest.fixture
def client(place: Place) -> Client:
    return place.connect()


@pytest.fixture
def session(client: Client) -> Session:
    session = client.open(namespace())
    assert session.publish(prompt(CHUNKS), list(kv(CHUNKS))).stored
    return session


def flip_plane(stored: Bytes) -> None:
    stored[-1] ^= 1


def flip_first_plane(stored: Bytes) -> None:
    stored[-kv(1).nbytes] ^= 0x80


def flip_header(stored: Bytes) -> None:
    stored[50] ^= 1


def flip_sum(stored: Bytes) -> None:
    stored[HEADER_BYTES] ^= 1


def zero_a_page(stored: Bytes) -> None:
    stored[-4096:] = 0


def other_generation(stored: Bytes) -> None:
    """A whole, intact chunk of another write of the same key."""
    from kvpool.proto.chunk import write_prologue

    key = stored[40:72].tobytes()
    layout = int(stored[88:96].view("<u8")[0])
    write_prologue(
        stored,
        namespace=stored[16:40].tobytes(),
        key=key,
        part=0,
        generation=int(stored[72:80].view("<u8")[0]) + 1,
        nbytes=kv(1).nbytes,
        layout_id=layout,
        sums=stored[HEADER_BYTES : HEADER_BYTES + 32].view("<u8").tolist(),
        planes=4,
    )


def tamper(place: Place, session: Session, how: Callable[[Bytes], None], chunk: int) -> None:
    mapped = place.connect_mapped()
    looked = mapped.open(session.namespace)
    with looked.match(prompt(CHUNKS)) as match:
        how(extent(mapped, match, chunk))


DAMAGE = [flip_plane, flip_first_plane, flip_header, flip_sum, zero_a_page, other_generation]


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("chunk", [0, 2, CHUNKS - 1])
def test_exactly_the_damaged_chunk_is_corrupt_and_can_be_published_again(
    place: Place, session: Session, how: Callable[[Bytes], None], chunk: int
) -> None:
    if how is other_generation and not place.mapped:
        return  # the owner of the bytes knows their generation, and the receiver does not
    tokens, stored = prompt(CHUNKS), kv(CHUNKS)
    tamper(place, session, how, chunk)
    with session.match(tokens) as match:
        out = np.zeros_like(stored)
        pulled = session.pull(match, out)
    expected = [Outcome.HIT] * CHUNKS
    expected[chunk] = Outcome.CORRUPT
    assert pulled.outcomes.tolist() == expected
    assert not pulled.ok and pulled.chunks == chunk and pulled.unverified == 0
    assert pulled.nbytes == (CHUNKS - 1) * kv(1).nbytes
    good = [i for i in range(CHUNKS) if i != chunk]
    assert np.array_equal(out[good], stored[good])
    after = session.match(tokens)
    assert after.chunks == chunk and after.reason == Reason.QUARANTINED
    after.release()
    assert session.publish(tokens, list(stored)).stored
    with session.match(tokens) as match:
        assert session.pull(match, out).ok and np.array_equal(out, stored)


def test_a_damaged_plane_that_is_not_wanted_does_no_harm(place: Place, session: Session) -> None:
    tamper(place, session, flip_plane, 1)  # in the last layer
    out = np.zeros((CHUNKS, 2, *kv(1).shape[2:]), np.float32)
    with session.match(prompt(CHUNKS)) as match:
        assert session.pull(match, out, layers=LAYERS[:2]).ok
        last = np.zeros((CHUNKS, 1, *kv(1).shape[2:]), np.float32)
        pulled = session.pull(match, last, layers=LAYERS[3:])
    assert pulled.outcomes.tolist() == [0, Outcome.CORRUPT, 0, 0, 0]


def test_a_cut_plane_is_verified_at_its_source_or_counted(place: Place, session: Session) -> None:
    tokens = (CHUNK // 2, CHUNK)
    out = np.zeros(kv(1).nbytes // 2, np.uint8)
    with session.match(prompt(CHUNKS)) as match:
        pulled = session.pull(match, out, tokens=tokens)
        assert pulled.ok and pulled.unverified == (0 if place.mapped else 1)
    tamper(place, session, flip_first_plane, 0)  # before the wanted tokens
    with session.match(prompt(CHUNKS)) as match:
        pulled = session.pull(match, out, tokens=tokens)
    assert pulled.ok is not place.mapped


def test_without_verify_only_the_header_is_looked_at(place: Place, session: Session) -> None:
    out = np.zeros_like(kv(CHUNKS))
    tamper(place, session, flip_plane, 1)
    tamper(place, session, flip_header, 2)
    with session.match(prompt(CHUNKS)) as match:
        pulled = session.pull(match, out, verify=False)
    assert pulled.outcomes.tolist() == [0, 0, Outcome.CORRUPT, 0, 0]
    assert pulled.unverified == CHUNKS - 1


def test_chunks_without_checksums_are_counted_never_called_verified(client: Client) -> None:
    session = client.open(namespace())
    assert session.publish(prompt(2), list(kv(2)), checksum=False).stored
    with session.publication(prompt(3), first=2, checksum=False) as publication:
        for layer, plane in zip(LAYERS, kv(1)[0], strict=True):
            publication.write_layer(0, layer, plane)
        publication.commit()
    with session.match(prompt(3)) as match:
        out = np.zeros_like(kv(3))
        pulled = session.pull(match, out)
    assert pulled.ok and pulled.unverified == 3
    assert np.array_equal(out[:2], kv(2)) and np.array_equal(out[2], kv(1)[0])


def test_an_absent_sum_is_not_the_sum_zero(place: Place, session: Session) -> None:
    def zero_the_sums(stored: Bytes) -> None:
        stored[HEADER_BYTES : HEADER_BYTES + 32] = 0

    tamper(place, session, zero_the_sums, 0)
    with session.match(prompt(CHUNKS)) as match:
        pulled = session.pull(match, np.zeros_like(kv(CHUNKS)))
    assert pulled.outcomes.tolist() == [Outcome.CORRUPT, 0, 0, 0, 0]


# ---- time


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk takes 30 ms to be copied out of shared memory."""
    deliver = PartFormat.deliver

    def slow(*args: Any) -> Any:
        time.sleep(0.03)
        return deliver(*args)

    monkeypatch.setattr(PartFormat, "deliver", slow)


@pytest.fixture(params=["embedded", "unix async"])
def mapped(request: pytest.FixtureRequest) -> Any:
    embedded = request.param.startswith("embedded")
    made = Place(request.param, None if embedded else request.getfixturevalue("daemon"))
    yield made
    made.close()


def stored_in(place: Place) -> Session:
    session = place.connect().open(namespace())
    assert session.publish(prompt(CHUNKS), list(kv(CHUNKS))).stored
    return session


def expired_leases(status: dict[str, Any]) -> int:
    return sum(domain["counters"]["expired_leases"] for domain in status["domains"].values())


@pytest.mark.usefixtures("slow_copies")
def test_what_was_copied_before_the_lease_ended_stays_a_hit(mapped: Place) -> None:
    session, status = stored_in(mapped), mapped.connect().status
    out, before = np.zeros_like(kv(CHUNKS)), expired_leases(status())
    with session.match(prompt(CHUNKS), lease_s=0.1) as match:
        pulled = session.pull(match, out)
        again = session.pull(match, out)
        # The store counts from when it was asked, which is later than our asking.
        eventually(lambda: expired_leases(status()) > before, "the store's time is over, too")
        assert session.renew(match) == Outcome.EXPIRED
        assert session.borrow(match).outcomes.tolist() == [Outcome.EXPIRED] * CHUNKS
    hits = pulled.chunks
    assert 1 <= hits < CHUNKS
    assert pulled.outcomes.tolist() == [Outcome.HIT] * hits + [Outcome.EXPIRED] * (CHUNKS - hits)
    assert np.array_equal(out[:hits], kv(CHUNKS)[:hits])
    assert again.outcomes.tolist() == [Outcome.EXPIRED] * CHUNKS


@pytest.mark.usefixtures("slow_copies")
def test_what_was_copied_before_the_deadline_stays_a_hit(mapped: Place) -> None:
    session = stored_in(mapped)
    out = np.zeros_like(kv(CHUNKS))
    with session.match(prompt(CHUNKS)) as match:
        pulled = session.pull(match, out, deadline_s=0.1)
        hits = pulled.chunks
        rest = [Outcome.UNREACHABLE] * (CHUNKS - hits)
        assert 1 <= hits < CHUNKS and pulled.outcomes.tolist() == [Outcome.HIT] * hits + rest
        assert session.pull(match, out).ok  # the lease still holds


@pytest.mark.usefixtures("slow_copies")
def test_a_renewed_lease_lasts_for_a_slow_pull(mapped: Place) -> None:
    session = stored_in(mapped)
    with session.match(prompt(CHUNKS), lease_s=0.1) as match:
        assert session.renew(match, lease_s=5) == Outcome.OK
        assert session.pull(match, np.zeros_like(kv(CHUNKS))).ok


def test_a_publish_that_misses_its_deadline_leaves_nothing(
    mapped: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mapped.connect()
    session = client.open(namespace())
    write = PartFormat.write_payload

    def slow(*args: Any) -> Any:
        time.sleep(0.03)
        return write(*args)

    monkeypatch.setattr(PartFormat, "write_payload", slow)
    published = session.publish(prompt(CHUNKS), list(kv(CHUNKS)), deadline_s=0.1)
    assert published.outcomes.tolist() == [Outcome.UNREACHABLE] * CHUNKS
    assert "deadline" in published.text
    assert session.match(prompt(CHUNKS)).chunks == 0
    assert client.status()["domains"]["local"]["leases"] == 0


def test_an_exception_in_a_copy_reaches_the_caller_and_frees_everything(
    mapped: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = stored_in(mapped)

    def broken(*_: Any) -> Any:
        raise MemoryError("no room for a view")

    match = session.match(prompt(CHUNKS))
    monkeypatch.setattr(PartFormat, "deliver", broken)
    with pytest.raises(MemoryError):
        session.pull(match, np.zeros_like(kv(CHUNKS)))
    match.release()
    monkeypatch.undo()
    monkeypatch.setattr(PartFormat, "write_payload", broken)
    with pytest.raises(MemoryError):
        session.publish(prompt(1, seed=1), list(kv(1)))
    monkeypatch.undo()
    assert session.publish(prompt(1, seed=1), list(kv(1))).outcomes.tolist() == [Outcome.OK]


# ---- a store that answers nonsense


@pytest.mark.parametrize(
    "change",
    [
        {"hits": 9},
        {"extents": b""},
        {"extents": bytes(16 * (CHUNKS + 1))},
        {"extents": np.array([[1 << 60, 1]] * CHUNKS).tobytes()},
        {"extents": np.array([[-5, 1]] * CHUNKS).tobytes()},
    ],
)
def test_extents_that_cannot_be_are_never_read(
    embedded: Place, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    from kvpool.client.local import LocalChannel

    session = stored_in(embedded)
    call = LocalChannel.call

    def garbled(self: LocalChannel, body: Any, end: float) -> Any:
        answer = call(self, body, end)
        if type(answer).__name__ == "Matched":
            for field, value in change.items():
                setattr(answer, field, value)
        return answer

    monkeypatch.setattr(LocalChannel, "call", garbled)
    with session.match(prompt(CHUNKS)) as match:
        out = np.zeros_like(kv(CHUNKS))
        if match.chunks:
            pulled = session.pull(match, out)
            assert not pulled.ok and Outcome.HIT not in pulled.outcomes
        else:
            assert match.outcome == Outcome.UNREACHABLE and match.error


def test_a_connection_that_talked_nonsense_is_not_used_again(
    embedded: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.client.local import LocalChannel

    client = embedded.connect()
    session = client.open(namespace())
    session.publish(prompt(1), list(kv(1)))
    held: Match = session.match(prompt(1))
    call = LocalChannel.call

    def nonsense(self: LocalChannel, body: Any, end: float) -> Any:
        raise ProtocolError("not a frame")

    monkeypatch.setattr(LocalChannel, "call", nonsense)
    assert session.match(prompt(1)).outcome == Outcome.UNREACHABLE
    monkeypatch.setattr(LocalChannel, "call", call)
    time.sleep(0.06)
    with session.match(prompt(1)) as match:
        assert session.pull(match, np.zeros_like(kv(1))).ok
    stale = session.pull(held, np.zeros_like(kv(1)))
    assert stale.outcomes.tolist() == [Outcome.STALE_EPOCH] and "match again" in stale.error


def test_bytes_that_never_came_are_not_a_hit(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream breaks in the middle of a payload: no chunk of it is believed."""
    from kvpool.proto.errors import UnreachableError
    from kvpool.transfer.stream import Stream

    place = Place("tcp", daemon)
    session = stored_in(place)
    receive_into = Stream.receive_into

    def cut(self: Stream, buffers: Any, *, deadline: float) -> None:
        receive_into(self, buffers[:3], deadline=deadline)
        self.abort()
        raise UnreachableError("the peer closed the connection in mid-frame")

    with session.match(prompt(CHUNKS)) as match:
        out = np.zeros_like(kv(CHUNKS))
        monkeypatch.setattr(Stream, "receive_into", cut)
        pulled = session.pull(match, out)
        assert pulled.outcomes.tolist() == [Outcome.UNREACHABLE] * CHUNKS and pulled.nbytes == 0
        monkeypatch.undo()
        assert session.pull(match, out).ok and np.array_equal(out, kv(CHUNKS))
    place.close()


def test_batches_that_came_before_a_stream_broke_are_delivered(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpool.client import streaming
    from kvpool.proto.errors import UnreachableError

    place = Place("tcp", daemon)
    session = stored_in(place)
    monkeypatch.setattr(streaming, "TWO_FROM", 1 << 40)
    monkeypatch.setattr(streaming, "BATCH_BYTES", 2 * kv(1).nbytes)
    landed = Pulling.landed
    seen: list[int] = []

    def third(self: Pulling, i: int, head: Bytes, outcome: int) -> None:
        seen.append(i)
        if i >= 2:
            raise UnreachableError("gone")
        landed(self, i, head, outcome)

    monkeypatch.setattr(Pulling, "landed", third)
    with session.match(prompt(CHUNKS)) as match:
        out = np.zeros_like(kv(CHUNKS))
        pulled = session.pull(match, out)
    assert pulled.outcomes.tolist() == [Outcome.HIT] * 2 + [Outcome.UNREACHABLE] * 3
    assert pulled.error == "gone" and pulled.chunks == 2
    assert np.array_equal(out[:2], kv(CHUNKS)[:2])
    place.close()
