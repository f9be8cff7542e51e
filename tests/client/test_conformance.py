"""The API answers alike over every carrier: embedded, Unix socket, TCP; blocking and asyncio."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from kvpool.client import (
    Client,
    Extra,
    Namespace,
    Outcome,
    Reason,
    Session,
    connect,
    usable_prefix,
)
from kvpool.proto.errors import InvalidError, NamespaceError
from tests.client.samples import (
    CHUNK,
    HEADS,
    LAYERS,
    SHAPE,
    Tensor,
    attention,
    kv,
    namespace,
    opaque,
    prompt,
)
from tests.client.stores import Place


@pytest.fixture
def client(place: Place) -> Client:
    return place.connect()


@pytest.fixture
def session(client: Client) -> Session:
    return client.open(namespace())


def outcomes(*values: Outcome) -> list[int]:
    return [int(value) for value in values]


# ---- the whole of it


def test_a_conversation_goes_its_way_over_every_carrier(every_place: Place) -> None:
    client = every_place.connect(name="engine")
    session = client.open(namespace())
    tokens, stored = prompt(4, 0), kv(4)
    assert session.publish(tokens[: 2 * CHUNK], list(stored[:2])).stored
    with session.publication(tokens) as publication:
        publication.write(2, stored[2])
        for layer, plane in zip(LAYERS, stored[3], strict=True):
            publication.write_layer(3, layer, plane)
        assert publication.commit().tolist() == [Outcome.EXISTS] * 2 + [Outcome.OK] * 2
    match = session.match([*tokens, 1])
    with session.adopt(match.lease, match.keys) as again:
        out = np.zeros_like(stored)
        assert session.pull(again, out).ok and np.array_equal(out, stored)
    half = np.zeros_like(stored[:, [2], :, :, : CHUNK // 2])
    into = [np.ascontiguousarray(half[0])]
    assert session.pull(match, into, layers=["layer.2"], tokens=(0, CHUNK // 2)).ok
    assert np.array_equal(into[0], stored[0, [2], :, :, : CHUNK // 2])
    if every_place.mapped:
        assert session.borrow(match)[1].tobytes() == stored[1].tobytes()
    assert session.renew(match) == Outcome.OK
    match.release()
    assert session.pin(tokens) == [Outcome.HIT] * 4 and session.unpin(tokens) == Outcome.OK
    assert session.hint(tokens, ended=True)
    assert [chunk.tier for chunk in session.explain(tokens)] == ["DRAM"] * 4
    assert session.keys(tokens)[:32] in set(client.keys(page=500))
    assert session.delete(tokens[:CHUNK]) == [Outcome.OK] and session.clear() == 3
    assert client.ping() > 0 and client.status()["state"] == "ok"


# ---- whole prompts


def test_what_was_published_is_matched_and_pulled(session: Session) -> None:
    tokens, stored = prompt(3), kv(3)
    assert session.match(tokens).chunks == 0
    published = session.publish(tokens, list(stored))
    assert published.stored and published.nbytes == stored.nbytes
    with session.match([*tokens, 1, 2]) as match:
        assert match.tokens == 3 * CHUNK and match.outcome == Outcome.HIT
        out = np.empty_like(stored)
        pulled = session.pull(match, out)
    assert pulled.ok and pulled.chunks == 3 and pulled.nbytes == stored.nbytes
    assert pulled.unverified == 0
    assert np.array_equal(out, stored)


def test_a_match_ends_at_the_first_chunk_that_is_missing(session: Session) -> None:
    tokens = prompt(4)
    session.publish(tokens, list(kv(2)))
    match = session.match(tokens)
    assert match.chunks == 2 and match.outcome == Outcome.MISS
    assert match.reason == Reason.NEVER_STORED
    assert match.outcomes.tolist() == outcomes(Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.MISS)


@pytest.mark.parametrize("length", [0, 1, CHUNK - 1])
def test_a_prompt_without_a_full_chunk_matches_nothing(session: Session, length: int) -> None:
    match = session.match(list(range(length)))
    assert match.chunks == 0 and match.lease == b"" and match.outcomes.size == 0
    assert session.pull(match, np.empty(0)).ok


@pytest.mark.parametrize(
    ("tokens", "usable"), [(1, 0), (CHUNK, 8), (CHUNK + 1, CHUNK), (2 * CHUNK, CHUNK + 8)]
)
def test_the_last_token_is_never_usable_and_the_tail_is_never_rounded_up(
    session: Session, tokens: int, usable: int
) -> None:
    stored = prompt(2, 0)
    session.publish(stored, list(kv(2)))
    with session.match(stored[:tokens]) as match:
        assert match.usable_prefix(tokens, block_tokens=8) == usable


def test_blocks_of_no_tokens_are_refused() -> None:
    with pytest.raises(InvalidError, match="at least 1 token"):
        usable_prefix(32, 33, 0)


def test_what_one_client_published_another_reads_at_once(place: Place, session: Session) -> None:
    tokens, stored = prompt(1), kv(1)
    other = place.connect().open(session.namespace)
    assert session.publish(tokens, list(stored)).stored
    with other.match(tokens) as match:
        out = np.empty_like(stored)
        assert other.pull(match, out).ok
    assert np.array_equal(out, stored)


def test_the_source_may_be_overwritten_after_publish(session: Session) -> None:
    tokens, source = prompt(2), kv(2)
    before = source.copy()
    session.publish(tokens, list(source))
    source[:] = -1
    with session.match(tokens) as match:
        out = np.empty_like(before)
        session.pull(match, out)
    assert np.array_equal(out, before)


def test_a_second_publish_writes_nothing(session: Session) -> None:
    tokens = prompt(2)
    session.publish(tokens, list(kv(2)))
    again = session.publish(tokens, list(kv(2, seed=1)))
    assert again.outcomes.tolist() == outcomes(Outcome.EXISTS, Outcome.EXISTS)
    assert again.stored and again.nbytes == 0


def test_a_conversation_grows_by_what_is_new(session: Session) -> None:
    tokens = prompt(6, 0)
    session.publish(tokens[: 2 * CHUNK], list(kv(2)))
    grown = session.publish(tokens, list(kv(6)))
    assert grown.outcomes.tolist() == outcomes(*[Outcome.EXISTS] * 2, *[Outcome.OK] * 4)
    assert grown.nbytes == kv(4).nbytes
    further = session.publish(tokens, list(kv(6))[4:], first=4)
    assert further.outcomes.tolist() == outcomes(Outcome.EXISTS, Outcome.EXISTS)


def test_a_chunk_without_its_predecessor_is_refused(session: Session) -> None:
    published = session.publish(prompt(4), list(kv(2)), first=2)
    assert published.outcomes.tolist() == outcomes(Outcome.NO_PARENT, Outcome.NO_PARENT)
    assert not published.stored


@pytest.mark.parametrize("chunks", [1, 31, 32, 33, 1000])
def test_a_batch_may_have_any_number_of_chunks(client: Client, chunks: int) -> None:
    session = client.open(namespace(opaque(nbytes=64)))
    tokens = prompt(chunks, 0)
    stored = np.random.default_rng(chunks).integers(0, 256, (chunks, 64), np.uint8)
    assert session.publish(tokens, list(stored)).stored
    with session.match(tokens) as match:
        out = session.payload(chunks)
        assert session.pull(match, out).ok
    assert np.array_equal(out, stored)


# ---- destinations


def published(session: Session, chunks: int = 3) -> tuple[list[int], Any]:
    tokens, stored = prompt(chunks), kv(chunks)
    assert session.publish(tokens, list(stored)).stored
    return tokens, stored


def test_a_chunk_may_be_one_buffer_or_a_list_of_planes(session: Session) -> None:
    tokens, stored = prompt(2), kv(2)
    assert session.publish(tokens, [list(stored[0]), stored[1]]).stored
    with session.match(tokens) as match:
        whole = [np.empty_like(chunk) for chunk in stored]
        planes = [[np.empty_like(plane) for plane in chunk] for chunk in stored]
        mixed = [np.empty_like(stored[0]), [np.empty_like(plane) for plane in stored[1]]]
        for into in (whole, planes, mixed):
            assert session.pull(match, into).ok
    assert np.array_equal(whole, stored) and np.array_equal(planes, stored)
    assert np.array_equal(mixed[0], stored[0]) and np.array_equal(mixed[1], stored[1])


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "c8", "V64", "i8"])
def test_a_buffer_may_have_any_dtype(session: Session, dtype: str) -> None:
    tokens, stored = published(session, 2)
    out = np.zeros(stored.nbytes // np.dtype(dtype).itemsize, dtype)
    with session.match(tokens) as match:
        assert session.pull(match, out).ok
    assert out.tobytes() == stored.tobytes()


def test_buffers_may_be_bytearrays_memoryviews_and_tensors(session: Session) -> None:
    tokens, stored = prompt(3), kv(3)
    sources = [stored[0].tobytes(), memoryview(stored[1]), Tensor(stored[2])]
    assert session.publish(tokens, sources).stored
    into = [bytearray(stored[0].nbytes), memoryview(bytearray(stored[0].nbytes))]
    landed = np.empty_like(stored[2])
    with session.match(tokens) as match:
        assert session.pull(match, [*into, Tensor(landed)]).ok
    assert [bytes(one) for one in into] == [stored[0].tobytes(), stored[1].tobytes()]
    assert np.array_equal(landed, stored[2])


if importlib.util.find_spec("torch") is not None:  # an extra; the stand-in above is always tested

    def test_tensors_of_torch_are_buffers(session: Session) -> None:
        import torch

        tokens, stored = prompt(2), torch.randn(2, *SHAPE)
        assert session.publish(tokens, list(stored)).stored
        landed = torch.empty_like(stored)
        with session.match(tokens) as match:
            assert session.pull(match, landed).ok
        assert torch.equal(landed, stored)


@pytest.mark.parametrize(
    "layers",
    [
        ["layer.2"],
        ["layer.3", "layer.0"],
        ["layer.0", "layer.2", "layer.1", "layer.3"],
        ["layer.1", "layer.1"],
        list(LAYERS),
    ],
)
@pytest.mark.parametrize("by_plane", [False, True])
def test_layers_come_in_the_order_that_was_asked_for(
    session: Session, layers: list[str], by_plane: bool
) -> None:
    tokens, stored = published(session)
    wanted = stored[:, [LAYERS.index(layer) for layer in layers]]
    out = np.zeros(wanted.shape, wanted.dtype)
    with session.match(tokens) as match:
        into: Any = [list(chunk) for chunk in out] if by_plane else out
        pulled = session.pull(match, into, layers=layers)
    assert pulled.ok and pulled.unverified == 0
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 3 * CHUNK), (5, 11), (5, 2 * CHUNK + 3), (CHUNK, 2 * CHUNK), (CHUNK + 1, 3 * CHUNK)],
)
@pytest.mark.parametrize("layers", [None, ["layer.2", "layer.1"]])
def test_a_token_range_may_begin_and_end_inside_chunks(
    session: Session, start: int, end: int, layers: list[str] | None
) -> None:
    tokens, stored = published(session)
    planes = [LAYERS.index(layer) for layer in layers or LAYERS]
    into, wanted = [], []
    for chunk in range(start // CHUNK, -(-end // CHUNK)):
        low, high = max(start - chunk * CHUNK, 0), min(end - chunk * CHUNK, CHUNK)
        wanted.append(stored[chunk][planes][:, :, :, low:high])
        into.append(np.zeros((len(planes), HEADS, 2, high - low, SHAPE[-1]), np.float32))
    with session.match(tokens) as match:
        assert session.pull(match, into, layers=layers, tokens=(start, end)).ok
    assert all(np.array_equal(a, b) for a, b in zip(into, wanted, strict=True))


def test_an_empty_token_range_is_an_empty_pull(session: Session) -> None:
    tokens, _ = published(session)
    with session.match(tokens) as match:
        pulled = session.pull(match, np.empty(0), tokens=(CHUNK, CHUNK))
    assert pulled.ok and pulled.nbytes == 0 and pulled.outcomes.size == 0


def test_borrowed_views_are_the_payloads_without_a_copy(place: Place, session: Session) -> None:
    tokens, stored = published(session)
    with session.match(tokens) as match:
        if not place.mapped:
            with pytest.raises(InvalidError, match="pull instead"):
                session.borrow(match)
            return
        borrowed = session.borrow(match)
        assert borrowed.ok and len(borrowed) == 3
        for view, chunk in zip(borrowed.views, stored, strict=True):
            assert view.tobytes() == chunk.tobytes()
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True


# ---- what can never be right


@pytest.mark.parametrize(
    ("payloads", "text"),
    [
        ([b""], "0 bytes .* 8192 bytes"),
        ([bytes(8191)], "8191 bytes .* 8192 bytes"),
        ([bytes(8192), bytes(8193)], "8193 bytes .* 8192 bytes"),
        ([[bytes(2048)] * 3], "3 buffers of 2048 bytes .* 4 buffers of 2048 bytes"),
        ([[bytes(2048)] * 3 + [b""]], "4 buffers of 2048, 2048, 2048, 0 bytes"),
        ([bytes(8192)] * 3, r"chunks \[0, 3\) are not inside the 2"),
        ([object()], "object has no bytes"),
    ],
)
def test_payloads_of_a_wrong_size_are_refused_before_anything_is_reserved(
    client: Client, session: Session, payloads: list[Any], text: str
) -> None:
    with pytest.raises(InvalidError, match=text):
        session.publish(prompt(2), payloads)
    assert all(chunk.reason == Reason.NEVER_STORED for chunk in session.explain(prompt(2)))
    assert client.status()["domains"]["local"]["leases"] == 0


def test_destinations_of_a_wrong_size_are_refused_before_any_byte_moves(session: Session) -> None:
    tokens, stored = published(session, 2)
    nbytes = stored[0].nbytes
    readonly = np.zeros_like(stored)
    readonly.flags.writeable = False
    with session.match(tokens) as match:
        for into, text in [
            (bytearray(nbytes), f"{nbytes} bytes .* {2 * nbytes} bytes"),
            ([bytearray(nbytes)], "1 buffers .* 2 chunks"),
            ([bytearray(nbytes), bytearray(1)], f"1 bytes .* {nbytes} bytes"),
            (readonly, "read-only"),
            (np.zeros((2 * nbytes, 2), np.uint8)[:, 0], "not C-contiguous"),
        ]:
            with pytest.raises(InvalidError, match=text):
                session.pull(match, into)


def test_ranges_layers_and_parts_that_do_not_exist_are_refused(session: Session) -> None:
    tokens, stored = published(session)
    with session.match(tokens) as match:
        for wrong in [(-1, 4), (4, 3), (0, 3 * CHUNK + 1)]:
            with pytest.raises(InvalidError, match="token range"):
                session.pull(match, stored, tokens=wrong)
        with pytest.raises(NamespaceError, match=r"no plane 'layer\.9'"):
            session.pull(match, stored, layers=["layer.9"])
        with pytest.raises(InvalidError, match="empty list of layers"):
            session.pull(match, stored, layers=[])
        with pytest.raises(NamespaceError, match="no part 'other'"):
            session.pull(match, stored, part="other")


def test_opaque_planes_cannot_be_cut_by_tokens(client: Client) -> None:
    session = client.open(namespace(opaque()))
    session.publish(prompt(1), [bytes(4096)])
    with session.match(prompt(1)) as match, pytest.raises(InvalidError, match="cannot be cut"):
        session.pull(match, bytearray(2048), tokens=(0, CHUNK // 2))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e12])
def test_durations_that_do_not_exist_are_refused(session: Session, seconds: float) -> None:
    with pytest.raises(InvalidError, match="duration"):
        session.match(prompt(1), lease_s=seconds)
    with pytest.raises(InvalidError, match="duration"):
        session.pin(prompt(1), ttl_s=seconds)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e9])
def test_a_deadline_without_end_is_refused(session: Session, seconds: float) -> None:
    with pytest.raises(InvalidError, match="deadline"):
        session.match(prompt(1), deadline_s=seconds)


def test_a_deadline_that_has_passed_is_an_unreachable_store(session: Session) -> None:
    assert session.match(prompt(1), deadline_s=0).outcome == Outcome.UNREACHABLE


def test_keys_that_are_not_whole_are_refused(session: Session) -> None:
    with pytest.raises(InvalidError, match="33 bytes"):
        session.match(bytes(33))


# ---- identity


def test_packed_keys_are_a_prompt(session: Session) -> None:
    tokens, stored = published(session, 2)
    keys = session.keys(tokens)
    with session.match(keys) as match:
        out = np.empty_like(stored)
        assert match.keys == keys and session.pull(match, out).ok
    assert np.array_equal(out, stored)
    assert session.delete(keys[32:]) == [Outcome.OK]
    assert session.match(tokens).chunks == 1


def test_a_foreign_key_scheme_takes_page_hashes(client: Client) -> None:
    session = client.open(namespace(key_scheme="foreign:engine"))
    pages = [bytes([page]) * 8 for page in range(3)]
    stored = kv(3)
    assert session.publish(pages, list(stored)).stored
    with session.match([*pages[:2], b"another"]) as match:
        out = np.empty_like(stored[:2])
        assert match.chunks == 2 and session.pull(match, out).ok
    assert np.array_equal(out, stored[:2])
    with pytest.raises(InvalidError, match="page hash"):
        session.match([1, 2, 3])
    with pytest.raises(InvalidError, match="extras"):
        session.match(pages, extras=[Extra(0, b"image")])


def test_an_image_changes_the_key_of_its_chunk_and_of_all_later_ones(session: Session) -> None:
    tokens, cat, dog = prompt(3), Extra(CHUNK + 2, b"cat"), Extra(CHUNK + 2, b"dog")
    session.publish(tokens, list(kv(3)), extras=[cat])
    assert session.match(tokens, extras=[cat]).chunks == 3
    assert session.match(tokens, extras=[dog]).chunks == 1
    assert session.match(tokens).chunks == 1
    unknown = session.match(tokens, extras=[Extra(CHUNK + 2, None)])
    assert unknown.chunks == 1 and unknown.outcomes.size == 1


@pytest.mark.parametrize("none", [None, (), []])
def test_no_extras_are_no_extras(session: Session, none: Any) -> None:
    assert session.keys(prompt(2), none) == session.keys(prompt(2))


OTHER = {
    "model": "another",
    "revision": "2",
    "kv_dtype": "float16",
    "kv_scales": "per-head",
    "layout": "native:engine",
    "chunk_tokens": 2 * CHUNK,
    "parts": (attention(), opaque("state")),
    "key_scheme": "foreign:engine",
    "adapter": "lora",
    "rope": "yarn",
    "salt": "pepper",
}


def test_every_field_of_the_namespace_alone_separates(client: Client) -> None:
    assert set(OTHER) == set(Namespace.__dataclass_fields__)
    one = namespace()
    session = client.open(one)
    tokens = prompt(2)
    session.publish(tokens, list(kv(2)))
    for field, value in OTHER.items():
        values = {name: getattr(one, name) for name in Namespace.__dataclass_fields__}
        other = client.open(Namespace(**values | {field: value}))
        asked: Any = [b"page"] if field == "key_scheme" else tokens
        assert other.match(asked).chunks == 0, field
    assert client.open(one).match(tokens).chunks == 2


# ---- the other verbs


def test_a_lease_may_be_adopted_by_another_session(place: Place, session: Session) -> None:
    tokens, stored = published(session)
    worker = place.connect().open(session.namespace)
    scheduled = session.match(tokens)
    with worker.adopt(scheduled.lease, scheduled.keys) as match:
        scheduled.release()
        out = np.empty_like(stored)
        assert match.chunks == 3 and worker.pull(match, out).ok
    assert np.array_equal(out, stored)
    gone = worker.adopt(match.lease or bytes(16), scheduled.keys)
    assert gone.chunks == 0 and gone.outcome == Outcome.STALE_EPOCH


def test_a_lease_cannot_be_adopted_with_too_few_keys(session: Session) -> None:
    tokens, _ = published(session)
    with session.match(tokens) as match, pytest.raises(InvalidError, match="3 chunks, but 2 keys"):
        session.adopt(match.lease, match.keys[:64])


def test_a_lease_can_be_renewed_while_it_lives(session: Session) -> None:
    tokens, _ = published(session)
    with session.match(tokens, lease_s=5) as match:
        assert session.renew(match, lease_s=60) == Outcome.OK
        assert 50 < match.seconds_left <= 60
    assert session.renew(match) == Outcome.STALE_EPOCH


def test_a_peek_holds_nothing(client: Client, session: Session) -> None:
    tokens, stored = published(session)
    match = session.match(tokens, peek=True)
    assert match.chunks == 3 and match.lease == b"" and match.seconds_left == 0
    assert client.status()["domains"]["local"]["leases"] == 0
    assert not session.pull(match, np.empty_like(stored)).ok


def test_releasing_twice_or_never_is_harmless(client: Client, session: Session) -> None:
    tokens, stored = published(session)
    match = session.match(tokens)
    match.release()
    match.release()
    assert session.pull(match, np.empty_like(stored)).outcomes.tolist() == [Outcome.STALE_EPOCH] * 3
    session.match(tokens)  # dropped at once
    assert client.status()["domains"]["local"]["leases"] == 0


def test_pinned_chunks_say_so_until_they_are_unpinned(session: Session) -> None:
    tokens, _ = published(session, 2)
    assert session.pin([*tokens, *prompt(1)]) == outcomes(Outcome.HIT, Outcome.HIT, Outcome.MISS)
    assert [chunk.pins for chunk in session.explain(tokens)] == [1, 1]
    assert session.unpin([*tokens, *prompt(1)]) == Outcome.OK
    assert session.unpin([*tokens, *prompt(1)]) == Outcome.MISS
    assert [chunk.pins for chunk in session.explain(tokens)] == [0, 0]
    assert session.pin([1]) == [] and session.unpin([1]) == Outcome.MISS


def test_deleting_is_idempotent(session: Session) -> None:
    tokens, _ = published(session, 2)
    assert session.delete(tokens) == outcomes(Outcome.OK, Outcome.OK)
    assert session.delete(tokens) == outcomes(Outcome.MISS, Outcome.MISS)
    assert session.delete([1]) == []
    match = session.match(tokens)
    assert match.chunks == 0 and match.reason == Reason.DELETED


def test_what_a_lease_holds_outlives_its_deletion(session: Session) -> None:
    tokens, stored = published(session)
    with session.match(tokens) as match:
        session.delete(tokens)
        session.publish(tokens, list(kv(3, seed=9)))
        out = np.empty_like(stored)
        assert session.pull(match, out).ok
    assert np.array_equal(out, stored)


def test_clearing_a_namespace_leaves_the_others(client: Client, session: Session) -> None:
    other = client.open(namespace())
    published(session)
    published(other)
    assert session.clear() == 3
    assert session.match(prompt(3)).chunks == 0 and other.match(prompt(3)).chunks == 3


def test_all_keys_can_be_listed_page_by_page(client: Client, session: Session) -> None:
    tokens, _ = published(session, 5)
    keys = session.keys(tokens)
    wanted = {keys[i : i + 32] for i in range(0, len(keys), 32)}
    assert wanted <= set(client.keys(page=300))


def test_explain_tells_chunk_by_chunk_what_holds_it(session: Session) -> None:
    tokens, _ = published(session, 2)
    with session.match(tokens[:CHUNK]):
        first, second, third = session.explain([*tokens, *prompt(1)])
    assert (first.outcome, first.tier, first.parts) == (Outcome.HIT, "DRAM", ("all",))
    assert (first.leases, second.leases) == (1, 0) and first.children == 1
    assert first.nbytes > kv(1).nbytes and first.age_s < 60
    assert (third.outcome, third.tier, third.parts) == (Outcome.MISS, "none", ())
    assert third.reason == Reason.NEVER_STORED and session.explain([1]) == []


def test_a_stop_reason_reaches_the_policy_without_a_probability(
    client: Client, session: Session
) -> None:
    def reached() -> int:
        ends = client.status()["domains"]["local"]["counters"]["hint_ends"]
        return int(ends.get("passed_on", 0))

    tokens, _ = published(session)
    before = reached()
    assert session.hint(tokens, stop_reason="tool_calls") and reached() == before + 1
    assert session.hint(tokens, stop_reason="boredom") and reached() == before + 1


def test_two_pinners_must_both_unpin(session: Session) -> None:
    tokens, _ = published(session, 2)
    session.pin(tokens)
    session.pin(tokens, ttl_s=60)
    assert session.unpin(tokens) is Outcome.OK and session.explain(tokens)[0].pins == 1
    assert session.unpin(tokens) is Outcome.OK and session.explain(tokens)[0].pins == 0
    assert session.unpin(tokens) is Outcome.MISS


def test_hints_are_counted_and_nonsense_is_refused(client: Client, session: Session) -> None:
    tokens, _ = published(session)
    before = client.status()["domains"]["local"]["counters"]["hints"]
    assert session.hint(tokens, will_continue=0.5, gap_s=2, ttl_s=60, stop_reason="length")
    assert session.hint(tokens, will_continue=True, ended=True, priority=-3)
    counters = client.status()["domains"]["local"]["counters"]
    assert counters["hints"] == before + 2
    said = {"will_continue", "gap_s", "ttl_s", "stop_reason", "ended", "priority"}
    assert said <= counters["hint_kinds"].keys() and counters["hint_ends"]["passed_on"] >= 2
    for wrong in ({"will_continue": 2}, {"gap_s": -1}, {"ttl_s": -1}):
        with pytest.raises(InvalidError):
            session.hint(tokens, **wrong)  # type: ignore[arg-type]


def test_a_namespace_that_can_never_meet_its_sibling_is_warned_about(client: Client) -> None:
    one = namespace()
    client.open(one)
    values = {name: getattr(one, name) for name in Namespace.__dataclass_fields__}
    twin = client.open(Namespace(**values | {"layout": "native:engine"}))
    assert "layout" in twin.warning


def test_a_ping_is_one_round_trip(client: Client) -> None:
    assert 0 < client.ping() < 5


def test_a_closed_client_says_so(place: Place) -> None:
    client = place.connect()
    session = client.open(namespace())
    client.close()
    client.close()
    for verb in (lambda: session.match(prompt(1)), client.status, client.ping):
        with pytest.raises(InvalidError, match="closed"):
            verb()


@pytest.mark.parametrize("address", ["", "unix:", "tcp://host", "/run/socket", 7])
def test_an_address_that_cannot_be_dialled_is_refused(address: Any) -> None:
    with pytest.raises(InvalidError):
        connect(address)
