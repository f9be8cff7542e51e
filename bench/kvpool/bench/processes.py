"""Processes that benches measure against: a real daemon, and what CPU a process has used."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.proto.errors import UnreachableError

TICK = os.sysconf("SC_CLK_TCK")
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running `kvpool serve`; `ready` is the object that it announced itself with."""

    pid: int
    address: str
    ready: dict[str, Any]

    def cpu_seconds(self) -> float:
        """CPU time of the daemon and its data workers so far."""
        return sum(cpu_seconds(pid) for pid in (self.pid, *children(self.pid)))


@contextlib.contextmanager
def running_daemon(*options: str) -> Iterator[Daemon]:
    """Starts a daemon on a private socket and stops it at the end. Raises `UnreachableError`."""
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        socket = str(Path(folder, "kvpool.sock"))
        program = "from kvpool.cli import main; main()"
        command = [sys.executable, "-c", program, "serve", "--socket", socket, "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UnreachableError(
                    f"the daemon ended with {process.wait()} before it was ready"
                )
            yield Daemon(process.pid, f"unix:{socket}", json.loads(line))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of `pid` so far; 0 if it is gone. Resolution: one clock tick."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children(pid: int) -> list[int]:
    """Direct children of `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found
