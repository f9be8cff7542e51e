"""`examples/vllm_disaggregated`: two real servers and the proxy, as one command starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from kvpool.bench.foreign import vllm_environment
from tests.engines.vllm_engines import BLOCK, CHUNK, REPOSITORY, Store, make_model, prompt
from tests.store.daemons import eventually

pytestmark = pytest.mark.engines

START_S = 300
USABLE = 300 // CHUNK
"""Chunks of a prompt."""


def free_port() -> int:
    """The first of three neighbours that nobody listens on."""
    for port in range(21000, 30000, 3):
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            try:
                for number, listener in enumerate((one, two, three)):
                    listener.bind(("127.0.0.1", port + number))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def complete(url: str, tokens: list[int]) -> list[int]:
    """The ids of 24 tokens, chosen greedily."""
    body = {
        "prompt": tokens,
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        (choice,) = json.load(answer)["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


@pytest.fixture(scope="module")
def example(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("disaggregated")
    model = make_model(vllm_python, folder / "tiny")
    environment = vllm_environment(vllm_python)
    environment["PYTHONPATH"] += f"{os.pathsep}{REPOSITORY / 'kvstore'}"
    script = str(REPOSITORY / "examples" / "vllm_disaggregated" / "run.py")
    command = [vllm_python, script, "--model", model, "--port", str(free_port())]
    command += ["--capacity", "128MiB", "--connector", json.dumps({"chunk_tokens": CHUNK}), "--"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", "64"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=folder
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()[-4000:]
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def test_decode_pulls_what_prefill_has_stored_and_says_what_one_server_says(
    example: dict[str, Any],
) -> None:
    store = Store(example["store"])
    tokens = prompt(1)
    alone = complete(example["prefill"], tokens)
    assert complete(example["proxy"], tokens) == alone
    assert store.counter("hit_chunks") >= USABLE

    tokens, before = prompt(2), store.counter("hit_chunks")
    through = complete(example["proxy"], tokens)
    assert store.counter("hit_chunks") - before == USABLE  # the answer came after the KV
    assert complete(example["prefill"], tokens) == through
    store.close()


def test_a_prefill_server_that_is_killed_in_the_middle_of_a_request_costs_no_token(
    example: dict[str, Any],
) -> None:
    store = Store(example["store"])
    tokens = prompt(3)
    alone = complete(example["prefill"], tokens)
    eventually(lambda: store.chunks, "something is stored")
    store.client.clear()
    os.killpg(example["prefill_pid"], signal.SIGSTOP)  # it holds the request that comes now
    answers: list[list[int]] = []
    asking = Thread(target=lambda: answers.append(complete(example["proxy"], tokens)))
    asking.start()
    asking.join(1.0)
    assert asking.is_alive() and not answers
    os.killpg(example["prefill_pid"], signal.SIGKILL)
    asking.join(120)
    assert answers == [alone]
    assert complete(example["proxy"], tokens) == alone
    store.close()
