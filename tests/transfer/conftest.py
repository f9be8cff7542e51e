"""Helpers for tests that need another process."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts a Python process from source text, with pipes for its stdin and stdout.

    What it prints is how it reports; whatever is still alive at the end is killed.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(source: str, *args: str, fds: tuple[int, ...] = ()) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(source), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            env=environment,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def socket_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for Unix sockets."""
    return tmp_path_factory.mktemp("s")
