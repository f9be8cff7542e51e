"""vLLM's half of `kvpool bench engine`: SmolLM2-135M in real engines beside a real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from kvpool.bench.children import Child, ChildError, Children
from kvpool.bench.engines import HITS, Sample, in_turns
from kvpool.bench.foreign import converted_model, vllm_environment
from kvpool.bench.processes import running_daemon
from kvpool.bench.vllm_engine import Setup
from kvpool.client import Client, connect

BLOCK_TOKENS = 128
BLOCKS = 48
"""Of vLLM's KV cache: two of the longest prompts, and more."""
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": BLOCKS,
}
VOCABULARY = 49_000
CAPACITY = "6GiB"
CHUNK_TOKENS = 256
"""What the connector makes of vLLM's 128-token blocks."""
WARM_PROMPT = 512
PUBLISHED_S = 30.0
STARTS = 4
"""Of the two engines that compute: processes differ by more than a miss costs."""


def samples(
    python: str, lengths: Sequence[int], pairs: int, progress: Callable[[str], None]
) -> Iterator[Sample]:
    """Pairs of "no store" with "miss", of two engines that are started several times; and of "hit"
    with "local hit" (vLLM's own prefix cache, the lower bound), of one that is started thereafter.
    """
    model = converted_model(python, progress)
    entropy = np.random.default_rng()
    prompts = {n: entropy.integers(0, VOCABULARY, (pairs + 1, n)).tolist() for n in lengths}
    with (
        running_daemon("--capacity", CAPACITY, "--headroom", "0") as daemon,
        connect(daemon.address) as client,
    ):
        connector = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.client.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": daemon.address},
        }
        starts = min(STARTS, pairs + 1)
        for start in range(starts):
            share = {length: prompts[length][start::starts] for length in lengths}
            progress(f"engines start, {start + 1}/{starts}")
            with Children() as passing:
                alone = _Engine(passing, python, Setup(model, OPTIONS))
                writer = _Engine(passing, python, Setup(model, OPTIONS, connector))
                yield from _misses(alone, writer, share, client, progress)
        with Children() as passing:
            progress("an engine starts anew")
            reader = _Engine(passing, python, Setup(model, OPTIONS, connector))
            for turn in range(HITS):
                for length in lengths:
                    progress(f"hits of {length} tokens, {turn + 1}/{HITS}")
                    yield from _hits(reader, length, prompts[length])


def _misses(
    alone: _Engine,
    writer: _Engine,
    prompts: Mapping[int, Sequence[Sequence[int]]],
    client: Client,
    progress: Callable[[str], None],
) -> Iterator[Sample]:
    """Pairs of "no store" with "miss"."""
    rounds = [(length, prompt) for length, mine in prompts.items() for prompt in mine]
    for number, (length, prompt) in enumerate(rounds):
        progress(f"misses {number + 1}/{len(rounds)}")
        before = _counter(client, "published_chunks")
        for case, engine in in_turns(number, ("no store", alone), ("miss", writer)):
            yield Sample(length, case, engine.ttft_ms(prompt))
        _published(client, before + length // CHUNK_TOKENS)


def _hits(reader: _Engine, length: int, prompts: Sequence[Sequence[int]]) -> Iterator[Sample]:
    """Each prompt but the first is a hit, and a local hit is the prompt before it."""
    reused = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    reader.forget()
    reader.ttft_ms(prompts[0], reused)
    before = reader.loaded_tokens()
    for number, (held, stored) in enumerate(pairwise(prompts)):
        for case, prompt in in_turns(number, ("local hit", held), ("hit", stored)):
            yield Sample(length, case, reader.ttft_ms(prompt, reused))
    if reader.loaded_tokens() - before != reused * (len(prompts) - 1):
        raise ChildError(f"of prompts of {length} tokens not all hits were of the store")


class _Engine:
    """See `kvpool.bench.vllm_engine`. It has computed as much as its KV cache holds, as engines in
    service have: the first use of memory costs as much as a load."""

    def __init__(self, children: Children, python: str, setup: Setup) -> None:
        self._children = children
        self._child: Child = children.start(
            "engine",
            ["-m", "kvpool.bench.vllm_engine"],
            python=python,
            environment=vllm_environment(python),
        )
        self._child.send(**asdict(setup))
        children.receive(self._child)
        entropy = np.random.default_rng(self._child.pid)
        for _ in range(BLOCKS * BLOCK_TOKENS // WARM_PROMPT):
            self.ttft_ms(entropy.integers(0, VOCABULARY, WARM_PROMPT).tolist())

    def ttft_ms(self, prompt: Sequence[int], reused: int = 0) -> float:
        """Of a prompt of which `reused` tokens are not computed."""
        done = self._ask(do="generate", prompts=[prompt], max_tokens=1)
        if done["cached"] != [reused]:
            raise ChildError(f"{reused} tokens were to be reused, but an engine says {done}")
        return float(done["ttft_ms"][0])

    def loaded_tokens(self) -> int:
        """Of all prompts so far, from the store."""
        return int(self._ask(do="metrics")["vllm:external_prefix_cache_hits"])

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self._ask(do="forget")

    def _ask(self, **command: Any) -> dict[str, Any]:
        self._child.send(**command)
        return self._children.receive(self._child)


def _counter(client: Client, name: str) -> int:
    (domain,) = client.status()["domains"].values()
    return int(domain["counters"][name])


def _published(client: Client, chunks: int) -> None:
    """Waits until so many chunks were published in all."""
    end = time.monotonic() + PUBLISHED_S
    while _counter(client, "published_chunks") < chunks:
        if time.monotonic() > end:
            raise ChildError(f"the engine did not publish its chunks within {PUBLISHED_S:g} s")
        time.sleep(0.01)
