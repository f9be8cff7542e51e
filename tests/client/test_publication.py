"""Publications that are filled bit by bit, parts, lack of room: over every carrier."""

import threading
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, Outcome, Reason, Session
from kvpool.proto.errors import InvalidError, NamespaceError
from tests.client.samples import CHUNK, LAYERS, attention, kv, namespace, opaque, prompt
from tests.client.stores import Place, extent

OPEN = 255


@pytest.fixture
def client(place: Place) -> Client:
    return place.connect()


@pytest.fixture
def session(client: Client) -> Session:
    return client.open(namespace())


def pulled(session: Session, tokens: Any, chunks: int) -> Any:
    out = np.zeros_like(kv(chunks))
    with session.match(tokens) as match:
        assert match.chunks == chunks
        result = session.pull(match, out)
    assert result.ok and result.unverified == 0
    return out


# ---- chunk by chunk, layer by layer


def test_chunks_become_visible_commit_by_commit(session: Session) -> None:
    tokens, stored = prompt(3), kv(3)
    with session.publication(tokens) as publication:
        assert publication.outcomes.tolist() == [OPEN] * 3
        for chunk in range(3):
            assert publication.wants(chunk) and session.match(tokens).chunks == chunk
            publication.write(chunk, stored[chunk])
            publication.commit()
            assert not publication.wants(chunk)
    assert publication.outcomes.tolist() == [Outcome.OK] * 3
    assert np.array_equal(pulled(session, tokens, 3), stored)


def test_a_chunk_is_complete_with_its_last_layer(session: Session) -> None:
    tokens, stored = prompt(2), kv(2)
    with session.publication(tokens) as publication:
        for layer in reversed(LAYERS):  # in any order, all chunks of a layer at a time
            assert publication.commit().tolist() == [OPEN, OPEN]
            for chunk in range(2):
                publication.write_layer(chunk, layer, stored[chunk][LAYERS.index(layer)])
        assert publication.commit().tolist() == [Outcome.OK, Outcome.OK]
    assert np.array_equal(pulled(session, tokens, 2), stored)


def test_the_rest_of_a_prompt_may_be_published_later(session: Session) -> None:
    tokens, stored = prompt(4), kv(4)
    session.publish(tokens, list(stored[:1]))
    with session.publication(tokens, first=1, count=2) as publication:
        publication.write(0, stored[1])
        publication.write(1, list(stored[2]))
        publication.commit()
    assert np.array_equal(pulled(session, tokens, 3), stored[:3])


def test_chunks_that_exist_want_no_bytes(session: Session) -> None:
    tokens, stored = prompt(3), kv(3)
    session.publish(tokens, list(stored[:2]))
    with session.publication(tokens) as publication:
        assert [publication.wants(chunk) for chunk in range(3)] == [False, False, True]
        publication.write(0, kv(1, seed=5)[0])  # ignored
        publication.write(2, stored[2])
        outcomes = publication.commit().tolist()
    assert outcomes == [Outcome.EXISTS, Outcome.EXISTS, Outcome.OK]
    assert np.array_equal(pulled(session, tokens, 3), stored)


def test_what_is_not_committed_is_given_back(client: Client, session: Session) -> None:
    tokens = prompt(2)
    with pytest.raises(RuntimeError), session.publication(tokens) as publication:
        publication.write(0, kv(1)[0])
        raise RuntimeError("the engine failed")
    assert publication.outcomes.tolist() == [Outcome.MISS, Outcome.MISS]
    assert session.match(tokens).chunks == 0
    assert client.status()["domains"]["local"]["leases"] == 0
    assert session.publish(tokens, list(kv(2))).outcomes.tolist() == [Outcome.OK] * 2


def test_writes_of_a_wrong_size_are_refused(session: Session) -> None:
    with session.publication(prompt(1)) as publication:
        with pytest.raises(InvalidError, match=r"1 bytes .* 8192 bytes"):
            publication.write(0, b"x")
        with pytest.raises(InvalidError, match=r"1 bytes .* 2048 bytes"):
            publication.write_layer(0, LAYERS[0], b"x")
        with pytest.raises(NamespaceError, match="no plane 'layer 9'"):
            publication.write_layer(0, "layer 9", b"x")
        assert publication.wants(0)


@pytest.mark.parametrize(("first", "count"), [(-1, None), (0, 4), (3, 1), (2, 2), (0, -1)])
def test_chunks_that_the_prompt_does_not_have_cannot_be_published(
    session: Session, first: int, count: int | None
) -> None:
    with pytest.raises(InvalidError, match="not inside the 3 full chunks"):
        session.publication(prompt(3), first=first, count=count)


