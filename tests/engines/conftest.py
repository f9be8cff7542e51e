"""Tests against engines, each in an environment of its own that `.ci/engines` builds once.

Tests of an adapter inside the engine's own process are collected only where its library is
installed: the engine's interpreter runs them. Tests that are marked `engines` run in the plain
environment and talk to engines in other processes.
"""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines import sglang_import

_NEEDS = {
    "test_hf*.py": "transformers",
    "test_sglang*.py": "sglang",
    "test_vllm_memory.py": "torch",
}
_ENGINES = Path(__file__).resolve().parents[2] / ".ci" / "engines"

collect_ignore_glob = [pattern for pattern, engine in _NEEDS.items() if find_spec(engine) is None]
if find_spec("sglang") is not None:
    sglang_import.import_sglang()


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of vLLM's environment, which is built if need be."""
    built = subprocess.run([_ENGINES, "vllm"], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip()
