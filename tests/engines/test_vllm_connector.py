"""vLLM with the store as its external prefix cache: right tokens, whatever becomes of the store.

A tiny model of random weights computes the reference: its answers before anything is stored.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, Timer

import numpy as np
import pytest

from kvpool.client import Namespace
from tests.client.stores import extent
from tests.engines.vllm_engines import (
    BLOCK,
    CHUNK,
    Store,
    VllmEngine,
    engine,
    make_model,
    prompt,
    transfer,
    until_used,
)
from tests.store.daemons import RunningDaemon, eventually

pytestmark = pytest.mark.engines

PROMPT = 300
STORED = (PROMPT + 24 - 1) // CHUNK  # chunks of a prompt and its answer but for the last token
USABLE = PROMPT // CHUNK * CHUNK  # tokens of a prompt that come from the store
FLAGS = ("--capacity", "128MiB", "--no-populate", "--headroom", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(vllm_python: str, folder: Path) -> str:
    return make_model(vllm_python, folder / "tiny")


class World:
    """One engine for many tests, and a daemon that each test may treat badly."""

    def __init__(self, vllm: VllmEngine, folder: Path) -> None:
        self.vllm = vllm
        self._folder = folder
        self._seed = 100
        self._start()

    def _start(self, *flags: str) -> None:
        self.daemon = RunningDaemon(self._folder, *FLAGS, *flags)
        self.store = Store(self.daemon.address)

    def restart(self, *flags: str) -> None:
        """The daemon, on the same socket."""
        self.close()
        self._start(*flags)

    def close(self) -> None:
        self.store.close()
        self.daemon.close()

    def fresh_prompt(self) -> list[int]:
        self._seed += 1
        return prompt(self._seed)

    def stored(self) -> tuple[list[int], list[int]]:
        """A prompt whose chunks are in the store and not in vLLM, and its answer."""
        tokens, before = self.fresh_prompt(), self.store.chunks
        answers: list[list[int]] = []

        def published() -> bool:  # again if the store was late: vLLM still has what it lacks
            answers.extend(self.vllm.generate(tokens))
            return self.store.chunks >= before + STORED

        eventually(published, "the chunks are published", 60)
        assert answers == answers[:1] * len(answers)
        self.vllm.forget()
        return tokens, answers[0]

    def hits(self, run: Callable[[], object]) -> int:
        """Chunks that the store has given during `run`."""
        before = self.store.counter("hit_chunks")
        run()
        return self.store.counter("hit_chunks") - before

    def assert_used(self) -> None:
        """The store serves this engine."""

        def used() -> bool:
            tokens, answer = self.stored()
            again = []
            hits = self.hits(lambda: again.extend(self.vllm.generate(tokens)))
            assert again == [answer]
            return hits == USABLE // CHUNK

        eventually(used, "the store is used", 60)

    def assert_nothing_held(self) -> None:
        eventually(lambda: not self.store.leases, "all leases are released")


@pytest.fixture(scope="module", params=["sync", "async"])
def _world(
    request: pytest.FixtureRequest, vllm_python: str, folder: Path, model: str
) -> Iterator[World]:
    shared = folder / request.param
    shared.mkdir()
    to = transfer(f"unix:{shared / 'k.sock'}", load=request.param)
    with engine(vllm_python, shared, model, to) as vllm:
        world = World(vllm, shared)
        yield world
        world.close()


@pytest.fixture
def world(_world: World) -> Iterator[World]:
    if _world.daemon.process.poll() is not None:
        _world.restart()
    yield _world
    _world.vllm.forget()


def test_an_engine_that_starts_before_its_store_uses_it_later_and_so_does_its_successor(
    vllm_python: str, folder: Path, model: str
) -> None:
    mine = folder / "restart"
    mine.mkdir()
    to = transfer(f"unix:{mine / 'k.sock'}", load="sync")
    tokens = prompt(1)
    with engine(vllm_python, mine, model, to) as vllm:
        (reference,) = vllm.generate(tokens)
        assert vllm.metric("external_prefix_cache_hits") == 0

        daemon = RunningDaemon(mine, *FLAGS)
        store = Store(daemon.address)
        until_used(vllm, store)
        hits, published = store.counter("hit_chunks"), store.counter("published_chunks")
        promised = vllm.metric("external_prefix_cache_hits")
        vllm.forget()
        assert vllm.generate(tokens) == [reference]
        assert store.counter("hit_chunks") == hits
        eventually(
            lambda: store.counter("published_chunks") - published == STORED,
            "the chunks are published",
        )

        vllm.forget()
        assert vllm.generate(tokens) == [reference]
        assert store.counter("hit_chunks") - hits == USABLE // CHUNK
        assert vllm.metric("external_prefix_cache_hits") - promised == USABLE
        vllm.kill()
    try:
        eventually(lambda: not store.leases, "the dead engine's leases are gone")
        with engine(vllm_python, mine, model, transfer(daemon.address)) as successor:
            assert successor.generate(tokens) == [reference]
            assert store.counter("hit_chunks") - hits == 2 * (USABLE // CHUNK)
            assert store.counter("published_chunks") - published == STORED
            assert successor.metric("external_prefix_cache_hits") == USABLE
    finally:
        store.close()
        daemon.close()


def test_a_local_hit_that_ends_inside_a_matched_chunk_loads_only_the_rest(world: World) -> None:
    tokens, answer = world.stored()
    local = CHUNK + BLOCK
    world.vllm.generate(tokens[: local + 1], tokens=1)
    before = world.vllm.metric("external_prefix_cache_hits")
    assert world.vllm.generate(tokens) == [answer]
    assert world.vllm.metric("external_prefix_cache_hits") - before == USABLE - local
    world.assert_nothing_held()


def test_what_vllm_still_has_is_published_to_a_store_that_has_lost_it(world: World) -> None:
    tokens, answer = world.stored()
    assert world.vllm.generate(tokens) == [answer]
    world.restart()
    eventually(lambda: world.vllm.generate(tokens) == [answer] and world.store.chunks, "reconnects")
    eventually(lambda: world.store.chunks == STORED, "the chunks are published again")


def test_a_store_that_is_killed_is_done_without_and_used_when_it_is_back(world: World) -> None:
    tokens, answer = world.stored()
    world.daemon.kill()
    assert world.vllm.generate(tokens) == [answer]
    world.restart()
    world.assert_used()


def test_a_store_that_is_killed_in_the_middle_of_many_requests_costs_no_token(world: World) -> None:
    prompts, answers = zip(*(world.stored() for _ in range(4)), strict=True)
    killer = Timer(0.15, world.daemon.kill)
    killer.start()
    generated = world.vllm.generate(*prompts)
    killer.join()
    assert generated == list(answers)
    world.restart()
    world.assert_used()


def test_a_stopped_store_is_done_without_and_used_when_it_goes_on(world: World) -> None:
    tokens, answer = world.stored()
    world.daemon.signal(signal.SIGSTOP)
    try:
        assert world.vllm.generate(tokens) == [answer]
        assert world.vllm.generate(world.fresh_prompt(), tokens=4)
    finally:
        world.daemon.signal(signal.SIGCONT)
    world.assert_used()


def test_a_store_that_stutters_costs_no_token(world: World) -> None:
    prompts, answers = zip(*(world.stored() for _ in range(4)), strict=True)
    enough = Event()

    def stutter() -> None:
        while not enough.wait(0.02):
            world.daemon.signal(signal.SIGSTOP)
            enough.wait(0.1)
            world.daemon.signal(signal.SIGCONT)

    thread = Thread(target=stutter)
    thread.start()
    try:
        for _ in range(2):
            assert world.vllm.generate(*prompts) == list(answers)
            world.vllm.forget()
    finally:
        enough.set()
        thread.join()
    world.assert_used()


def test_a_full_store_evicts_or_refuses_and_costs_no_token(world: World) -> None:
    world.restart("--capacity", "2MiB")
    prompts = [world.fresh_prompt() for _ in range(4)]
    first = [world.vllm.generate(tokens)[0] for tokens in prompts]
    world.vllm.forget()
    assert [world.vllm.generate(tokens)[0] for tokens in prompts] == first
    store = world.store
    assert store.counter("evicted_chunks") + store.counter("busy") > 0
    world.restart()
    world.assert_used()


def namespace(world: World) -> Namespace:
    """The engine's own."""
    (space,) = [n for n in world.store.namespaces if n.salt == "none" and n.revision != "other"]
    return space


