"""The store's verbs, one sentence at a time. Faults are in `test_faults_store`."""

from __future__ import annotations

import pytest

from kvpool.proto.errors import (
    BusyError,
    DeniedError,
    InvalidError,
    NamespaceError,
    StaleError,
    TooLargeError,
)
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.store.pins import CLAIMS_MAX
from kvpool.store.records import KEYS_MAX
from kvpool.store.store import Store, StoreOptions
from tests.store.world import (
    SEGMENT,
    Clock,
    Entropy,
    World,
    chain,
    extents,
    granted,
    namespace,
    part,
)

CHUNK = 4096
"""Bytes of a chunk in most tests: four per segment, sixteen per world."""
WHOLE = part("all", CHUNK)


# Sessions and namespaces


def test_a_namespace_that_is_opened_twice_is_one() -> None:
    world = World()
    first, warning = world.store.open_namespace("red", namespace(WHOLE))
    again, _ = world.store.open_namespace("red", namespace(WHOLE))
    assert first is again and warning == ""


def test_tenants_never_share_a_namespace() -> None:
    world = World()
    red, blue = world.open(WHOLE, tenant="red"), world.open(WHOLE, tenant="blue")
    assert red.id != blue.id and red.digest != blue.digest
    a, b = world.session("red"), world.session("blue")
    world.publish(a, red, chain("x", 2))
    assert world.pull(a, red, chain("x", 2)) == 2
    assert world.pull(b, blue, chain("x", 2)) == 0
    for call in (world.store.match, world.store.pin, world.store.delete, world.store.explain):
        with pytest.raises(DeniedError, match="not opened by tenant 'blue'"):
            call(b, red.id, chain("x", 1)[0])
    with pytest.raises(DeniedError):
        world.store.clear(b, red.id)


def test_a_namespace_that_differs_only_in_layout_is_warned_about_with_both() -> None:
    world = World()
    world.open(WHOLE)
    _, warning = world.store.open_namespace("red", namespace(part("all", 2048)))
    assert "can never share KV" in warning and "parts: " in warning
    assert world.store.open_namespace("red", namespace(WHOLE, model="other"))[1] == ""


def test_a_tenant_cannot_open_namespaces_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.store.namespaces.NAMESPACES_MAX", 2)
    world = World()
    for model in ("one", "two"):
        world.store.open_namespace("red", namespace(WHOLE, model=model))
    with pytest.raises(BusyError, match="tenant 'red' has opened 2 namespaces"):
        world.store.open_namespace("red", namespace(WHOLE, model="three"))
    world.store.open_namespace("red", namespace(WHOLE, model="two"))  # known already
    world.store.open_namespace("blue", namespace(WHOLE, model="three"))


def test_a_closed_session_is_refused_and_leaves_nothing() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 1))
    match = world.store.match(session, known.id, chain("x", 1)[0])
    world.store.close_session(session)
    world.store.close_session(session)
    assert len(world.store.leases) == 0
    with pytest.raises(StaleError):
        world.store.match(session, known.id, chain("x", 1)[0])
    with pytest.raises(StaleError):
        world.store.adopt(session, match.lease)
    assert world.store.release(session, match.lease) is Outcome.STALE_EPOCH


def test_a_part_larger_than_a_region_or_segment_is_refused_with_the_limit() -> None:
    world = World()
    with pytest.raises(TooLargeError, match="65536 bytes; raise --capacity"):
        world.open(part("all", 5 * SEGMENT))
    with pytest.raises(TooLargeError, match="a segment of 16384"):
        world.open(part("all", SEGMENT + 4096))
    assert world.open(WHOLE).id == 1


def test_a_region_that_is_no_multiple_of_the_segment_loses_only_its_end() -> None:
    options = StoreOptions(region_bytes=3 * SEGMENT + 4096, chunks=100, segment_bytes=SEGMENT)
    store = Store(options, clock=Clock(), entropy=Entropy())
    session = store.open_session("red", mapped=True)
    known, _ = store.open_namespace("red", namespace(part("all", SEGMENT)))
    for _ in range(2):
        store.add_region()
    got = store.reserve(session, known.id, b"", b"".join(chain("x", 7)))
    starts = [address for _, address, _ in granted(got)]
    second = options.region_bytes
    inside = [0, SEGMENT, 2 * SEGMENT, second, second + SEGMENT, second + 2 * SEGMENT]
    assert sorted(starts) == inside
    assert got.outcomes.ravel().tolist() == [Outcome.OK] * 6 + [Outcome.BUSY]
    store.check_integrity()
    store.release(session, got.lease)
    store.check_integrity()


