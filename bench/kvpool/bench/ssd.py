"""`kvpool bench ssd`: the SSD tier beside the bare device, same bytes, same run.

Demotion is timed from the call of a publish (write-through) until the last chunk is announced as
on the SSD; a pull from the match on, of chunks that memory has evicted meanwhile. Yardsticks are
as many threads as the daemon has, with bare `pwritev` and one `fdatasync`, or direct `preadv`.
The page cache forgets the tier's files before each pull.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvpool.bench import ssd_lookup, ssd_restart
from kvpool.bench.processes import Daemon, running_daemon
from kvpool.bench.report import Row
from kvpool.bench.ssd_tier import (
    DEADLINE_S,
    forget_pages,
    private_folder,
    ssd_options,
    tier_status,
    wait_written,
)
from kvpool.bench.transfer import TOTAL, BenchError, Case, Timing, namespace_of, row_of
from kvpool.client import Client, connect
from kvpool.store.ssd.running import READERS, WRITERS
from kvpool.transfer.copying import Bytes

SIZES = (2 << 20, 8 << 20, 32 << 20)
BEHIND = 4
"""A set of chunks is pulled when so many sets were demoted after it: memory, which holds less than
that, has evicted it."""


def run(
    path: str | None,
    sizes: Sequence[int],
    rounds: int,
    chunks: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """All rows, measured in `path` (None: the folder of temporary files): pulls and demotions of
    chunks of `sizes` bytes, matches during demotion, a restart with `chunks` chunks."""
    rows = [row for size in sizes for row in move(path, size, rounds, progress)]
    rows += ssd_lookup.measure(path, rounds, progress)
    return [*rows, ssd_restart.measure(path, chunks, progress)]


def move(
    path: str | None,
    size: int,
    rounds: int,
    progress: Callable[[str], None],
    total: int = TOTAL,
) -> list[Row]:
    """Rows of pull and demotion of `total` bytes in chunks of `size`."""
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder(path))
        bare = stack.enter_context(bare_file(folder / "bare", size, total))
        options = ["--capacity", str(4 * total), "--segment-bytes", str(total // 2)]
        options += ["--policy", "lru", *ssd_options(folder / "ssd", 16 * total)]
        daemon = stack.enter_context(running_daemon(*options))
        client = stack.enter_context(connect(daemon.address, deadline_s=DEADLINE_S))
        mover = _Mover(daemon, client, folder / "ssd", size, total // size)
        for number in range(BEHIND):
            progress(f"{size >> 20} MiB: filling, {number} of {BEHIND}")
            mover.demote()
        direct = f"{READERS} threads of direct preadv"
        written = f"{WRITERS} threads of direct pwritev, fdatasync"
        cases = [
            Case("ssd", "demote", size, True, written, mover.demote, bare.write, total),
            Case("ssd", "pull", size, True, direct, mover.pull, bare.read, total),
        ]
        for number in range(rounds + 1):  # the first round warms up and does not count
            progress(f"{size >> 20} MiB: round {number} of {rounds}")
            for case in cases:
                assert case.reference is not None
                if number % 2:  # whoever comes second finds the device busy or warmed up
                    timing, reference = case.run(), case.reference()
                else:
                    reference, timing = case.reference(), case.run()
                if number:
                    case.timings.append(timing)
                    case.references.append(reference)
        how = "direct" if tier_status(client)["direct"] else "buffered"
        return [{**row_of(case), "reads": how} for case in reversed(cases)]


class _Mover:
    """The operations to be timed, each on `chunks` chunks of `size` bytes."""

    def __init__(
        self, daemon: Daemon, client: Client, folder: Path, size: int, chunks: int
    ) -> None:
        self._daemon = daemon
        self._client = client
        self._session = client.open(namespace_of(size))
        self._folder = folder
        self._chunks = chunks
        self._rng = np.random.default_rng(size)
        self._source = self._rng.integers(0, 256, (self._chunks, size), np.uint8)
        self._target = np.ones_like(self._source)
        self._sets: deque[bytes] = deque()
        self._written = 0

    def demote(self) -> Timing:
        """CPU is the daemon's only: to copy into memory is the publisher's work."""
        keys, payloads = self._rng.bytes(32 * self._chunks), list(self._source)
        cpu, start = self._daemon.cpu_seconds(), time.perf_counter()
        published = self._session.publish(keys, payloads)
        self._written += self._chunks
        wait_written(self._client, self._written)
        seconds = time.perf_counter() - start
        if not published.stored:
            raise BenchError(f"demote failed: {published.outcomes} {published.text}")
        self._sets.append(keys)
        return Timing(seconds, self._daemon.cpu_seconds() - cpu)

    def pull(self) -> Timing:
        """The oldest set, which is deleted afterwards."""
        keys = self._sets.popleft()
        forget_pages(self._folder)
        cpu, start = time.process_time() + self._daemon.cpu_seconds(), time.perf_counter()
        with self._session.match(keys) as match:
            cold = match.ssd_chunks
            pulled = self._session.pull(match, self._target)
        seconds = time.perf_counter() - start
        cpu = time.process_time() + self._daemon.cpu_seconds() - cpu
        if cold != self._chunks or not pulled.ok or len(pulled.outcomes) != self._chunks:
            raise BenchError(f"pull failed: {cold} chunks on the SSD, {pulled.outcomes}")
        if not np.array_equal(self._target, self._source):
            raise BenchError("pull delivered other bytes than were published")
        self._target.fill(1)
        self._session.delete(keys)
        return Timing(seconds, cpu)


class BareFile:
    """A preallocated file, read and written directly in pieces of one chunk, as the tier's are:
    where one set was written, the next is not, and what is read was written some sets before."""

    def __init__(self, fd: int, size: int, total: int, pool: ThreadPoolExecutor) -> None:
        self._fd = fd
        self._pool = pool
        self._total = total
        memory: Bytes = np.frombuffer(mmap.mmap(-1, total), np.uint8)
        memory[:] = np.random.default_rng(size).integers(0, 256, total, np.uint8)
        self._pieces = [(memory[at : at + size], at) for at in range(0, total, size)]
        self._reads = self._writes = 0

    def read(self) -> Timing:
        """The oldest set."""
        start = self._reads % (BEHIND + 1) * self._total
        self._reads += 1
        return self._timed(READERS, partial(self._read_piece, start))

    def write(self) -> Timing:
        """Another set, over one that was read."""
        start = self._writes % (BEHIND + 1) * self._total
        self._writes += 1
        move = partial(self._write_piece, start)
        return self._timed(WRITERS, move, lambda: os.fdatasync(self._fd))

    def _timed(
        self,
        threads: int,
        move: Callable[[Bytes, int], None],
        end: Callable[[], None] = lambda: None,
    ) -> Timing:
        """Thread i takes pieces i, i + threads, …"""

        def work(first: int) -> None:
            for piece, at in self._pieces[first::threads]:
                move(piece, at)

        start = time.perf_counter(), time.process_time()
        list(self._pool.map(work, range(threads)))
        end()
        return Timing(time.perf_counter() - start[0], time.process_time() - start[1])

    def _read_piece(self, start: int, piece: Bytes, at: int) -> None:
        self._whole(os.preadv(self._fd, [piece], start + at), piece)

    def _write_piece(self, start: int, piece: Bytes, at: int) -> None:
        self._whole(os.pwritev(self._fd, [piece], start + at), piece)

    def _whole(self, done: int, piece: Bytes) -> None:
        if done != piece.size:
            raise BenchError(f"the device moved {done} of {piece.size} bytes at once")


@contextmanager
def bare_file(path: Path, size: int, total: int) -> Iterator[BareFile]:
    """The yardstick, on the same file system."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, (BEHIND + 1) * total)
        with ThreadPoolExecutor(max(READERS, WRITERS)) as pool:
            bare = BareFile(fd, size, total, pool)
            for _ in range(BEHIND):
                bare.write()
            yield bare
    finally:
        os.close(fd)
