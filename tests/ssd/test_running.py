"""The tiers of a daemon while it starts and ends."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.proto.errors import ConfigError
from kvpool.store.service import Health
from kvpool.store.ssd import running
from kvpool.store.ssd.lanes import Threads
from kvpool.store.ssd.running import SsdTiers
from kvpool.store.ssd.starting import Found, look

CAPACITY, CHUNKS = 256 << 20, 100


def tiers(path: Path) -> SsdTiers:
    return SsdTiers(
        str(path), CAPACITY, chunks=CHUNKS, write_through=False, admission="always", health=Health()
    )


def domain(name: str = "local") -> Any:
    return SimpleNamespace(name=name, pool=SimpleNamespace(capacity=1 << 20))


def test_a_folder_that_was_looked_at_is_let_go_if_the_start_goes_no_further(tmp_path: Path) -> None:
    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look([domain()])
        await begun.close()

    asyncio.run(begin())
    look(str(tmp_path / "local"), CAPACITY, CHUNKS).opened.close()


def test_a_folder_is_let_go_if_the_start_is_given_up_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, enough = Event(), Event()

    def slow(*given: Any) -> Found:
        looking.set()
        assert enough.wait(20)
        return look(*given)

    monkeypatch.setattr(running, "look", slow)

    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look([domain()])
        starting = asyncio.create_task(begun.start([domain()]))
        await asyncio.to_thread(looking.wait, 20)
        starting.cancel()
        await asyncio.wait((starting,))
        enough.set()
        await begun.close()

    asyncio.run(begin())
    look(str(tmp_path / "local"), CAPACITY, CHUNKS).opened.close()


def test_folders_are_looked_at_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, looks = Lock(), []

    def alone(*given: Any) -> Found:
        assert busy.acquire(blocking=False), "two at once would measure each other"
        try:
            looks.append(given[0])
            return look(*given)
        finally:
            busy.release()

    monkeypatch.setattr(running, "look", alone)
    domains = [domain(name) for name in "abc"]

    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look(domains)
        await asyncio.gather(*begun._looking.values())
        await begun.close()

    asyncio.run(begin())
    assert looks == [str(tmp_path / name) for name in "abc"]


def test_what_is_wrong_with_a_folder_is_said_when_the_tiers_start(tmp_path: Path) -> None:
    held = look(str(tmp_path / "local"), CAPACITY, CHUNKS)

    async def begin() -> None:
        begun = tiers(tmp_path)
        begun.look([domain()])
        try:
            with pytest.raises(ConfigError, match="in use by process"):
                await begun.start([domain()])
        finally:
            await begun.close()

    asyncio.run(begin())
    held.opened.close()


def test_an_end_takes_all_results_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    lanes = Threads(1, 1, lambda: None)
    for number in range(200):
        lanes.later(partial(got.append, number))

    class Tier:
        idle = property(lambda self: len(got) == 200)

    shelf = SimpleNamespace(tier=Tier())
    ssd: Any = SimpleNamespace(shelf=shelf, trouble=lambda: "")
    opened: Any = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(running, "END_S", 1.0)  # fifty turns

    async def end() -> None:
        begun = tiers(tmp_path)
        begun._running.append(running._Running(domain(), ssd, lanes, opened))
        await begun.close()

    asyncio.run(end())
    assert got == list(range(200))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (64, 2)])
def test_who_writes_leaves_cores_to_who_matches(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert running._writers() == threads
