"""The two sides of the vLLM connector against a store in this process, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, Session, connect
from kvpool.client.engines.vllm import scheduler as vllm_scheduler
from kvpool.client.engines.vllm import worker as vllm_worker
from kvpool.client.engines.vllm.identity import Group, Identity, Variant
from kvpool.client.engines.vllm.memory import HostMemory
from kvpool.client.engines.vllm.plan import Load, Plan, Save
from kvpool.client.engines.vllm.scheduler import SchedulerSide
from kvpool.client.engines.vllm.settings import Sessions, one_step_at_a_time
from kvpool.client.engines.vllm.worker import STAGED_BYTES, Rank, Staging, WorkerSide
from kvpool.transfer.copying import Bytes

BLOCK, CHUNK, PAGE, BLOCKS = 16, 64, 256, 64
FIELDS = ("model", "revision", "kv_dtype", "kv_scales", "rope")
FULL = Group(0, BLOCK, PAGE, (2,), None)
WINDOW = Group(1, BLOCK, PAGE, (2,), 2 * BLOCK)
TOKENS = list(range(300))


def identity(*groups: Group, shards: int = 1) -> Identity:
    named = tuple((name, "test") for name in FIELDS)
    return Identity(CHUNK, groups, shards, (*named, ("layout", "native:test")))


@pytest.fixture
def client() -> Iterator[Client]:
    with connect(capacity=64 << 20) as made:
        yield made


def request(tokens: list[int] = TOKENS, name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name,
        all_token_ids=tokens,
        num_tokens=len(tokens),
        num_computed_tokens=0,
        num_output_tokens=0,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        kv_transfer_params=None,
        stop_reason=None,
        get_finished_reason=lambda: "stop",
    )


def output(scheduled: dict[str, int], tables: dict[str, tuple[list[int], ...]]) -> Any:
    """vLLM's `SchedulerOutput`."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens={},
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.__getitem__),
    )


def settled(side: SchedulerSide, asked: Any, computed: int = 0) -> tuple[int, bool]:
    """What `matched` says in the end."""
    while True:
        tokens, later = side.matched(asked, computed)
        if tokens is not None:
            return tokens, later


def leases(client: Client) -> int:
    return sum(int(domain["leases"]) for domain in client.status()["domains"].values())


def scheduler(client: Client, *groups: Group, **options: bool) -> SchedulerSide:
    known = identity(*groups or (FULL,))
    settings = {"asynchronous": True, "saves": True, **options}
    return SchedulerSide(known, Sessions(client, known), **settings)


Caches = dict[int, Bytes]
"""By group: (layers, blocks, page bytes)."""


def worker(client: Client, *groups: Group) -> tuple[WorkerSide, Caches]:
    """With caches of random pages."""
    known = identity(*groups or (FULL,))
    side = WorkerSide(known, Sessions(client, known), Rank(0, 0, True), waits=True)
    entropy = np.random.default_rng(1)
    caches = {g.number: entropy.integers(0, 256, (2, BLOCKS, PAGE), np.uint8) for g in known.groups}
    side.register({number: HostMemory(list(cache)) for number, cache in caches.items()})
    return side, caches


