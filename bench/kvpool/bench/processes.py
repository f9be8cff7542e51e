"""Processes that benches measure against: a real daemon, and what CPU a process has used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.bench.children import Children


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running `kvpool serve`; `ready` is the object that it announced itself with."""

    pid: int
    address: str
    ready: dict[str, Any]

    def cpu_seconds(self) -> float:
        """CPU time of the daemon and its data workers so far."""
        return sum(cpu_seconds(pid) for pid in (self.pid, *children_of(self.pid)))


@contextlib.contextmanager
def running_daemon(*options: str) -> Iterator[Daemon]:
    """Starts a daemon on a private socket and stops it at the end.

    Raises what keeps it from starting, and `KeyboardInterrupt` if we are told to stop meanwhile.
    """
    with Children() as children:
        socket = str(children.folder / "kvpool.sock")
        program = "from kvpool.cli import main; main()"
        serve = ["-c", program, "serve", "--json", "--log-level", "warning", "--socket", socket]
        daemon = children.start("daemon", [*serve, *options])
        yield Daemon(daemon.pid, f"unix:{socket}", children.receive(daemon))
        children.check()


def cpu_seconds(pid: int) -> float:
    """CPU time of `pid` so far, to the nanosecond; 0 if it is gone.

    Linux has a clock per process; its number is made as by clock_getcpuclockid(3).
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def children_of(pid: int) -> list[int]:
    """Direct children of `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found