def test_another_models_kv_is_never_used(world: World) -> None:
    tokens, answer = world.stored()
    world.restart()
    world.assert_used()
    other = world.store.client.open(replace(namespace(world), revision="other"))
    chunks = len(tokens) // CHUNK
    garbage = np.full((chunks, other.namespace.parts[0].nbytes), 7, np.uint8)
    assert other.publish(tokens, list(garbage)).stored
    again: list[list[int]] = []
    assert world.hits(lambda: again.extend(world.vllm.generate(tokens))) == 0
    assert again == [answer]


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_damaged_chunk_is_computed_again_from_there_on_and_stored(
    world: World, chunk: int
) -> None:
    tokens, answer = world.stored()
    session = world.store.client.open(namespace(world))
    with session.match(tokens) as match:
        assert match.chunks == USABLE // CHUNK
        extent(world.store.client, match, chunk)[-1] ^= 1
    damaged = world.store.counter("corrupt_chunks")
    promised = world.vllm.metric("external_prefix_cache_hits")
    assert world.vllm.generate(tokens) == [answer]
    assert world.store.counter("corrupt_chunks") - damaged == 1
    assert world.vllm.metric("external_prefix_cache_hits") - promised == USABLE  # once
    world.assert_nothing_held()
    world.vllm.forget()
    assert world.hits(lambda: world.vllm.generate(tokens)) == USABLE // CHUNK