def publish(client: Client, *groups: Group) -> Caches:
    """Blocks 1, 2, … of random caches as the chunks of `TOKENS`; the caches."""
    known = identity(*groups or (FULL,))
    keys = client.open(known.namespace(Variant())).keys(TOKENS)
    side, caches = worker(client, *groups)
    table = tuple(range(1, len(TOKENS) // CHUNK * CHUNK // BLOCK + 1))
    side.save(Plan(saves=[Save(Variant(), keys, 0, tuple(table for _ in known.groups))]))
    return caches


# ---- the scheduler's side


class Stuck(Sessions):
    """The store does not answer until `go`."""

    def __init__(self, client: Client, known: Identity) -> None:
        super().__init__(client, known)
        self.go = Event()

    def of(self, variant: Variant) -> Session:
        assert self.go.wait(20)
        return super().of(variant)


def test_the_scheduler_does_not_wait_for_a_store_that_does_not_answer(client: Client) -> None:
    publish(client)
    known = identity(FULL)
    sessions = Stuck(client, known)
    side = SchedulerSide(known, sessions, asynchronous=True, saves=True)
    first, second = request(name="first"), request(name="second")
    assert side.matched(first, 0) == (None, False)
    assert side.matched(second, 0) == (None, False)
    assert side.plan(output({}, {})) == Plan(idle=True)
    sessions.go.set()
    assert settled(side, first) == settled(side, second) == (256, True)


def test_a_request_keeps_its_one_lease_from_one_attempt_to_the_next(client: Client) -> None:
    publish(client)
    side, asked = scheduler(client), request()
    assert [settled(side, asked) for _ in range(3)] == [(256, True)] * 3
    assert leases(client) == 1
    side.finished(asked)
    assert leases(client) == 0


def test_an_engine_that_has_all_of_a_match_loads_nothing(client: Client) -> None:
    publish(client)
    side, asked = scheduler(client), request()
    assert settled(side, asked, computed=256) == (0, False)
    assert settled(side, asked, computed=96) == (160, True)


def test_the_last_token_is_always_computed(client: Client) -> None:
    publish(client)
    assert settled(scheduler(client), request(TOKENS[:256])) == (240, True)


def test_chunks_are_saved_as_prefill_goes_on_and_none_twice(client: Client) -> None:
    side, asked = scheduler(client), request()
    assert settled(side, asked) == (0, False)
    table = (list(range(1, 20)),)
    saved = []
    for computed, scheduled in ((0, 100), (100, 100), (200, 100), (300, 1)):
        asked.num_computed_tokens = computed
        plan = side.plan(output({"r": scheduled}, {"r": table}))
        saved += [(save.first, save.blocks[0]) for save in plan.saves]
    assert saved == [(0, (1, 2, 3, 4)), (1, tuple(range(5, 13))), (3, (13, 14, 15, 16))]


def test_drafted_tokens_are_not_saved_before_they_are_accepted(client: Client) -> None:
    side, asked = scheduler(client), request(list(range(66)))
    assert settled(side, asked) == (0, False)
    asked.num_computed_tokens = 60
    step = output({"r": 6}, {"r": ([1, 2, 3, 4, 5],)})
    step.scheduled_spec_decode_tokens = {"r": [1, 2, 3]}
    assert not side.plan(step).saves


def test_a_consumer_saves_nothing(client: Client) -> None:
    side, asked = scheduler(client, saves=False), request()
    settled(side, asked)
    assert not side.plan(output({"r": 300}, {"r": (list(range(1, 20)),)})).saves


def test_a_round_that_schedules_nothing_waits_for_a_lookup(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client)
    known = identity(FULL)
    sessions = Stuck(client, known)
    side = SchedulerSide(known, sessions, asynchronous=True, saves=True)
    assert side.matched(request(), 0) == (None, False)
    monkeypatch.setattr(vllm_scheduler, "PATIENCE_S", 60.0)  # it ends as soon as a lookup has
    sessions.go.set()
    side.plan(output({}, {}))
    assert side.matched(request(), 0) == (256, True)


def test_a_preempted_request_is_looked_up_anew(client: Client) -> None:
    side, asked = scheduler(client), request()
    assert settled(side, asked) == (0, False)
    asked.num_output_tokens = 1
    side.plan(output({"r": 1}, {"r": (list(range(1, 20)),)}))
    publish(client)
    assert settled(side, asked) == (256, True)


def test_a_load_names_the_blocks_that_vllm_lacks(client: Client) -> None:
    publish(client)
    side, asked = scheduler(client), request()
    settled(side, asked, computed=96)
    side.allocated(asked, [list(range(40, 60))], 160)
    plan = side.plan(output({}, {}))
    (load,) = plan.loads
    assert plan.idle and not side.plan(output({"r": 1}, {"r": ([1],)})).idle
    assert (load.first, load.last, load.blocks) == (96, 256, (tuple(range(46, 56)),))
    assert not side.plan(output({}, {})).loads


@pytest.mark.parametrize("told", ["by blocks", "by name"])
def test_a_request_whose_kv_did_not_come_is_computed_and_stored_again(
    client: Client, told: str
) -> None:
    publish(client)
    side, asked, other = scheduler(client), request(), request(name="other")
    for each, table in ((asked, list(range(20))), (other, list(range(20, 40)))):
        assert settled(side, each) == (256, True)
        side.allocated(each, [table], 256)
    if told == "by blocks":
        side.failed({7, 99}, set())
    else:
        side.failed(set(), {"r"})
    assert side.matched(asked, 0) == (0, False)
    assert side.matched(other, 0) == (256, True)
    assert leases(client) == 1
    plan = side.plan(output({"r": 300}, {"r": (list(range(20)),)}))
    assert [(save.first, len(save.blocks[0])) for save in plan.saves] == [(0, 16)]


# ---- the worker's side


def load_of(client: Client, first: int, last: int, *tables: tuple[int, ...], groups: Any) -> Load:
    session = client.open(identity(*groups).namespace(Variant()))
    match = session.match(TOKENS)
    client_held.append(match)
    return Load("r", Variant(), match.lease, match.keys[: match.chunks * 32], first, last, tables)


client_held: list[Any] = []
"""Matches that stand for the scheduler's."""


@pytest.fixture(autouse=True)
def _scheduler_lets_go() -> Iterator[None]:
    yield
    while client_held:
        client_held.pop().release()


@pytest.mark.parametrize(("first", "last"), [(0, 256), (16, 256), (96, 256), (96, 112), (0, 48)])
def test_a_load_brings_exactly_the_blocks_it_names(client: Client, first: int, last: int) -> None:
    (stored,) = publish(client).values()
    side, caches = worker(client)
    cache = caches[0]
    cache += 1
    expected = cache.copy()
    blocks = list(range(40, 40 + (last - first) // BLOCK))
    expected[:, blocks] = stored[:, 1 + first // BLOCK : 1 + last // BLOCK]
    side.load_now(Plan(loads=[load_of(client, first, last, tuple(blocks), groups=(FULL,))]))
    assert not side.failed_now()
    assert np.array_equal(cache, expected)


def test_a_window_brings_only_the_blocks_that_are_still_in_use(client: Client) -> None:
    groups = (FULL, WINDOW)
    stored = publish(client, *groups)
    side, caches = worker(client, *groups)
    for cache in caches.values():
        cache[:] = 0
    full, window = tuple(range(20, 36)), (0,) * 14 + (50, 51)
    side.load_meanwhile(Plan(loads=[load_of(client, 0, 256, full, window, groups=groups)]))
    loaded: dict[str, set[int]] = {}
    while not loaded:
        loaded = side.loaded(Plan())
    assert loaded == {"r": set()}
    assert np.array_equal(caches[0][:, list(full)], stored[0][:, 1:17])
    assert np.array_equal(caches[1][:, [50, 51]], stored[1][:, [15, 16]])
    assert not caches[1][:, 0].any()


def test_a_step_that_computes_nothing_leaves_the_interpreter_to_the_loads(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "IDLE_S", 60.0)  # it ends as soon as one load has
    publish(client)
    side, _ = worker(client)
    plan = Plan([load_of(client, 0, 256, tuple(range(20, 36)), groups=(FULL,))], idle=True)
    side.load_meanwhile(plan)
    assert side.loaded(plan) == {"r": set()}
    assert side.loaded(plan) == {}


def test_a_step_that_computes_does_not_wait_for_loads(client: Client) -> None:
    side, _ = worker(client)
    never: Future[set[int]] = Future()
    side._loading["r"] = never
    assert side.loaded(Plan()) == {}


def test_a_load_whose_lease_has_ended_fails_block_by_block(client: Client) -> None:
    publish(client)
    side, _ = worker(client)
    load = load_of(client, 0, 256, tuple(range(20, 36)), groups=(FULL,))
    client_held.pop().release()
    side.load_now(Plan(loads=[load]))
    assert side.failed_now() == set(range(20, 36))
    assert not side.failed_now()


def test_all_pulls_of_a_load_have_one_deadline_together(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client)
    side, _ = worker(client)
    clock, given, pull = [0.0], [], Session.pull

    def slow(*arguments: Any, deadline_s: float, **options: Any) -> Any:
        given.append(deadline_s)
        clock[0] += 0.75 * vllm_worker.DEADLINE_S
        return pull(*arguments, deadline_s=max(deadline_s, 20.0), **options)

    monkeypatch.setattr(vllm_worker, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Session, "pull", slow)
    inside = load_of(client, 16, 256, tuple(range(20, 35)), groups=(FULL,))  # two runs of chunks
    side.load_now(Plan(loads=[inside]))
    assert given == [vllm_worker.DEADLINE_S, 0.25 * vllm_worker.DEADLINE_S]
    assert not side.failed_now()


def test_a_step_whose_load_has_failed_saves_nothing_of_what_it_computed(client: Client) -> None:
    publish(client)
    side, _ = worker(client)
    load = load_of(client, 0, 256, tuple(range(20, 36)), groups=(FULL,))
    client_held.pop().release()
    session = client.open(identity(FULL).namespace(Variant()))
    longer = list(range(1000, 1300))
    save = Save(Variant(), session.keys(longer), 0, (tuple(range(1, 17)),))
    plan = Plan([load], [save])
    side.load_now(plan)
    assert side.failed_now()  # vLLM asks before or after it saves
    side.save(plan)
    assert not session.match(longer).chunks


@pytest.mark.parametrize(
    ("workers", "batches", "alone"), [(1, 1, True), (2, 1, False), (1, 2, False)]
)
def test_steps_wait_for_loads_only_where_nothing_else_has_begun_with_them(
    workers: int, batches: int, alone: bool
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=workers), max_concurrent_batches=batches
    )
    assert one_step_at_a_time(config) is alone


def test_what_is_published_may_be_overwritten_at_once(client: Client) -> None:
    known = identity(FULL)
    session = client.open(known.namespace(Variant()))
    side, caches = worker(client)
    side._waits = False
    expected = caches[0][:, 1:17].copy()
    side.save(Plan(saves=[Save(Variant(), session.keys(TOKENS), 0, (tuple(range(1, 17)),))]))
    caches[0][:] = 0
    side._saver.shutdown()
    with session.match(TOKENS) as match:
        payloads = session.payload(match.chunks)
        assert match.chunks == 4 and session.pull(match, payloads).ok
    pages = payloads.reshape(4, 2, 4, PAGE).transpose(1, 0, 2, 3).reshape(2, 16, PAGE)
    assert np.array_equal(pages, expected)


def test_a_hit_needs_the_parts_of_all_ranks_and_each_rank_pulls_its_own(client: Client) -> None:
    known = identity(FULL, shards=2)
    keys = client.open(known.namespace(Variant())).keys(TOKENS)
    ranks = [
        WorkerSide(known, Sessions(client, known), Rank(0, shard, True), waits=True)
        for shard in range(2)
    ]
    entropy = np.random.default_rng(2)
    caches = [entropy.integers(0, 256, (2, BLOCKS, PAGE), np.uint8) for _ in ranks]
    expected = [cache.copy() for cache in caches]
    side, asked = SchedulerSide(known, Sessions(client, known), asynchronous=True, saves=True), []
    for number, (rank, cache) in enumerate(zip(ranks, caches, strict=True)):
        asked.append(request(name=str(number)))
        assert settled(side, asked[-1]) == (0, False)
        rank.register({0: HostMemory(list(cache))})
        rank.save(Plan(saves=[Save(Variant(), keys, 0, (tuple(range(1, 17)),))]))

    last = request(name="last")
    assert settled(side, last) == (256, True)
    side.allocated(last, [list(range(30, 50))], 256)
    plan = side.plan(output({}, {}))
    for rank, cache, had in zip(ranks, caches, expected, strict=True):
        rank.load_now(plan)
        assert not rank.failed_now()
        assert np.array_equal(cache[:, 30:46], had[:, 1:17])
    side.finished(last)
    assert leases(client) == 0


def test_ranks_that_hold_what_another_one_publishes_publish_nothing(client: Client) -> None:
    known = identity(FULL)
    session = client.open(known.namespace(Variant()))
    copy = WorkerSide(known, Sessions(client, known), Rank(0, 0, False), waits=True)
    copy.save(Plan(saves=[Save(Variant(), session.keys(TOKENS), 0, (tuple(range(1, 17)),))]))
    assert not session.match(TOKENS).chunks


def test_staging_is_bounded_and_reused() -> None:
    staging = Staging(2 * PAGE)
    one, two = staging.take(PAGE), staging.take(PAGE)
    assert one is not None and two is not None and staging.take(PAGE) is None
    staging.give(one)
    assert staging.take(PAGE) is one
    assert STAGED_BYTES >= 1 << 20
