"""vLLM's half of `kvpool bench engine`: SmolLM2-135M in real engines beside a real daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from kvpool.bench.children import Child, ChildError, Children
from kvpool.bench.engines import Sample
from kvpool.bench.foreign import converted_model, vllm_environment
from kvpool.bench.processes import running_daemon
from kvpool.bench.vllm_engine import Setup
from kvpool.client import Client, connect

OPTIONS = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 2048}
VOCABULARY = 49_000
CAPACITY = "6GiB"
CHUNK_TOKENS = 256
"""What the connector makes of vLLM's 128-token blocks."""
WARM_TOKENS, WARM_PROMPT = 24_000, 512
"""As many as vLLM's KV cache holds in `vllm_environment`: an engine in service has used all of its
memory before, which costs as much as a load."""
PUBLISHED_S = 30.0


def samples(
    python: str, lengths: Sequence[int], pairs: int, progress: Callable[[str], None]
) -> Iterator[Sample]:
    """Pairs of "no store" with "miss", and of "hit" (after a restart of the engine) with "local
    hit" (vLLM's own prefix cache, the lower bound)."""
    model = converted_model(python, progress)
    entropy = np.random.default_rng()
    prompts = {n: entropy.integers(0, VOCABULARY, (pairs, n)).tolist() for n in lengths}
    rounds = [(length, prompts[length][pair]) for pair in range(pairs) for length in lengths]
    with (
        running_daemon("--capacity", CAPACITY, "--headroom", "0") as daemon,
        connect(daemon.address) as client,
        Children() as lasting,
    ):
        connector = {
            "kv_connector": "KvpoolConnector",
            "kv_connector_module_path": "kvpool.client.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": daemon.address},
        }
        progress("an engine without the store starts")
        alone = _Engine(lasting, python, Setup(model, OPTIONS))
        with Children() as passing:
            progress("an engine with the store starts")
            writer = _Engine(passing, python, Setup(model, OPTIONS, connector))
            for number, (length, prompt) in enumerate(rounds):
                progress(f"misses {number + 1}/{len(rounds)}")
                before = _counter(client, "published_chunks")
                yield Sample(length, "no store", alone.ttft_ms(prompt))
                yield Sample(length, "miss", writer.ttft_ms(prompt))
                _published(client, before + length // CHUNK_TOKENS)
        with Children() as passing:
            progress("the engine with the store starts anew")
            reader = _Engine(passing, python, Setup(model, OPTIONS, connector))
            for number, (length, prompt) in enumerate(rounds):
                progress(f"hits {number + 1}/{len(rounds)}")
                before = _counter(client, "hit_chunks")
                alone.ttft_ms(prompt)
                yield Sample(length, "hit", reader.ttft_ms(prompt))
                yield Sample(length, "local hit", alone.ttft_ms(prompt))
                if _counter(client, "hit_chunks") - before != length // CHUNK_TOKENS:
                    raise ChildError(f"of a prompt of {length} tokens not all chunks were found")


class _Engine:
    """See `kvpool.bench.vllm_engine`. It has computed as much as its KV cache holds."""

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
        for _ in range(WARM_TOKENS // WARM_PROMPT):
            self.ttft_ms(entropy.integers(0, VOCABULARY, WARM_PROMPT).tolist())

    def ttft_ms(self, prompt: Sequence[int]) -> float:
        self._child.send(do="generate", prompts=[prompt], max_tokens=1)
        return float(self._children.receive(self._child)["ttft_ms"][0])


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
