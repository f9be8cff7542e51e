"""The tiers of a daemon while it starts and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.proto.errors import ConfigError
from kvpool.store.service import Health
from kvpool.store.ssd.running import SsdTiers
from kvpool.store.ssd.starting import look

CAPACITY, CHUNKS = 64 << 20, 100


def tiers(path: Path) -> SsdTiers:
    return SsdTiers(
        str(path), CAPACITY, chunks=CHUNKS, write_through=False, admission="always", health=Health()
    )


def domain() -> Any:
    return SimpleNamespace(name="local", pool=SimpleNamespace(capacity=1 << 20))


def test_a_folder_that_was_looked_at_is_let_go_if_the_start_goes_no_further(tmp_path: Path) -> None:
    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look([domain()])
        await begun.close()

    asyncio.run(begin())
    look(str(tmp_path / "local"), CAPACITY, CHUNKS).opened.close()


def test_what_is_wrong_with_a_folder_is_said_when_the_tiers_start(tmp_path: Path) -> None:
    held = look(str(tmp_path / "local"), CAPACITY, CHUNKS)

    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look([domain()])
        try:
            with pytest.raises(ConfigError):
                await begun.start([domain()])
        finally:
            await begun.close()

    asyncio.run(begin())
    held.opened.close()