def test_requests_that_are_preempted_give_the_tokens_that_they_give_alone(world: World) -> None:
    prompts = [world.fresh_prompt() for _ in range(5)]
    alone = [world.vllm.generate(tokens, tokens=160)[0] for tokens in prompts]
    world.vllm.forget()
    before = world.vllm.metric("num_preemptions")
    assert world.vllm.generate(*prompts, tokens=160) == alone
    assert world.vllm.metric("num_preemptions") > before
    world.assert_nothing_held()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_requests_that_are_aborted_leave_nothing_behind(world: World, steps: int) -> None:
    prompts, answers = zip(*(world.stored() for _ in range(2)), strict=True)
    fresh = world.fresh_prompt()
    world.vllm.generate(*prompts, fresh, abort_after=steps)
    world.assert_nothing_held()
    assert world.vllm.generate(*prompts) == list(answers)
    world.assert_nothing_held()


def test_a_cache_salt_is_shared_with_nobody_else(world: World) -> None:
    tokens, answer = world.stored()
    generate = world.vllm.generate
    assert world.hits(lambda: generate(tokens, salts=["alice"])) == 0
    eventually(lambda: world.store.chunks >= 2 * STORED, "alice's chunks are published")
    world.vllm.forget()
    assert world.hits(lambda: generate(tokens, salts=["bob"])) == 0
    world.vllm.forget()
    assert world.hits(lambda: generate(tokens, salts=["alice"])) == USABLE // CHUNK
    assert generate(tokens) == [answer]


def test_what_a_request_says_of_its_future_reaches_the_store(world: World) -> None:
    tokens, _ = world.stored()
    before = world.store.counter("hints")
    world.vllm.generate(tokens, params={"kvpool": {"will_continue": 0.9, "gap_s": 3.0}})
    eventually(lambda: world.store.counter("hints") == before + 1, "the hint has come")


def test_updated_weights_clear_what_the_old_ones_have_stored(world: World) -> None:
    tokens, _ = world.stored()
    session = world.store.client.open(namespace(world))
    with session.match(tokens) as match:
        assert match.chunks == USABLE // CHUNK
    assert world.vllm.ask("clear")["cleared"]
    assert not session.match(tokens).chunks
    assert world.hits(lambda: world.vllm.generate(tokens)) == 0
