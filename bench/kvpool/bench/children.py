"""Processes that speak JSON lines with us, and of which nothing is left in the end.

Whatever happens — an error, Ctrl-C, SIGTERM, a closed terminal — leaving `Children` ends them all
and removes their folder. To be sure of that, signals do not interrupt: they are noted, and raised
as `KeyboardInterrupt` where `Children` waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

from kvpool.proto.errors import KvpoolError, from_code

_LOOK_S = 0.05
"""How soon a signal is answered."""
_GRACE_S = 5.0
"""How long a process may take to end by itself."""


class ChildError(KvpoolError):
    """A process of ours failed or did not answer in time; the text says which and how."""

    fault = "theirs"


class Child:
    """A process with JSON lines on its stdin and stdout. Its stderr is in the file `log`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` None: ours, so that it imports what we import."""
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment or _environment(),
                start_new_session=True,  # the terminal's Ctrl-C is for us, who tell them
            )
        self._received = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **message: Any) -> None:
        """Raises `ChildError` if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error

    def poll(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None if none comes within `timeout_s`. Raises `ChildError` if the
        process has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._received:
            readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            if not readable:
                return None
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failure()
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def check(self) -> None:
        """Raises `ChildError` if the process has ended."""
        if self._process.poll() is not None:
            raise self._failure()

    def terminate(self) -> None:
        self._process.terminate()

    def reap(self, grace_s: float) -> None:
        """Wait for the end, which comes after `grace_s` seconds at the latest."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _failure(self) -> KvpoolError:
        """Why the process has ended: the error that it has reported, or what can be seen."""
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._received += self._process.stdout.read()
        self.reap(_GRACE_S)
        for line in self._received.splitlines():
            message = json.loads(line)
            if "error" in message:
                return error_of(message)
        code = self._process.returncode
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        return ChildError(f"the {self.name} process {how}{self.last_words}")

    @property
    def last_words(self) -> str:
        """The last line of its log, behind a colon; empty if there is none."""
        return _cause(self._log)


def error_of(message: dict[str, Any]) -> KvpoolError:
    """The error that a process reports by its code in `error`, and `text`."""
    return from_code(message["error"], message["text"])


def _cause(log: Path) -> str:
    """The last line of a log; of a command's error in JSON its text."""
    lines = log.read_text(errors="replace").strip().splitlines()
    if not lines:
        return ""
    try:
        return f": {json.loads(lines[-1])['text']}"
    except (ValueError, KeyError, TypeError):
        return f": {lines[-1]}"


def _environment() -> dict[str, str]:
    """Children import what we import, use one BLAS thread, and no daemon of the user's."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    # BLAS threads spin while they wait: two engines on two cores would take 40 times as long.
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    return {**own, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Children:
    """Owner of processes and of a private folder. Use as a context manager, in the main thread."""

    SIGNALS: ClassVar = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, advice: str = "") -> None:
        """`advice`: what the user can do if the deadline passes."""
        self._advice = f"; {advice}" if advice else ""
        self.folder = Path()
        """Private and temporary."""
        self.deadline = float("inf")
        """When the patience with all of them ends, on `time.monotonic`."""
        self._children: list[Child] = []
        self._interrupted = False
        self._handlers: dict[int, Any] = {}

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Run `python`, by default this one, with `arguments`; see `Child`."""
        log = self.folder / f"{name}.log"
        child = Child(name, arguments, log, python=python, environment=environment)
        self._children.append(child)
        return child

    def receive(self, child: Child) -> dict[str, Any]:
        """The next message of `child`.

        Raises `ChildError` if it or another one has ended or the deadline has passed, the error
        that a message reports in `error` and `text`, and `KeyboardInterrupt` if we are to stop.
        """
        while True:
            self.check()
            message = child.poll(_LOOK_S)
            for other in self._children:  # one that has ended may be why this one reports an error
                if other is not child:
                    other.check()
            if message is not None:
                if "error" in message:
                    raise error_of(message)
                return message
            if time.monotonic() > self.deadline:
                raise ChildError(
                    f"the {child.name} process took too long{self._advice}{child.last_words}"
                )

    def kill(self, child: Child) -> None:
        """Ends `child` at once, as kill -9 does; it is none of ours any more."""
        self._children.remove(child)
        child.reap(0.0)

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if we are to stop."""
        if self._interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> Children:
        self._handlers = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        self.folder = Path(tempfile.mkdtemp(prefix="kvpool-"))
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.terminate()
        end = time.monotonic() + _GRACE_S
        for child in self._children:
            child.reap(max(0.0, end - time.monotonic()))
        shutil.rmtree(self.folder)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self.check()
