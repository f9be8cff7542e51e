"""`kvpool bench transfer`: moving KV beside the machine's own limit, same work, same run.

One operation is one client call on `TOTAL` bytes in chunks of `size`. Yardsticks: for shared memory
`np.copyto` of the same bytes in the same pieces; for TCP two processes with one blocking loopback
socket each. Rounds interleave everything, so that the machine's noise hits all rows alike.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from kvpool.bench.processes import Daemon, cpu_seconds, running_daemon
from kvpool.bench.report import Row, median, spread
from kvpool.client import Namespace, Session, connect, native
from kvpool.proto.errors import KvpoolError
from kvpool.transfer.copying import copy

TOTAL = 256 << 20
"""Bytes of one operation: more than any cache."""
SIZES = (2 << 20, 8 << 20, 32 << 20)
LAYERS = 32
BORROWS = 21
START_S = 30.0
GB = 1e9


class BenchError(KvpoolError):
    """A bench could not measure what it was to measure."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation: wall seconds and CPU seconds of all processes that took part."""

    seconds: float
    cpu: float


@dataclass(slots=True)
class Case:
    """One row in the making."""

    transport: str
    op: str
    size: int
    checksum: bool
    yardstick: str
    run: Callable[[], Timing]
    reference: Callable[[], Timing] | None
    total: int = TOTAL
    """Bytes of one operation."""
    timings: list[Timing] = field(default_factory=list)
    references: list[Timing] = field(default_factory=list)


