"""Real daemons for tests: started as a user would, on sockets in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.chunk import extent_bytes, plane_sums, prologue_bytes, sum_seed, write_prologue
from kvpool.proto.keys import chain_keys
from kvpool.proto.layout import native
from kvpool.proto.namespace import Namespace
from kvpool.store.caller import Caller, hello
from kvpool.transfer.copying import Bytes

DEADLINE_S = 60.0


class RunningDaemon:
    """`kvpool serve` in a process of its own, ready unless `wait=False`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
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
                env={**clean, "PYTHONPATH": path, **(environment or {})},
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
def running(folder: Path, *flags: str) -> Iterator[RunningDaemon]:
    """A daemon that is ready, stopped at the end."""
    daemon = RunningDaemon(folder, *flags)
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


def http_get(url: str, token: str = "") -> tuple[int, str]:
    """(status, body)."""
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def namespace(nbytes: int = 4096, parts: int = 1, model: str = "test") -> Namespace:
    """Chunks of 4 tokens whose parts have two planes of `nbytes`."""
    return Namespace(
        model=model,
        revision="1",
        kv_dtype="uint8",
        kv_scales="none",
        layout="native:test",
        chunk_tokens=4,
        parts=tuple(native(f"p{i}", layers=("0", "1"), nbytes=nbytes) for i in range(parts)),
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


class Chunks:
    """A chain of chunks in one namespace: keys, and extents whose bytes tell whose they are."""

    def __init__(
        self, space: Namespace, count: int, tenant: str = "default", seed: int = 0
    ) -> None:
        self.space = space
        self.tenant = tenant
        self.digest = space.digest(tenant)
        tokens = [seed * 1000 + i for i in range(count * space.chunk_tokens)]
        self.packed = chain_keys(self.digest, tokens, space.chunk_tokens)
        self.keys = [self.packed[i * 32 : i * 32 + 32] for i in range(count)]

    @property
    def extent_bytes(self) -> int:
        """Of one chunk, all parts."""
        return sum(extent_bytes(part) for part in self.space.parts)

    def extent(self, chunk: int, part: int = 0) -> Bytes:
        layout, key = self.space.parts[part], self.keys[chunk]
        extent = np.zeros(extent_bytes(layout), np.uint8)
        payload = extent[prologue_bytes(layout) :]
        payload[:] = np.random.default_rng([*key, part]).integers(0, 256, payload.size, np.uint8)
        write_prologue(
            extent,
            namespace=self.digest,
            key=key,
            part=part,
            generation=0,
            nbytes=layout.nbytes,
            layout_id=self.space.layout_id,
            sums=plane_sums(payload, layout.offsets(), sum_seed(key, part)),
            planes=len(layout.planes),
        )
        return extent

    def payload(self, chunk: int, part: int = 0) -> bytes:
        return self.extent(chunk, part)[prologue_bytes(self.space.parts[part]) :].tobytes()

    @property
    def items(self) -> list[Bytes]:
        """All extents in the order of the wire."""
        parts = range(len(self.space.parts))
        return [self.extent(i, j) for i in range(len(self.keys)) for j in parts]


class Client(Caller):
    """A caller with the few steps that the tests repeat."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(address, hello(token, "test"))

    def open(self, space: Namespace) -> int:
        record = wire.Open(namespace=space.to_record(), digest=space.digest(self.welcome.tenant))
        opened = self.call(record)
        assert isinstance(opened, wire.Opened)
        return opened.namespace

    def publish(self, chunks: Chunks) -> bytes:
        """By shared memory; returns the outcomes of the commit."""
        space = self.open(chunks.space)
        reserved = self.call(wire.Reserve(namespace=space, keys=chunks.packed))
        assert isinstance(reserved, wire.Reserved)
        region_bytes, regions = self.attach(writable=True)
        addresses = np.frombuffer(reserved.extents, "<i8")[::2].tolist()
        for address, extent in zip(addresses, chunks.items, strict=True):
            region, offset = divmod(address, region_bytes)
            regions[region].view(offset, extent.size)[:] = extent
        for region in regions:
            region.close()
        verdict = self.call(wire.Commit(lease=reserved.lease))
        assert isinstance(verdict, wire.Verdict)
        return verdict.outcomes

    def match(self, space: int, keys: bytes, lease_ms: int = 0) -> wire.Matched:
        matched = self.call(wire.Match(namespace=space, keys=keys, lease_ms=lease_ms))
        assert isinstance(matched, wire.Matched)
        return matched

    def status(self) -> dict[str, Any]:
        report = self.call(wire.Status())
        assert isinstance(report, wire.StatusReport)
        status: dict[str, Any] = json.loads(report.json)
        return status