def test_the_pool_may_grow_while_it_is_used() -> None:
    world = World(segments=1)
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 4))
    world.store.add_region()
    world.memory += bytes(SEGMENT)
    world.publish(session, known, chain("x", 8, 4), parent=chain("x", 4)[-1])
    assert world.pull(session, known, chain("x", 8)) == 8
    assert world.store.capacity_bytes == 2 * SEGMENT and world.store.regions == 2


# Match


def test_a_match_ends_at_the_first_chunk_that_is_not_stored_and_says_why() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 3))
    match = world.store.match(session, known.id, b"".join(chain("x", 5)))
    assert (match.hits, match.outcome, match.reason) == (3, Outcome.MISS, Reason.NEVER_STORED)
    assert len(list(extents(match, 1))) == 3
    match = world.store.match(session, known.id, b"".join(chain("x", 3)))
    assert (match.hits, match.outcome, match.reason) == (3, Outcome.HIT, Reason.UNKNOWN)
    assert match.lease_s == 30.0


@pytest.mark.parametrize("length", [1, 4, 5, 12])
def test_short_and_long_chains_are_matched_alike(length: int) -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", length))
    assert world.pull(session, known, chain("x", length)) == length
    assert world.pull(session, known, chain("x", length + 3)) == length
    assert world.pull(session, known, [*chain("y", 1), *chain("x", length)]) == 0


def test_a_peek_leaves_no_lease_no_count_and_no_use() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("old", 1))
    world.publish(session, known, chain("new", 15))
    assert world.hits(session, known, chain("old", 1)) == 1
    assert len(world.store.leases) == world.store.counters.matches == 0
    world.publish(session, known, chain("more", 1))
    assert world.hits(session, known, chain("old", 1)) == 0, "a peek made it young"


def test_a_match_may_start_in_the_middle_of_a_chain() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 6))
    assert world.pull(session, known, chain("x", 6, 4)) == 2
    world.store.delete(session, known.id, chain("x", 6)[1])
    assert world.pull(session, known, chain("x", 6, 4)) == 0, "its chain is cut above"


def test_keys_must_be_whole_and_at_least_one() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    for keys in (b"", bytes(31), bytes(33)):
        for call in (
            lambda k: world.store.match(session, known.id, k),
            lambda k: world.store.reserve(session, known.id, b"", k),
            lambda k: world.store.pin(session, known.id, k),
            lambda k: world.store.unpin(session, known.id, k),
            lambda k: world.store.delete(session, known.id, k),
            lambda k: world.store.hint(session, known.id, k),
            lambda k: world.store.explain(session, known.id, k),
        ):
            with pytest.raises(InvalidError, match=r"not a positive multiple of 32"):
                call(keys)


@pytest.mark.parametrize("call", ["match", "pin", "unpin", "delete", "hint", "explain"])
def test_more_keys_than_a_request_may_have_are_refused_with_the_limit(call: str) -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = bytes(KEY_BYTES) * (KEYS_MAX + 1)
    with pytest.raises(InvalidError, match=f"{KEYS_MAX + 1} keys exceed the limit of {KEYS_MAX}"):
        getattr(world.store, call)(session, known.id, keys)


def test_a_part_beyond_the_table_is_refused_and_zero_means_all() -> None:
    world = World()
    known, session = world.open(part("a", 1024), part("b", 2048)), world.session()
    world.publish(session, known, chain("x", 1), parts=0)
    match = world.store.match(session, known.id, chain("x", 1)[0], parts=0)
    assert [at for at, _, _ in extents(match, 2)] == [(0, 0), (0, 1)]
    with pytest.raises(NamespaceError):
        world.store.match(session, known.id, chain("x", 1)[0], parts=4)
    with pytest.raises(NamespaceError):
        world.store.reserve(session, known.id, b"", chain("y", 1)[0], parts=4)
    world.store.check_integrity()


