"""transformers' half of `kvpool bench engine`: SmolLM2-135M in float32 beside a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvpool.bench.children import Child, ChildError, Children
from kvpool.bench.engines import HITS, Sample, in_turns
from kvpool.bench.foreign import converted_model, environment
from kvpool.bench.processes import running_daemon

VOCABULARY = 49_000
CAPACITY = "4GiB"
CHUNK_TOKENS = 256


def samples(
    python: str, lengths: Sequence[int], pairs: int, progress: Callable[[str], None]
) -> Iterator[Sample]:
    """Pairs of "no store" with "miss", and of "hit" (after a restart of the engine) with "local
    hit" (the same prefix kept in the process, the lower bound)."""
    model = converted_model(python, progress)
    entropy = np.random.default_rng()
    prompts = {n: entropy.integers(0, VOCABULARY, (pairs, n)).tolist() for n in lengths}
    rounds = [(length, prompts[length][pair]) for pair in range(pairs) for length in lengths]
    with running_daemon("--capacity", CAPACITY, "--headroom", "0") as daemon:
        with Children() as children:
            writer = _Engine(children, python, model, daemon.address)
            for number, (length, prompt) in enumerate(rounds):
                progress(f"misses {number + 1}/{len(rounds)}")
                for store in in_turns(number, False, True):
                    done = writer.ask(do="prefill", prompt=prompt, store=store)
                    yield Sample(length, "miss" if store else "no store", done["ttft_ms"])
                    _check(done["published"], store * (length // CHUNK_TOKENS), done)
        with Children() as children:
            reader = _Engine(children, python, model, daemon.address)
            for number, (length, prompt) in enumerate(rounds * HITS):
                progress(f"hits {number + 1}/{len(rounds) * HITS}")
                done = reader.ask(do="prefill", prompt=prompt, store=True)
                yield Sample(length, "hit", done["ttft_ms"])
                _check(done["pulled"], (length - 1) // CHUNK_TOKENS * CHUNK_TOKENS, done)
                local = reader.ask(do="reuse", prompt=prompt)
                yield Sample(length, "local hit", local["ttft_ms"])
                _check(local["token"], done["token"], local)


def _check(got: int, wanted: int, answer: dict[str, Any]) -> None:
    if got != wanted:
        raise ChildError(f"{wanted} was expected where an engine answered {got}: {answer}")


class _Engine:
    """See `kvpool.bench.hf_engine`. Its first prompts are for warming up."""

    def __init__(self, children: Children, python: str, model: str, address: str) -> None:
        self._children = children
        threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._child: Child = children.start(
            "engine",
            ["-m", "kvpool.bench.hf_engine"],
            python=python,
            environment=environment(python, **threads),
        )
        self._child.send(model=model, address=address)
        children.receive(self._child)
        for store in (False, True):
            self.ask(do="prefill", prompt=list(range(CHUNK_TOKENS + 1)), store=store)

    def ask(self, **command: Any) -> dict[str, Any]:
        self._child.send(**command)
        return self._children.receive(self._child)
