"""Real daemons for tests: started as a user would, on sockets in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0


class RunningDaemon:
    """`kvpool serve` in a process of its own, ready unless `wait=False`."""

    def __init__(self, folder: Path, *flags: str, wait: bool = True, **environment: str) -> None:
        self.socket = folder / "k.sock"
        self.log = folder / "log"
        command = [sys.executable, "-W", "error", "-c", "from kvpool.cli import main; main()"]
        command += ["serve", "--json", "--socket", str(self.socket), "--capacity", "32MiB", *flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
        path = os.pathsep.join(filter(None, sys.path))
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**clean, "PYTHONPATH": path, **environment},
            )
        self.ready: dict[str, Any] = {}
        if wait:
            self.wait_until_ready()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the daemon did not start:\n{self.log.read_text()}"
        self.ready = json.loads(line)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(folder: Path, *flags: str, **environment: str) -> Iterator[RunningDaemon]:
    """A daemon that is ready, stopped at the end."""
    daemon = RunningDaemon(folder, *flags, **environment)
    try:
        yield daemon
    finally:
        daemon.close()


def eventually(condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
    """Polls until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
