"""The adapter for transformers with a real model."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpool.bench.children import Child, Children
from kvpool.bench.foreign import converted_model, environment
from kvpool.bench.processes import running_daemon

pytestmark = pytest.mark.engines

ENGINES = Path(__file__).resolve().parents[2] / ".ci" / "engines"
PROMPT = [(7 * token) % 40_000 + 100 for token in range(300)]


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has transformers and SGLang, whose environment is built if need be."""
    built = subprocess.run([ENGINES, "sglang"], stdout=subprocess.PIPE, check=True)
    return built.stdout.decode().strip()


def test_a_real_model_says_the_same_after_a_restart_of_the_engine(python: str) -> None:
    model = converted_model(python, lambda text: None)
    with running_daemon("--capacity", "256MiB", "--headroom", "0") as daemon:
        with Children() as children:
            first = _start(children, python, model, daemon.address)
            alone = _prefill(children, first, store=False)
            missed = _prefill(children, first, store=True)
        with Children() as children:
            hit = _prefill(children, _start(children, python, model, daemon.address), store=True)
    assert (missed["published"], hit["pulled"], hit["trouble"]) == (1, 256, "")
    assert alone["token"] == missed["token"] == hit["token"]


def _start(children: Children, python: str, model: str, address: str) -> Child:
    own = environment(python, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    child = children.start("hf", ["-m", "kvpool.bench.hf_engine"], python=python, environment=own)
    child.send(model=model, address=address)
    children.receive(child)
    return child


def _prefill(children: Children, child: Child, *, store: bool) -> dict[str, Any]:
    child.send(do="prefill", prompt=PROMPT, store=store)
    return children.receive(child)
