"""`kvpool bench lookup`: what a match costs, with and without a second client that publishes.

Chunks are as small as they can be (one plane of 64 bytes), because the index does not care. Each
sample is a ping-pong (an empty frame each way) and a match, one after the other on one connection,
so that noise of the machine hits both alike.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event

import numpy as np

from kvpool.bench.processes import running_daemon
from kvpool.bench.report import Row, median, percentile
from kvpool.client import Client, Namespace, Session, connect, native
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.keys import KEY_BYTES

PAYLOAD = 64
EXTENT = 256  # prologue of 192 bytes and the payload
CHAIN = 32
CHURN = 1 << 15
"""Rows beyond the measured chunks, which the second client fills and evicts."""
BATCHES = (1, 128, 1024)


def tiny_namespace() -> Namespace:
    """Chunks of one plane of 64 bytes."""
    return Namespace(
        model="bench-lookup",
        revision="1",
        kv_dtype="uint8",
        kv_scales="none",
        layout="native:bench",
        chunk_tokens=16,
        parts=(native("all", layers=["0"], nbytes=PAYLOAD),),
        key_scheme="tokens",
        adapter="none",
        rope="none",
        salt="none",
    )


def run(
    chunks: int,
    rounds: int,
    samples: int,
    progress: Callable[[str], None],
    batches: Sequence[int] = BATCHES,
) -> list[Row]:
    """Rows for `chunks` resident chunks, `rounds` interleaved rounds of `samples` matches."""
    rows_max = chunks + CHURN
    capacity = rows_max * EXTENT * 9 // 8 + (64 << 20)
    options = ("--capacity", str(capacity), "--chunks", str(rows_max), "--segment-bytes", "4MiB")
    with running_daemon(*options) as daemon, connect(daemon.address, deadline_s=30) as client:
        session = client.open(tiny_namespace())
        keys = fill(client, session, chunks, np.random.default_rng(0), progress)
        rows = _measure(client, session, keys, None, rounds, samples, progress, batches)
        with _publishing(daemon.address):
            rows += _measure(client, session, keys, "publish", rounds, samples, progress, batches)
        return rows


def fill(
    client: Client,
    session: Session,
    chunks: int,
    rng: np.random.Generator,
    progress: Callable[[str], None],
) -> bytes:
    """Publishes and pins `chunks` chunks in chains of random keys; returns the packed keys.

    They are pinned so that the second client, which evicts, does not take them away: a match is
    to find all of its keys in every row of the result.
    """
    keys = rng.bytes(chunks * KEY_BYTES)
    for done, chain in enumerate(_chains(keys)):
        publish_chain(client, session, chain)
        session.pin(chain)
        if done % 500 == 0:
            progress(f"filling: {done * CHAIN:,} of {chunks:,} chunks")
    return keys


def publish_chain(client: Client, session: Session, chain: bytes) -> None:
    """Reserves and commits one chain without writing payloads: the index does not look at them."""
    reserve = wire.Reserve(namespace=session.core.id, keys=chain)
    reserved: wire.Reserved = client.run(client.core.call(reserve), None)
    client.run(client.core.call(wire.Commit(lease=reserved.lease)), None)


def _chains(keys: bytes) -> Iterator[bytes]:
    for at in range(0, len(keys), CHAIN * KEY_BYTES):
        yield keys[at : at + CHAIN * KEY_BYTES]


@dataclass(slots=True)
class _Samples:
    pings: list[float] = field(default_factory=list)
    matches: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    """Per round: p50 of the match minus p50 of the ping-pong."""


def _measure(
    client: Client,
    session: Session,
    keys: bytes,
    load: str | None,
    rounds: int,
    samples: int,
    progress: Callable[[str], None],
    batches: Sequence[int],
) -> list[Row]:
    rng = np.random.default_rng(1)
    table = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
    found = {batch: _Samples() for batch in batches}
    for round_number in range(rounds):
        progress(f"load {load}: round {round_number + 1} of {rounds}")
        for batch in batches:
            pings, matches = [], []
            # Drawn beforehand: a draw goes through megabytes, and would leave cold caches.
            for asked in [distinct(table, batch, rng) for _ in range(samples)]:
                client.ping()  # the daemon has nothing left to do, so both samples find it idle
                pings.append(client.ping())
                matches.append(one_match(session, asked))
            found[batch].pings += pings
            found[batch].matches += matches
            found[batch].excess.append(median(matches) - median(pings))
    return [
        {
            "keys": batch,
            "load": load,
            "p50_us": median(one.matches) * 1e6,
            "p99_us": percentile(one.matches, 0.99) * 1e6,
            "pingpong_p50_us": median(one.pings) * 1e6,
            "above_pingpong_us": median(one.excess) * 1e6,
        }
        for batch, one in found.items()
    ]


def distinct(
    table: np.ndarray[tuple[int, int], np.dtype[np.uint8]], count: int, rng: np.random.Generator
) -> bytes:
    """`count` different keys in random order."""
    return table[rng.choice(len(table), count, replace=False)].tobytes()


def one_match(session: Session, packed: bytes) -> float:
    """Seconds of a match of `packed` keys, all of which are there."""
    start = time.perf_counter()
    match = session.match(packed)
    seconds = time.perf_counter() - start
    assert match.chunks * KEY_BYTES == len(packed), match
    match.release()
    return seconds


class _publishing:
    """A second client that publishes (and so evicts) at full speed in a process of its own."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._started = context.Event()
        arguments = (address, self._started, self._stop)
        self._process = context.Process(target=publish_until, args=arguments)

    def __enter__(self) -> None:
        self._process.start()
        self._started.wait(60)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(30)


def publish_until(address: str, started: Event, stop: Event) -> None:
    """The second client's process."""
    rng = np.random.default_rng(2)
    with connect(address, deadline_s=30) as client:
        session = client.open(tiny_namespace())
        while not stop.is_set():
            publish_chain(client, session, rng.bytes(CHAIN * KEY_BYTES))
            started.set()
