"""Processes that run with another interpreter, which has an engine's library but perhaps not us."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvpool import bench, client, proto, transfer
from kvpool.bench.children import ChildError
from kvpool.bench.model import fetch_model


def environment(python: str, **more: str) -> dict[str, str]:
    """Ours without `KVPOOL_…`, and with the means to import kvpool from the tree that we run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    own.pop("PYTHONPATH", None)
    if Path(python) != Path(sys.executable):  # which has us, and another NumPy for the engine
        floors = (proto, transfer, client, bench)
        roots = [str(Path(str(floor.__file__)).parents[2]) for floor in floors]
        own["PYTHONPATH"] = os.pathsep.join(r for r in roots if "site-packages" not in r)
    return {**own, **more}


def vllm_environment(python: str) -> dict[str, str]:
    """For vLLM on CPUs: the scheduler in the engine's own process, a small KV cache, no network."""
    return environment(
        python,
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )


def converted_model(python: str, progress: Callable[[str], None]) -> str:
    """The folder of SmolLM2-135M in bfloat16, made of its GGUF file once. Raises `ChildError`."""
    file = fetch_model()
    folder = file.with_name(f"{file.stem}-bfloat16")
    if not folder.is_dir():
        progress("the model is converted, once")
        command = [python, "-m", "kvpool.bench.gguf_model", str(file), str(folder)]
        done = subprocess.run(
            command, env=environment(python), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ChildError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return str(folder)
