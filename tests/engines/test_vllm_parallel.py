"""vLLM with several workers: each stores and loads its own part of every chunk.

One store serves all engines here. What they say is compared with what the first of them said while
there was no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import pytest

from kvpool.client import Session
from kvpool.proto.keys import KEY_BYTES
from tests.client.stores import extent
from tests.engines.vllm_engines import (
    CHUNK,
    ONE_THREAD,
    Store,
    VllmEngine,
    engine,
    make_model,
    prompt,
    transfer,
    until_used,
)
from tests.store.daemons import eventually, running

pytestmark = pytest.mark.engines

PROMPTS = [prompt(seed) for seed in range(1, 4)]
STORED = (300 + 24 - 1) // CHUNK  # chunks of a prompt and its answer but for the last token
USABLE = 300 // CHUNK  # chunks of a prompt


PARTS = ("group0.pp0.tp0", "group0.pp0.tp1")


class World:
    """One store, and engines that come and go."""

    def __init__(self, python: str, folder: Path, stack: ExitStack) -> None:
        """`stack` ends what is started here."""
        self._python = python
        self._folder = folder
        self._model = make_model(python, folder / "tiny")
        self._to = transfer(f"unix:{folder / 'k.sock'}")
        with self.engine("first") as vllm:
            self.answers = vllm.generate(*PROMPTS)
            flags = ("--capacity", "128MiB", "--no-populate", "--headroom", "0")
            daemon = stack.enter_context(running(folder, *flags))
            self.store = stack.enter_context(closing(Store(daemon.address)))
            until_used(vllm, self.store)
            self._publish(vllm)

    def engine(self, name: str, workers: int = 2) -> AbstractContextManager[VllmEngine]:
        folder = self._folder / name
        options = {"tensor_parallel_size": workers, "num_gpu_blocks_override": 64}
        return engine(self._python, folder, self._model, self._to, ONE_THREAD, **options)

    def _publish(self, vllm: VllmEngine) -> None:
        vllm.forget()
        before = self.store.counter("published_bytes")
        assert self.hits(vllm, *range(len(PROMPTS))) == (self.answers, 0)
        (space,) = self.store.spaces(PARTS)
        every = len(PROMPTS) * STORED * space["chunk_bytes"]  # of both parts
        self.until(
            lambda: self.store.counter("published_bytes") - before == every,
            "both workers have stored their parts",
            vllm,
            *range(len(PROMPTS)),
        )

    def until(self, done: Callable[[], bool], what: str, vllm: VllmEngine, *numbers: int) -> None:
        """Waits. What a busy machine was too slow to store, is stored when it is computed again."""

        def done_or_again() -> bool:
            if not done():
                vllm.forget()
                assert self.hits(vllm, *numbers)[0] == [self.answers[n] for n in numbers]
            return done()

        eventually(done_or_again, what, 120)

    def hits(self, vllm: VllmEngine, *numbers: int) -> tuple[list[list[int]], int]:
        """The answers to some of the prompts, and how many chunks the store has given for them."""
        before = self.store.counter("hit_chunks")
        answers = vllm.generate(*(PROMPTS[number] for number in numbers))
        return answers, self.store.counter("hit_chunks") - before

    def session(self) -> Session:
        (space,) = [n for n in self.store.namespaces if tuple(p.name for p in n.parts) == PARTS]
        return self.store.client.open(space)


@pytest.fixture(scope="module")
def world(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(vllm_python, tmp_path_factory.mktemp("parallel"), stack)


@pytest.fixture(scope="module")
def vllm(world: World) -> Iterator[VllmEngine]:
    """An engine that comes after the one that has stored the prompts."""
    with world.engine("second") as made:
        yield made


@pytest.fixture
def session(world: World, vllm: VllmEngine) -> Iterator[Session]:
    """In the engine's own namespace. vLLM has nothing of the prompts itself."""
    vllm.forget()
    yield world.session()
    eventually(lambda: not world.store.leases, "all leases are released")


def test_an_engine_loads_what_the_workers_of_another_one_have_stored_and_says_the_same(
    world: World, vllm: VllmEngine, session: Session
) -> None:
    (before,) = [space["hit_chunks"] for space in world.store.spaces(PARTS)]
    assert world.hits(vllm, *range(len(PROMPTS))) == (world.answers, len(PROMPTS) * USABLE)
    assert vllm.metric("external_prefix_cache_hits") == len(PROMPTS) * USABLE * CHUNK
    (hits,) = [space["hit_chunks"] for space in world.store.spaces(PARTS)]
    assert hits - before == len(PROMPTS) * USABLE


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_damaged_in_one_workers_part_is_computed_by_all(
    world: World, vllm: VllmEngine, session: Session, rank: int
) -> None:
    corrupt = world.store.counter("corrupt_chunks")
    with session.match(PROMPTS[rank]) as match:
        assert match.chunks == USABLE
        extent(world.store.client, match, 2, rank)[-1] ^= 1
    assert world.hits(vllm, rank) == ([world.answers[rank]], USABLE)
    counter = world.store.counter  # it shows that this worker has read its part
    eventually(lambda: counter("corrupt_chunks") == corrupt + 1, "the worker reports its part")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_that_lacks_one_workers_part_is_no_hit_until_that_worker_has_stored_it(
    world: World, vllm: VllmEngine, session: Session, rank: int
) -> None:
    tokens, answer, part = PROMPTS[2], world.answers[2], PARTS[1 - rank]
    with session.match(tokens) as match:
        assert match.chunks == USABLE
        payloads = session.payload(USABLE, part)
        assert session.pull(match, payloads, part=part).ok
        keys = match.keys
    session.delete(keys[2 * KEY_BYTES : 3 * KEY_BYTES])
    assert session.publish(keys, [payloads[2]], first=2, part=part).stored == 1
    assert world.hits(vllm, 2) == ([answer], 2)
    world.until(
        lambda: session.match(tokens, peek=True).chunks == USABLE, "it is whole again", vllm, 2
    )
    vllm.forget()
    assert world.hits(vllm, 2) == ([answer], USABLE)


def test_an_engine_with_one_worker_takes_nothing_of_it(world: World) -> None:
    with world.engine("alone", workers=1) as alone:
        assert world.hits(alone, 0)[1] == 0
        assert alone.metric("external_prefix_cache_hits") == 0
