"""The store as a tier behind vLLM's own CPU pool: across restarts of either, and without the store.

One chunk of the pool is one block of the engine. Only prompts are offloaded, as is vLLM's default.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_engines import BLOCK, Store, VllmEngine, engine, make_model, prompt
from tests.store.daemons import RunningDaemon, eventually

pytestmark = pytest.mark.engines

CHUNKS = 300 // BLOCK
"""Full blocks of a prompt."""
FLAGS = ("--capacity", "64MiB", "--no-populate", "--headroom", "0")


def offloading(address: str) -> dict[str, Any]:
    """vLLM's `KVTransferConfig`."""
    tier = {
        "type": "KvpoolTier",
        "module_path": "kvpool.client.engines.vllm.tier",
        "address": address,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm_cpu_tiering",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [tier],
        },
    }


def settle(vllm: VllmEngine) -> None:
    """Gives vLLM the steps in which it learns of finished jobs."""
    vllm.generate(prompt(99, 40), tokens=4)


def test_a_tier_outlives_its_engine_and_its_store(vllm_python: str, tmp_path: Path) -> None:
    model = make_model(vllm_python, tmp_path / "tiny")
    daemon = RunningDaemon(tmp_path, *FLAGS)
    store = Store(daemon.address)
    tokens = prompt(1)
    with engine(vllm_python, tmp_path / "first", model, offloading(daemon.address)) as vllm:
        (reference,) = vllm.generate(tokens)
        settle(vllm)
        eventually(lambda: store.chunks >= CHUNKS, "the prompt is stored")
        assert store.counter("hit_chunks") == 0
        vllm.kill()
    eventually(lambda: not store.leases, "the dead engine's leases are gone")

    with engine(vllm_python, tmp_path / "second", model, offloading(daemon.address)) as vllm:
        assert vllm.generate(tokens) == [reference]
        assert store.counter("hit_chunks") == CHUNKS

        # vLLM's pool and prefix cache are emptied, the tier keeps what it has.
        assert vllm.ask("clear")["cleared"]
        daemon.signal(signal.SIGSTOP)
        assert vllm.generate(tokens) == [reference]
        daemon.signal(signal.SIGCONT)

        assert vllm.ask("clear")["cleared"]
        daemon.kill()
        assert vllm.generate(tokens) == [reference]
        store.close()
        daemon.close()

        daemon = RunningDaemon(tmp_path, *FLAGS)
        store = Store(daemon.address)

        def used() -> bool:
            assert vllm.ask("clear")["cleared"]
            assert vllm.generate(tokens) == [reference]
            settle(vllm)
            return store.counter("hit_chunks") >= CHUNKS

        eventually(used, "the new store is filled and used", 60)
    store.close()
    daemon.close()