def test_an_empty_publication_is_no_error(session: Session) -> None:
    assert session.publish(prompt(0), []).stored
    with session.publication(prompt(3), first=3) as publication:
        assert publication.commit().size == 0


# ---- several writers


@pytest.mark.parametrize("place", ["embedded", "unix async"], indirect=True)  # tcp reserves nothing
def test_a_chunk_that_somebody_writes_is_left_to_them(place: Place, session: Session) -> None:
    tokens, stored = prompt(2), kv(2)
    other = place.connect().open(session.namespace)
    with session.publication(tokens) as publication:
        late = other.publish(tokens, list(stored))
        assert late.outcomes.tolist() == [Outcome.WRITING, Outcome.WRITING]
        match = other.match(tokens)
        assert match.chunks == 0 and match.reason == Reason.BEING_WRITTEN
        for chunk in range(2):
            publication.write(chunk, stored[chunk])
        publication.commit()
    assert np.array_equal(pulled(other, tokens, 2), stored)


@pytest.mark.parametrize("place", ["tcp"], indirect=True)  # the others reserve before they write
def test_the_first_commit_wins_over_a_stream(place: Place, session: Session) -> None:
    tokens, stored = prompt(1), kv(1)
    other = place.connect().open(session.namespace)
    with session.publication(tokens) as publication:
        publication.write(0, kv(1, seed=4)[0])
        assert other.publish(tokens, list(stored)).stored
        assert publication.commit().tolist() == [Outcome.EXISTS]
    assert np.array_equal(pulled(session, tokens, 1), stored)


# ---- parts


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_hit_of_the_scheduler_is_a_hit_of_every_rank(client: Client, ranks: int) -> None:
    names = [f"rank {rank}" for rank in range(ranks)]
    space = namespace(*[attention(name) for name in names])
    scheduler = client.open(space)
    workers = [client.open(space) for _ in names]
    tokens = prompt(2)
    for rank, (name, worker) in enumerate(zip(names, workers, strict=True)):
        assert scheduler.match(tokens).chunks == 0
        assert worker.publish(tokens, list(kv(2, seed=rank)), part=name).stored
    with scheduler.match(tokens) as match:
        assert match.chunks == 2
        for rank, (name, worker) in enumerate(zip(names, workers, strict=True)):
            assert worker.keys(tokens) == match.keys
            out = np.zeros_like(kv(2))
            with worker.adopt(match.lease, match.keys) as mine:
                assert worker.pull(mine, out, part=name).ok
            assert np.array_equal(out, kv(2, seed=rank))


def test_only_the_parts_that_are_asked_for_must_be_there(client: Client) -> None:
    session = client.open(namespace(attention("kv"), opaque("index", nbytes=256)))
    tokens, stored = prompt(2), kv(2)
    session.publish(tokens, list(stored), part="kv")
    partial = session.match(tokens)
    assert partial.chunks == 0 and partial.reason == Reason.PART_MISSING
    with session.match(tokens, parts=("kv",)) as match:
        out = np.zeros_like(stored)
        assert match.chunks == 2 and session.pull(match, out).ok
        with pytest.raises(InvalidError, match="not asked for"):
            session.pull(match, bytearray(512), part="index")
    assert np.array_equal(out, stored)


def test_the_part_must_be_said_where_there_are_several(client: Client) -> None:
    session = client.open(namespace(attention("kv"), opaque("index")))
    with pytest.raises(InvalidError, match="parts kv, index: say part="):
        session.publish(prompt(1), list(kv(1)))
    session.publish(prompt(1), list(kv(1)), part="kv")
    session.publish(prompt(1), [bytes(4096)], part="index")
    with session.match(prompt(1)) as match, pytest.raises(InvalidError, match="say part="):
        session.pull(match, kv(1))