def namespace_of(size: int) -> Namespace:
    """Chunks of `size` bytes in 32 planes."""
    return Namespace(
        model=f"bench-transfer-{size}",
        revision="1",
        kv_dtype="uint8",
        kv_scales="none",
        layout="native:bench",
        chunk_tokens=16,
        parts=(native("all", layers=[str(i) for i in range(LAYERS)], nbytes=size // LAYERS),),
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


def run(
    transports: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Rows for all operations over `transports` (shm, tcp) at chunk `sizes` in bytes."""
    with ExitStack() as stack:
        options = ["--capacity", str(8 * TOTAL), "--segment-bytes", str(TOTAL // 2)]
        if "tcp" in transports:
            options += ["--tcp", "127.0.0.1:0"]
        daemon = stack.enter_context(running_daemon(*options))
        cases = [
            case
            for size in sizes
            for transport in transports
            for case in stack.enter_context(_cases(daemon, transport, size))
        ]
        for number in range(rounds + 1):  # the first round warms up and does not count
            progress(f"round {number} of {rounds}")
            for case in cases:
                timing, reference = case.run(), case.reference() if case.reference else None
                if number:
                    case.timings.append(timing)
                    if reference:
                        case.references.append(reference)
        return [row_of(case) for case in cases]


def row_of(case: Case) -> Row:
    """A row of the result."""
    rates = [case.total / GB / t.seconds for t in case.timings]
    yard = [case.total / GB / t.seconds for t in case.references]
    borrow = case.op == "borrow"
    return {
        "transport": case.transport,
        "op": case.op,
        "size": case.size,
        "checksum": case.checksum,
        "gb_per_s": None if borrow else median(rates),
        "gb_per_s_spread": None if borrow else spread(rates),
        "cpu_s_per_gb": None if borrow else median([t.cpu for t in case.timings]) * GB / case.total,
        "p50_us": median([t.seconds for t in case.timings]) * 1e6,
        "yardstick": case.yardstick,
        "yardstick_gb_per_s": median(yard) if yard else None,
        "yardstick_cpu_s_per_gb": (
            median([t.cpu for t in case.references]) * GB / case.total if yard else None
        ),
        "share_of_yardstick": (
            median([r / y for r, y in zip(rates, yard, strict=True)]) if yard else None
        ),
    }


@contextmanager
def _cases(daemon: Daemon, transport: str, size: int) -> Iterator[list[Case]]:
    """The operations of one transport and chunk size, over one connection."""
    address = daemon.address if transport == "shm" else daemon.ready["tcp"]
    with ExitStack() as stack:
        client = stack.enter_context(connect(address, deadline_s=60))
        session = client.open(namespace_of(size))
        mover = Mover(daemon, session, size)
        if transport == "shm":
            pull_yard = publish_yard = mover.memcpy
            name = "np.copyto"
        else:
            bare = stack.enter_context(bare_socket(size))
            pull_yard, publish_yard = bare.receive, bare.send
            name = "one blocking socket"
        cases = [
            Case(transport, op, size, check, name, timed(op, check), reference)
            for op, timed, reference in (
                ("pull", mover.pull, pull_yard),
                ("publish", mover.publish, publish_yard),
            )
            for check in (False, True)
        ]
        if transport == "shm":
            cases.append(Case(transport, "borrow", size, False, "none", mover.borrow(), None))
        yield cases


class Mover:
    """The operations to be timed, on buffers that were touched before."""

    def __init__(self, daemon: Daemon, session: Session, size: int) -> None:
        self._daemon = daemon
        self._session = session
        self._size = size
        self._chunks = TOTAL // size
        rng = np.random.default_rng(size)
        self._source = rng.integers(0, 256, (self._chunks, size), np.uint8)
        self._target = np.ones_like(self._source)
        self._rng = rng
        self._keys = self._fresh_keys()
        published = session.publish(self._keys, list(self._source))
        if not published.stored:
            raise BenchError(f"the store did not take the bench's chunks: {published.text}")

    def _fresh_keys(self) -> bytes:
        return self._rng.bytes(32 * self._chunks)

    def _clock(self) -> tuple[float, float]:
        """CPU seconds, then the time: looking at other processes is no part of the interval."""
        cpu = time.process_time() + self._daemon.cpu_seconds()
        return cpu, time.perf_counter()

    def _since(self, start: tuple[float, float]) -> Timing:
        seconds = time.perf_counter() - start[1]
        return Timing(seconds, time.process_time() + self._daemon.cpu_seconds() - start[0])

    def pull(self, op: str, check: bool) -> Callable[[], Timing]:
        def once() -> Timing:
            with self._session.match(self._keys) as match:
                start = self._clock()
                pulled = self._session.pull(match, self._target, verify=check)
                timing = self._since(start)
            if not pulled.ok or len(pulled.outcomes) != self._chunks:
                raise BenchError(f"{op} failed: {pulled.outcomes}")
            return timing

        return once

    def publish(self, op: str, check: bool) -> Callable[[], Timing]:
        def once() -> Timing:
            keys = self._fresh_keys()
            payloads = list(self._source)
            start = self._clock()
            published = self._session.publish(keys, payloads, checksum=check)
            timing = self._since(start)
            if not published.stored:
                raise BenchError(f"{op} failed: {published.outcomes} {published.text}")
            self._session.match(self._keys).release()  # keeps what pulls read from eviction
            self._session.delete(keys)
            return timing

        return once

    def borrow(self) -> Callable[[], Timing]:
        """The median of `BORROWS` in a row: one alone would measure caches that a copy emptied."""

        def once() -> Timing:
            timings = []
            with self._session.match(self._keys) as match:
                for _ in range(BORROWS):
                    start = self._clock()
                    borrowed = self._session.borrow(match)
                    timings.append(self._since(start))
                    if len(borrowed) != self._chunks or not borrowed.ok:
                        raise BenchError(f"borrow failed: {borrowed.outcomes}")
            return sorted(timings, key=lambda timing: timing.seconds)[BORROWS // 2]

        return once

    def memcpy(self) -> Timing:
        start = time.perf_counter(), time.process_time()
        for target, source in zip(self._target, self._source, strict=True):
            copy(target, source)
        return Timing(time.perf_counter() - start[0], time.process_time() - start[1])


class BareSocket:
    """A peer process at the other end of one blocking TCP connection."""

    def __init__(self, sock: socket.socket, peer: int, size: int) -> None:
        self._sock = sock
        self._peer = peer
        self._pieces = [memoryview(row) for row in np.ones((TOTAL // size, size), np.uint8)]

    def receive(self) -> Timing:
        """The peer sends `TOTAL` bytes in pieces of one chunk."""
        start = self._clock()
        self._sock.sendall(b"r")
        for piece in self._pieces:
            receive_all(self._sock, piece)
        return self._since(start)

    def send(self) -> Timing:
        """The peer receives as many, and says when it has them."""
        start = self._clock()
        self._sock.sendall(b"s")
        for piece in self._pieces:
            self._sock.sendall(piece)
        self._sock.recv(1)
        return self._since(start)

    def _clock(self) -> tuple[float, float]:
        cpu = time.process_time() + cpu_seconds(self._peer)
        return cpu, time.perf_counter()

    def _since(self, start: tuple[float, float]) -> Timing:
        seconds = time.perf_counter() - start[1]
        return Timing(seconds, time.process_time() + cpu_seconds(self._peer) - start[0])


@contextmanager
def bare_socket(size: int) -> Iterator[BareSocket]:
    """The yardstick of TCP: nothing but sendall and recv_into."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=bare_peer, args=(theirs, size))
    process.start()
    if not ours.poll(START_S):
        process.kill()
        raise BenchError(f"the yardstick's peer did not start within {START_S:g} s")
    sock = socket.create_connection(("127.0.0.1", ours.recv()))
    try:
        assert process.pid is not None
        yield BareSocket(sock, process.pid, size)
    finally:
        sock.close()
        process.join(10)


def bare_peer(pipe: Connection, size: int) -> None:
    """The other process: serves until its peer closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        sock, _ = server.accept()
    pieces = [memoryview(row) for row in np.ones((TOTAL // size, size), np.uint8)]
    with sock:
        while command := sock.recv(1):
            for piece in pieces:
                if command == b"r":
                    sock.sendall(piece)
                else:
                    receive_all(sock, piece)
            if command == b"s":
                sock.sendall(b".")


def receive_all(sock: socket.socket, piece: memoryview) -> None:
    """Fills `piece` from the blocking `sock`."""
    at = 0
    while at < len(piece):
        nbytes = sock.recv_into(piece[at:])
        if not nbytes:
            raise BenchError("the yardstick's peer closed its socket")
        at += nbytes