def test_lease_times_are_bounded() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 1))
    key = chain("x", 1)[0]
    assert world.store.match(session, known.id, key, lease_s=5.0).lease_s == 5.0
    assert world.store.match(session, known.id, key, lease_s=1e9).lease_s == 3600.0


# Adopt, release, renew


def test_an_adopted_lease_lives_until_its_last_holder_releases_it() -> None:
    world = World()
    known, scheduler, worker = world.open(WHOLE), world.session(), world.session()
    world.publish(scheduler, known, chain("x", 2))
    match = world.store.match(scheduler, known.id, b"".join(chain("x", 2)))
    world.clock.now += 10
    adopted = world.store.adopt(worker, match.lease)
    assert adopted.extents == match.extents and adopted.hits == 2
    assert adopted.lease_s == 20.0
    assert world.store.release(scheduler, match.lease) is Outcome.OK
    assert world.store.explain(worker, known.id, chain("x", 1)[0])[0].leases == 1
    assert world.store.release(worker, match.lease) is Outcome.OK
    assert world.store.explain(worker, known.id, chain("x", 1)[0])[0].leases == 0


def test_an_adopter_may_ask_for_its_own_part() -> None:
    world = World()
    known, session = world.open(part("a", 1024), part("b", 2048)), world.session()
    world.publish(session, known, chain("x", 3))
    match = world.store.match(session, known.id, b"".join(chain("x", 3)))
    of_b = world.store.adopt(world.session(), match.lease, parts=2)
    both = {at: (address, generation) for at, address, generation in extents(match, 2)}
    assert [(a, g) for _, a, g in extents(of_b, 1)] == [both[i, 1] for i in range(3)]


def test_what_cannot_be_adopted_says_so() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 1))
    match = world.store.match(session, known.id, chain("x", 1)[0])
    assert world.store.adopt(session, bytes(16)).outcome is Outcome.STALE_EPOCH
    assert world.store.adopt(world.session("blue"), match.lease).outcome is Outcome.STALE_EPOCH
    world.clock.now += 30
    assert world.store.adopt(world.session(), match.lease).outcome is Outcome.EXPIRED
    writing = world.store.reserve(session, known.id, b"", chain("y", 1)[0])
    with pytest.raises(InvalidError, match="write lease"):
        world.store.adopt(session, writing.lease)


def test_a_lease_is_renewed_before_its_deadline_and_not_after() -> None:
    world = World()
    known, session, other = world.open(WHOLE), world.session(), world.session()
    world.publish(session, known, chain("x", 1))
    match = world.store.match(session, known.id, chain("x", 1)[0])
    world.clock.now += 29
    assert world.store.renew(session, match.lease) is Outcome.OK
    assert world.store.renew(other, match.lease) is Outcome.STALE_EPOCH
    world.clock.now += 29
    world.store.reap()
    assert world.store.renew(session, match.lease) is Outcome.OK
    world.clock.now += 30
    assert world.store.renew(session, match.lease) is Outcome.EXPIRED
    world.store.reap()
    assert world.store.renew(session, match.lease) is Outcome.EXPIRED
    assert world.store.release(session, match.lease) is Outcome.OK


# Reserve, commit, abort


def test_a_chunk_is_visible_after_its_commit_and_not_before() -> None:
    world = World()
    known, session, reader = world.open(WHOLE), world.session(), world.session()
    keys = chain("x", 3)
    got = world.store.reserve(session, known.id, b"", b"".join(keys))
    world.fill(known, got, keys)
    for done in range(3):
        match = world.store.match(reader, known.id, b"".join(keys), peek=True)
        assert (match.hits, match.reason) == (done, Reason.BEING_WRITTEN)
        assert world.store.commit(session, got.lease, [done]) == [Outcome.OK]
    assert world.pull(reader, known, keys) == 3
    assert len(world.store.leases) == 0, "a write lease ends with its last item"
    assert world.store.commit(session, got.lease, [2]) == [Outcome.STALE_EPOCH]


def test_items_of_one_commit_may_come_in_any_order() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 3)))
    outcomes = world.store.commit(session, got.lease, [2, 0, 1])
    assert outcomes == [Outcome.OK] * 3
    assert world.hits(session, known, chain("x", 3)) == 3
    world.store.check_integrity()