def test_a_windowed_part_is_needed_only_at_the_end(place: Place, client: Client) -> None:
    state = opaque("state", nbytes=128, window=CHUNK)
    session = client.open(namespace(attention("kv"), state))
    tokens = prompt(3)
    session.publish(tokens, list(kv(3)), part="kv")
    assert session.match(tokens).chunks == 0
    last = np.arange(128, dtype=np.uint8)
    assert session.publish(tokens, [last], first=2, part="state").stored
    with session.match(tokens) as match:
        assert match.chunks == 3
        out = np.zeros((3, 128), np.uint8)
        outcomes = session.pull(match, out, part="state").outcomes.tolist()
        assert outcomes == [Outcome.MISS, Outcome.MISS, Outcome.HIT]
        tail = np.zeros(128, np.uint8)
        assert session.pull(match, tail, part="state", tokens=(2 * CHUNK, 3 * CHUNK)).ok
        assert np.array_equal(out[2], last) and np.array_equal(tail, last)
        first = session.pull(match, np.zeros(128, np.uint8), part="state", tokens=(0, CHUNK))
        assert first.outcomes.tolist() == [Outcome.MISS]
        if place.mapped:
            borrowed = session.borrow(match, part="state")
            assert [view.size for view in borrowed.views] == [0, 0, 128] and not borrowed.ok


# ---- no room


def test_a_full_store_says_busy_with_figures_and_goes_on_when_there_is_room(
    embedded: Place,
) -> None:
    client = embedded.connect()
    session = client.open(namespace(opaque(nbytes=1 << 20)))
    tokens = prompt(40)
    payloads = [np.full(1 << 20, i, np.uint8) for i in range(40)]
    published = session.publish(tokens, payloads)
    stored = int((published.outcomes == Outcome.OK).sum())
    assert 20 < stored < 40 and set(published.outcomes[stored:]) == {Outcome.BUSY}
    assert "leased" in published.text and not published.stored
    with session.match(tokens) as match:
        assert match.chunks == stored
        other = session.publish(prompt(1, seed=1), payloads[:1])
        assert other.outcomes.tolist() == [Outcome.BUSY] and "total" in other.text
    assert session.publish(prompt(1, seed=1), payloads[:1]).stored


def test_a_chunk_larger_than_the_pool_is_refused_when_it_is_opened(embedded: Place) -> None:
    from kvpool.proto.errors import TooLargeError

    with pytest.raises(TooLargeError, match="capacity"):
        embedded.connect().open(namespace(opaque(nbytes=64 << 20)))


def test_more_than_four_gib_in_a_batch_is_only_arithmetic() -> None:
    from kvpool.client.extents import PartFormat
    from kvpool.client.selection import select_chunks

    part = opaque(planes=4, nbytes=1 << 34)
    form = PartFormat.of(namespace(part), bytes(32), 0)
    assert form.payload_bytes == 1 << 36 and form.extent_bytes > 1 << 36
    selections = select_chunks(part, CHUNK, ["plane.3"], 0, 2 * CHUNK)
    assert sum(selection.nbytes for selection in selections) == 1 << 35
    assert selections[0].pieces == ((3, 3 << 34, 1 << 34),)


# ---- giving back


def test_an_extent_is_not_given_back_while_somebody_writes_to_it(
    embedded: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = embedded.connect()
    session = client.open(namespace())
    entered, go_on = threading.Event(), threading.Event()
    publication = session.publication(prompt(1))
    form = type(publication.state.form)
    write = form.write_payload

    def slow(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return write(*args)

    monkeypatch.setattr(form, "write_payload", slow)
    writer = threading.Thread(target=publication.write, args=(0, kv(1)[0]))
    writer.start()
    assert entered.wait(10)
    publication.abort()
    assert client.status()["domains"]["local"]["leases"] == 1
    go_on.set()
    writer.join()
    assert client.status()["domains"]["local"]["leases"] == 0


def test_what_expires_in_one_commit_stays_ours_in_the_rest(embedded: Place) -> None:
    """An expired commit gives back only its own chunks: others may be in the middle of a write."""
    client = embedded.connect()
    session = client.open(namespace())
    publication = session.publication(prompt(2), lease_s=0.01)
    publication.write(0, kv(1)[0])
    threading.Event().wait(0.02)
    assert publication.commit().tolist() == [Outcome.EXPIRED, OPEN]
    assert client.status()["domains"]["local"]["leases"] == 1
    publication.write(1, kv(1)[0])
    assert publication.commit().tolist() == [Outcome.EXPIRED, Outcome.EXPIRED]
    assert client.status()["domains"]["local"]["leases"] == 0


def test_a_published_header_says_what_it_holds(place: Place, session: Session) -> None:
    session.publish(prompt(1), list(kv(1)))
    reader = place.connect_mapped()
    looked = reader.open(session.namespace)
    with looked.match(prompt(1)) as match:
        stored = extent(reader, match, 0)
        generation = int(match.grant.extents[0, 0, 1]) if match.grant else 0
        assert stored[:6].tobytes() == b"KVPOOL" and stored[40:72].tobytes() == match.key(0)
        assert int(stored[72:80].view("<u8")[0]) == generation
