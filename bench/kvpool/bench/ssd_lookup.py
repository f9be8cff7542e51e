"""What a match costs while the SSD is written to at full speed, and while nothing happens.

Each round times matches of `KEYS` keys of an idle daemon, then publishes a burst and times them
again for as long as that is being demoted: nobody publishes meanwhile, so what differs is demotion.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvpool.bench.lookup import distinct, fill, one_match, tiny_namespace
from kvpool.bench.processes import running_daemon
from kvpool.bench.report import Row, median, percentile
from kvpool.bench.ssd_tier import demoting, private_folder, ssd_options, wait_demoted
from kvpool.bench.transfer import BenchError, namespace_of
from kvpool.client import Client, connect
from kvpool.proto.keys import KEY_BYTES

KEYS = 128
CHUNKS = 1 << 14
"""That are matched."""
SAMPLES = 200
"""Of the idle daemon in a round."""
BATCH = 10
"""Samples between two looks whether demotion goes on."""
BURST, SIZE = 512 << 20, 2 << 20
MEMORY, SSD = 2 * BURST, 4 * BURST


def measure(path: str | None, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """Two rows: matches without load, and during demotion."""
    with private_folder(path) as folder:
        options = ["--capacity", str(MEMORY), "--segment-bytes", "64MiB"]
        with (
            running_daemon(*options, *ssd_options(folder / "ssd", SSD)) as daemon,
            connect(daemon.address, deadline_s=60) as client,
        ):
            return _rows(client, rounds, progress)


def _rows(client: Client, rounds: int, progress: Callable[[str], None]) -> list[Row]:
    rng = np.random.default_rng(0)
    session, large = client.open(tiny_namespace()), client.open(namespace_of(SIZE))
    keys = np.frombuffer(fill(client, session, CHUNKS, rng, progress), np.uint8)
    table = keys.reshape(-1, KEY_BYTES)
    progress("what is matched is written to the SSD")
    wait_demoted(client)
    payloads = list(rng.integers(0, 256, (BURST // SIZE, SIZE), np.uint8))
    idle: list[float] = []
    busy: list[float] = []
    for number in range(rounds):
        progress(f"matches: round {number + 1} of {rounds}")
        idle += [one_match(session, distinct(table, KEYS, rng)) for _ in range(SAMPLES)]
        burst = rng.bytes(len(payloads) * KEY_BYTES)
        if not large.publish(burst, payloads).stored:
            raise BenchError("the store did not take the burst")
        while demoting(client):
            samples = [one_match(session, distinct(table, KEYS, rng)) for _ in range(BATCH)]
            if demoting(client):  # else it ended among them
                busy += samples
        large.delete(burst)
    if not busy:
        raise BenchError("demotion was over before a match could be timed: nothing is known")
    p99 = percentile(idle, 0.99)
    return [
        {
            "transport": "ssd",
            "op": "match",
            "keys": KEYS,
            "load": load,
            "samples": len(samples),
            "p50_us": median(samples) * 1e6,
            "p99_us": percentile(samples, 0.99) * 1e6,
            "p99_over_idle": percentile(samples, 0.99) / p99,
        }
        for load, samples in (("none", idle), ("demotion", busy))
    ]