def test_a_number_that_is_not_open_is_invalid_and_harms_no_other() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 2)))
    assert world.store.commit(session, got.lease, [0, 7]) == [Outcome.OK, Outcome.INVALID]
    assert world.store.commit(session, got.lease, [0]) == [Outcome.INVALID]
    assert world.store.commit(session, got.lease) == [Outcome.OK]


def test_only_the_writer_commits_or_aborts() -> None:
    world = World()
    known, session, other = world.open(WHOLE), world.session(), world.session()
    got = world.store.reserve(session, known.id, b"", chain("x", 1)[0])
    assert world.store.commit(other, got.lease, [0]) == [Outcome.STALE_EPOCH]
    assert world.store.abort(other, got.lease) is Outcome.STALE_EPOCH
    match_lease = bytes(16)
    assert world.store.abort(session, match_lease) is Outcome.STALE_EPOCH
    assert world.store.commit(session, got.lease, [0]) == [Outcome.OK]


def test_a_read_lease_cannot_be_committed() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 1))
    match = world.store.match(session, known.id, chain("x", 1)[0])
    assert world.store.commit(session, match.lease, [0]) == [Outcome.STALE_EPOCH]
    assert world.store.abort(session, match.lease) is Outcome.STALE_EPOCH


def test_an_abort_leaves_nothing_behind() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 3)))
    assert world.store.abort(session, got.lease, [1, 9]) is Outcome.OK
    assert world.used_bytes() == 2 * CHUNK
    assert world.store.commit(session, got.lease, [0, 2]) == [Outcome.OK, Outcome.NO_PARENT]
    assert world.store.index.count == 1 and world.used_bytes() == CHUNK
    assert len(world.store.leases) == 0
    world.store.check_integrity()


def test_a_long_chain_that_came_to_nothing_goes_without_recursion() -> None:
    world = World(segments=256, chunks=8000, options={"reserve_max": 4000})
    known, session = world.open(part("all", 1024)), world.session()
    got = world.store.reserve(session, known.id, b"", b"".join(chain("x", 4000)))
    assert (got.outcomes == Outcome.OK).all()
    assert world.store.abort(session, got.lease) is Outcome.OK
    assert world.store.index.count == 0 and world.used_bytes() == 0


def test_a_reserve_of_too_many_chunks_is_refused() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    with pytest.raises(InvalidError, match="33 chunks in one reserve; 1 to 32"):
        world.store.reserve(session, known.id, b"", b"".join(chain("x", 33)))


def test_a_parent_that_is_no_key_is_refused() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    for parent in (bytes(31), bytes(64)):
        with pytest.raises(InvalidError, match=r"parent key of \d\d bytes; 0 \(none\) or 32"):
            world.store.reserve(session, known.id, parent, chain("x", 1)[0])


def test_chunks_can_be_reserved_below_one_that_is_still_being_written() -> None:
    world = World()
    known, first, second = world.open(WHOLE), world.session(), world.session()
    keys = chain("x", 2)
    above = world.store.reserve(first, known.id, b"", keys[0])
    below = world.store.reserve(second, known.id, keys[0], keys[1])
    assert world.store.commit(first, above.lease) == [Outcome.OK]
    assert world.store.commit(second, below.lease) == [Outcome.OK]
    assert world.hits(first, known, keys) == 2


def test_a_write_below_one_that_was_given_up_has_no_parent_and_leaves_nothing() -> None:
    world = World()
    known, first, second = world.open(WHOLE), world.session(), world.session()
    keys = chain("x", 2)
    above = world.store.reserve(first, known.id, b"", keys[0])
    below = world.store.reserve(second, known.id, keys[0], keys[1])
    world.store.close_session(first)
    assert world.store.release(first, above.lease) is Outcome.STALE_EPOCH
    assert world.store.commit(second, below.lease) == [Outcome.NO_PARENT]
    assert world.store.index.count == 0 and world.used_bytes() == 0
    world.store.check_integrity()


# Pins, hints, reports


def test_two_pinners_of_a_chain_must_both_unpin_it() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 3)
    world.publish(session, known, keys[:2])
    for _ in range(2):
        outcomes = world.store.pin(session, known.id, b"".join(keys))
        assert outcomes == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
    assert [told.pins for told in world.store.explain(session, known.id, b"".join(keys))] == [
        1,
        1,
        0,
    ]
    assert world.store.unpin(session, known.id, b"".join(keys)) is Outcome.OK
    assert world.store.explain(session, known.id, keys[0])[0].pins == 1
    assert world.store.unpin(session, known.id, b"".join(keys)) is Outcome.OK
    assert world.store.explain(session, known.id, keys[0])[0].pins == 0
    assert world.store.unpin(session, known.id, b"".join(keys)) is Outcome.MISS


