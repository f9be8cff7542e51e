"""vLLM engines for tests: real processes, a tiny model, and the store's view of what they did."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpool.bench.children import Child
from kvpool.bench.foreign import vllm_environment
from kvpool.bench.vllm_engine import Setup
from kvpool.client import Client, connect
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.namespace import Namespace
from tests.store.daemons import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK, CHUNK = 32, 64
"""Tokens."""
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
}
"""A prompt of 300 tokens is computed in three steps, and four of them hardly fit."""
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""For engines of several workers: vLLM would keep two cores free for each, and threads of theirs
that share a core spin against each other."""
START_S = 240.0
ANSWER_S = 120.0


def prompt(seed: int, tokens: int = 300) -> list[int]:
    """Token ids that share no prefix with those of another seed."""
    return [(seed * 131 + j * (7 + seed)) % 500 + 3 for j in range(tokens)]


def make_model(python: str, folder: Path, seed: int = 0) -> str:
    """A tiny model of random weights."""
    script = Path(__file__).with_name("tiny_model.py")
    environment = vllm_environment(python)
    subprocess.run([python, script, folder, str(seed)], check=True, env=environment)
    return str(folder)


def transfer(address: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """vLLM's `KVTransferConfig` for a store at `address`."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.client.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "chunk_tokens": CHUNK, **extra},
    }


class VllmEngine:
    """See `kvpool.bench.vllm_engine.Engine`."""

    def __init__(
        self, python: str, folder: Path, setup: Setup, variables: Mapping[str, str]
    ) -> None:
        self.log = folder / "vllm.log"
        environment = {**vllm_environment(python), **variables}
        environment["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY}"  # for `vllm_cpu_tiering`
        self._child = Child(
            "vLLM",
            ["-m", "kvpool.bench.vllm_engine"],
            self.log,
            python=python,
            environment=environment,
        )
        self._child.send(**asdict(setup))
        self._answer(START_S)

    def _answer(self, seconds: float) -> dict[str, Any]:
        answer = self._child.poll(seconds)
        assert answer is not None, f"no answer within {seconds} s:\n{self.log.read_text()[-3000:]}"
        return answer

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        self._child.send(do=name, **arguments)
        return self._answer(ANSWER_S)

    def generate(self, *prompts: Sequence[int], tokens: int = 24, **more: Any) -> list[list[int]]:
        """The answers, of so many tokens each."""
        answer = self.ask("generate", prompts=prompts, max_tokens=tokens, **more)
        generated: list[list[int]] = answer["tokens"]
        return generated

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.ask("forget")["forgotten"]

    def metric(self, name: str) -> int:
        return int(self.ask("metrics")[f"vllm:{name}"])

    def kill(self) -> None:
        """`kill -9`."""
        self._child.reap(0)

    def close(self) -> None:
        self._child.terminate()
        self._child.reap(10)


@contextmanager
def engine(
    python: str,
    folder: Path,
    model: str,
    to: dict[str, Any] | None,
    variables: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Iterator[VllmEngine]:
    """A running engine. `to`: its `KVTransferConfig`; `variables`: of its environment."""
    folder.mkdir(exist_ok=True)
    running = VllmEngine(python, folder, Setup(model, {**OPTIONS, **options}, to), variables)
    try:
        yield running
    finally:
        running.close()


class Store:
    """What a daemon says of itself."""

    def __init__(self, address: str) -> None:
        self.client: Client = connect(address)

    def close(self) -> None:
        self.client.close()

    @property
    def _domain(self) -> dict[str, Any]:
        (domain,) = self.client.status()["domains"].values()
        assert isinstance(domain, dict)
        return domain

    def counter(self, name: str) -> int:
        return int(self._domain["counters"][name])

    @property
    def chunks(self) -> int:
        return int(self._domain["chunks"])

    @property
    def leases(self) -> int:
        return int(self._domain["leases"])

    def spaces(self, parts: Sequence[str]) -> list[dict[str, Any]]:
        """The figures of the namespaces with these parts."""
        return [
            space
            for space in self._domain["namespaces"]
            if [part["name"] for part in space["parts"]] == list(parts)
        ]

    @property
    def namespaces(self) -> list[Namespace]:
        records = [bytes.fromhex(space["record"]) for space in self._domain["namespaces"]]
        return [Namespace.from_record(wire.NamespaceRecord.FromString(r)) for r in records]


def until_used(vllm: VllmEngine, store: Store) -> None:
    """Waits until all of an engine's workers have stored a prompt of its own in a store that was
    away, and its scheduler has found it: they pause before they try again."""
    tokens = prompt(99)

    def found() -> bool:
        vllm.forget()
        before = store.counter("hit_chunks")
        vllm.generate(tokens, tokens=1)
        return store.counter("hit_chunks") - before == len(tokens) // CHUNK

    eventually(found, "the engine uses the store", 60)
