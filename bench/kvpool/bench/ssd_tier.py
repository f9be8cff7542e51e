"""What benches of the SSD tier share: a place for it, options, what a daemon says of it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpool.bench.transfer import BenchError
from kvpool.client import Client

DEADLINE_S = 120.0
LOOK_S = 0.02
"""Between two questions whether the chunks are announced: each costs the daemon milliseconds."""


@contextmanager
def private_folder(path: str | None) -> Iterator[Path]:
    """A temporary folder in `path`."""
    with tempfile.TemporaryDirectory(prefix="kvpool-", dir=path) as folder:
        yield Path(folder)


def ssd_options(folder: Path, capacity: int) -> list[str]:
    """Of a daemon that writes to the SSD what is published."""
    tier = ["--ssd-path", str(folder), "--ssd-capacity", str(capacity)]
    return [*tier, "--ssd-mode", "write_through"]


def tier_status(client: Client) -> dict[str, Any]:
    """What the only domain of a daemon says of its SSD."""
    (domain,) = client.status()["domains"].values()
    figures: dict[str, Any] = domain["ssd"]
    return figures


def demoting(client: Client) -> int:
    """Chunks that are being written to the SSD, or wait for it."""
    figures = tier_status(client)
    return int(figures["writing_chunks"]) + int(figures["waiting_chunks"])


def wait_demoted(client: Client) -> None:
    """Returns when nothing is on its way to the SSD."""
    end = time.monotonic() + DEADLINE_S
    while chunks := demoting(client):
        if time.monotonic() > end:
            raise BenchError(f"{chunks} chunks are not on the SSD after {DEADLINE_S:g} s")
        time.sleep(LOOK_S)


def wait_written(client: Client, chunks: int) -> None:
    """Returns when `chunks` were announced since the daemon's start."""
    end = time.monotonic() + DEADLINE_S
    while (figures := tier_status(client))["counters"]["written_chunks"] < chunks:
        if time.monotonic() > end:
            raise BenchError(
                f"{figures['counters']['written_chunks']} of {chunks} chunks were written to the "
                f"SSD in {DEADLINE_S:g} s; it says: {figures['down'] or figures['full'] or 'up'}"
            )
        time.sleep(LOOK_S)


def forget_pages(folder: Path) -> None:
    """The page cache drops what it has of the data files in `folder`."""
    for path in folder.glob("**/data.*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
