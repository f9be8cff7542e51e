"""A daemon starts on an SSD that holds many chunks: when is the first hit, what does a row cost?

The catalogue is filled with entries as demotion writes them, but without their data: only the
chain that is pulled was really published. Time runs from the start of the process until that chain
is in the caller's buffer; a row costs what the daemon's own memory is larger than with that chain
alone (not the pool, which is shared memory), once it serves. Medians of `STARTS` starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvpool.bench.lookup import CHAIN, tiny_namespace
from kvpool.bench.processes import Daemon, running_daemon
from kvpool.bench.report import Row, median, spread
from kvpool.bench.ssd_tier import (
    forget_pages,
    private_folder,
    ssd_options,
    tier_status,
    wait_written,
)
from kvpool.bench.transfer import BenchError
from kvpool.client import connect
from kvpool.proto.keys import KEY_BYTES
from kvpool.store.ssd.entries import Entry, Extent
from kvpool.store.ssd.listing import claim, read_listing
from kvpool.store.ssd.opening import open_folder
from kvpool.store.ssd.space import Space

MEMORY = "64MiB"
STARTS = 5
BATCH = 1 << 14
"""Entries in one commit."""


def measure(path: str | None, chunks: int, progress: Callable[[str], None]) -> Row:
    """The row of a restart with `chunks` chunks."""
    with private_folder(path) as folder:
        rows = chunks + CHAIN
        capacity = rows * 4096 * 9 // 8 + (256 << 20)
        options = ["--capacity", MEMORY, "--chunks", str(rows)]
        options += ssd_options(folder / "ssd", capacity)
        keys = np.random.default_rng(0).bytes(CHAIN * KEY_BYTES)
        _publish(options, keys)
        alone = [_first_hit(options, folder, keys, CHAIN) for _ in range(STARTS)]
        (tier,) = (folder / "ssd").iterdir()
        _fill(tier, capacity, rows, chunks, progress)
        full = []
        for number in range(STARTS):
            progress(f"restart with {chunks:,} chunks: {number + 1} of {STARTS}")
            full.append(_first_hit(options, folder, keys, rows))
    seconds, held = zip(*full, strict=True)
    return {
        "transport": "ssd",
        "op": "restart",
        "chunks": chunks,
        "starts": STARTS,
        "first_hit_s": median(seconds),
        "first_hit_s_spread": spread(seconds),
        "first_hit_s_without": median([one[0] for one in alone]),
        "bytes_per_row": (median(held) - median([one[1] for one in alone])) / chunks,
    }


def _publish(options: list[str], keys: bytes) -> None:
    """One chain is on the SSD."""
    with running_daemon(*options) as daemon, connect(daemon.address, deadline_s=60) as client:
        session = client.open(tiny_namespace())
        published = session.publish(keys, list(session.payload(CHAIN)))
        if not published.stored:
            raise BenchError(f"the store did not take the bench's chain: {published.text}")
        wait_written(client, CHAIN)


def _first_hit(options: list[str], folder: Path, keys: bytes, chunks: int) -> tuple[float, int]:
    """Seconds until the chain was pulled, and bytes of the daemon then."""
    forget_pages(folder)
    start = time.perf_counter()
    with running_daemon(*options) as daemon, connect(daemon.address, deadline_s=60) as client:
        session = client.open(tiny_namespace())
        with session.match(keys) as match:
            pulled = session.pull(match, session.payload(CHAIN)[: match.chunks])
        seconds = time.perf_counter() - start
        held = tier_status(client)["chunks"]
        if match.chunks != CHAIN or not pulled.ok or held != chunks:
            raise BenchError(f"{match.chunks} hits, {held} of {chunks} chunks after a restart")
        return seconds, _private_bytes(daemon)


def _private_bytes(daemon: Daemon) -> int:
    """Resident and not shared."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise BenchError("the kernel does not tell what is resident")


def _fill(
    path: Path, capacity: int, rows: int, chunks: int, progress: Callable[[str], None]
) -> None:
    """Adds `chunks` entries to the catalogue in `path`, in chains, beside what is there."""
    opened = open_folder(str(path), capacity, rows)
    try:
        identity = opened.identity
        sizes = (identity.file_bytes, identity.segment_bytes, identity.block_bytes)
        space = Space(opened.count, *sizes)
        catalogue = opened.catalogue
        listing, _ = read_listing(catalogue.pairs(), catalogue.figures()["entries"])
        if not claim(listing, space).all():
            raise BenchError("the catalogue of a daemon that has ended contradicts itself")
        number, first = int(listing.spaces[0]), Extent(0, *listing.extents[0][0].tolist())
        batch: list[Entry] = []
        for done, (key, parent) in enumerate(_chains(chunks)):
            found = space.allocate([first.nbytes])
            if found is None:
                raise BenchError(f"the tier has no room for {chunks} chunks")
            batch.append(Entry(key, number, parent, (first._replace(address=found[0]),)))
            if len(batch) == BATCH or done == chunks - 1:
                opened.catalogue.commit(batch, [])
                batch.clear()
                progress(f"filling: {done + 1:,} of {chunks:,} entries")
    finally:
        opened.close()


def _chains(chunks: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys and their parents, by key: a commit copies every page that it changes."""
    table = np.frombuffer(np.random.default_rng(1).bytes(chunks * KEY_BYTES), "S32")
    raw = table.view(np.uint8).reshape(-1, KEY_BYTES)
    for number in np.argsort(table).tolist():
        parent = raw[number - 1].tobytes() if number % CHAIN else b""
        yield raw[number].tobytes(), parent