def test_a_pin_lasts_as_long_as_its_longest_claim_whoever_unpins() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    key = chain("x", 1)[0]
    world.publish(session, known, [key])
    for ttl_s in (0.0, 60.0, 10.0):
        world.store.pin(session, known.id, key, ttl_s=ttl_s)
    world.clock.now += 10
    world.store.reap()
    assert world.store.unpin(session, known.id, key) is Outcome.OK, "the one of 60 s"
    world.clock.now += 1e6
    world.store.reap()
    assert world.store.explain(session, known.id, key)[0].pins == 1, "until it is unpinned"
    assert world.store.unpin(session, known.id, key) is Outcome.OK
    assert world.store.figures()["pinned"] == 0
    world.store.check_integrity()


def test_what_would_pin_more_than_may_be_is_refused_with_figures_and_pins_nothing() -> None:
    world = World(options={"pinned_share": 4 * CHUNK / (4 * SEGMENT)})
    known, session = world.open(WHOLE), world.session()
    for name in "ab":
        world.publish(session, known, chain(name, 3))
    world.store.pin(session, known.id, b"".join(chain("a", 3)))
    with pytest.raises(BusyError, match=f"{3 * CHUNK} are pinned .bound {4 * CHUNK}.*unpin"):
        world.store.pin(session, known.id, b"".join(chain("b", 3)))
    assert world.store.figures()["pinned"] == 3 * CHUNK and world.store.counters.refused_pins == 1
    world.store.pin(session, known.id, b"".join(chain("b", 1)))
    world.store.pin(session, known.id, b"".join(chain("a", 3)))  # costs nothing more
    assert world.store.figures()["pinned"] == 4 * CHUNK
    world.store.check_integrity()


def test_claims_on_one_chain_are_bounded() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    key = chain("x", 1)[0]
    world.publish(session, known, [key])
    for _ in range(CLAIMS_MAX):
        world.store.pin(session, known.id, key)
    with pytest.raises(BusyError, match="give a TTL"):
        world.store.pin(session, known.id, key)


def test_a_pin_outlives_its_session_and_ends_with_its_time() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    key = chain("x", 1)[0]
    world.publish(session, known, [key])
    world.store.pin(session, known.id, key, ttl_s=60.0)
    world.store.close_session(session)
    other = world.session()
    world.clock.now += 59
    world.store.reap()
    assert world.store.explain(other, known.id, key)[0].pins == 1
    world.clock.now += 1
    world.store.reap()
    assert world.store.explain(other, known.id, key)[0].pins == 0
    world.store.check_integrity()


def test_deleting_a_pinned_chunk_takes_it_out_of_its_pins() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 3)
    world.publish(session, known, keys)
    world.store.pin(session, known.id, b"".join(keys))
    world.store.pin(session, known.id, b"".join(keys[:2]))
    assert world.store.delete(session, known.id, keys[1]) == [Outcome.OK]
    world.store.check_integrity()
    assert world.store.unpin(session, known.id, b"".join(keys)) is Outcome.OK
    assert world.store.unpin(session, known.id, b"".join(keys[:2])) is Outcome.OK
    assert not world.store.index.pins.any()
    assert world.store.figures()["pinned"] == 0


def test_a_hint_tells_what_is_stored() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    keys = chain("x", 3)
    world.publish(session, known, keys[:1])
    world.store.reserve(session, known.id, keys[0], keys[1])
    hinted = world.store.hint(session, known.id, b"".join(keys))
    assert hinted == [Outcome.HIT, Outcome.MISS, Outcome.MISS]
    assert world.store.counters.hints == 1


def test_an_explanation_tells_where_a_chunk_is_and_what_holds_it() -> None:
    world = World()
    known, session = world.open(part("a", 1024), part("b", 2048)), world.session()
    keys = chain("x", 3)
    world.publish(session, known, keys[:2])
    world.clock.now += 7
    world.store.reserve(session, known.id, keys[1], keys[2])
    first, second, third = world.store.explain(session, known.id, b"".join(keys))
    assert (first.outcome, first.parts, first.nbytes, first.children) == (Outcome.HIT, 3, 3072, 1)
    assert (first.age_s, second.age_s) == (7.0, 0.0), "a chunk that is built upon is used"
    assert (second.leases, second.children) == (1, 1)
    assert (third.outcome, third.reason) == (Outcome.MISS, Reason.BEING_WRITTEN)
    [never] = world.store.explain(session, known.id, chain("y", 1)[0])
    assert (never.outcome, never.reason) == (Outcome.MISS, Reason.NEVER_STORED)


def test_keys_are_listed_page_by_page_and_each_once() -> None:
    world = World()
    red, other = world.open(WHOLE), world.open(WHOLE, model="other")
    blue = world.open(WHOLE, tenant="blue")
    session, stranger = world.session(), world.session("blue")
    world.publish(session, red, chain("x", 5))
    world.publish(session, other, chain("y", 2))
    world.publish(stranger, blue, chain("z", 2))
    world.store.reserve(session, red.id, b"", chain("w", 1)[0])
    listed, cursor = [], 0
    while True:
        keys, namespaces, cursor = world.store.keys(session, 0, cursor, limit=3)
        listed += [(n, keys[32 * i : 32 * i + 32]) for i, n in enumerate(namespaces)]
        if not cursor:
            break
    expected = [(red.id, k) for k in chain("x", 5)] + [(other.id, k) for k in chain("y", 2)]
    assert sorted(listed) == sorted(expected)
    assert world.store.keys(session, other.id)[1] == [other.id] * 2
    assert len(world.store.keys(session, limit=0)[1]) == 1, "a page makes progress"
    assert world.store.keys(session, blue.id) == (b"", [], 0)


def test_clear_takes_a_namespace_or_all_of_the_tenants_and_no_others() -> None:
    world = World()
    red, other = world.open(WHOLE), world.open(WHOLE, model="other")
    blue = world.open(WHOLE, tenant="blue")
    session, stranger = world.session(), world.session("blue")
    world.publish(session, red, chain("x", 3))
    world.publish(session, other, chain("y", 2))
    world.publish(stranger, blue, chain("z", 2))
    world.store.pin(session, red.id, b"".join(chain("x", 3)))
    assert world.store.clear(session, red.id) == 3
    assert world.pull(session, other, chain("y", 2)) == 2
    assert world.store.clear(session) == 2
    assert world.pull(stranger, blue, chain("z", 2)) == 2
    assert world.store.counters.deleted_chunks == 5
    assert world.used_bytes() == 2 * CHUNK
    world.store.check_integrity()


def test_figures_tell_each_byte_by_what_holds_it() -> None:
    world = World()
    known, session = world.open(WHOLE), world.session()
    world.publish(session, known, chain("x", 6))
    world.store.pin(session, known.id, b"".join(chain("x", 2)))
    world.store.match(session, known.id, b"".join(chain("x", 3)))
    world.store.reserve(session, known.id, b"", b"".join(chain("y", 2)))
    assert world.store.figures() == {
        "total": 4 * SEGMENT,
        "stored": 6 * CHUNK,
        "leased": 3 * CHUNK,
        "pinned": 2 * CHUNK,
        "evictable": 3 * CHUNK,
        "writing": 2 * CHUNK,
        "quarantined": 0,
    }


def test_a_chunk_that_cannot_be_stored_as_a_whole_evicts_nothing_for_its_first_part() -> None:
    """The small part could have room, the large one not: each segment holds a lease."""
    world = World()
    session = world.session()
    small = world.open(part("a", 4096), model="small")
    large = world.open(part("b", 8192), model="large")
    both = world.open(part("a", 4096), part("b", 8192), model="both")
    for first in range(0, 8, 4):
        world.publish(session, small, chain(f"small {first}", 4))
        world.store.match(session, small.id, chain(f"small {first}", 1)[0])
    for number in range(4):
        world.publish(session, large, chain(f"large {number}", 1))
        world.store.match(session, large.id, chain(f"large {number}", 1)[0])
    reservation = world.store.reserve(session, both.id, b"", b"".join(chain("both", 2)))
    assert (reservation.outcomes == Outcome.BUSY).all()
    assert world.store.counters.evicted_chunks == 0
    world.store.check_integrity()
