"""A real daemon with an SSD below its memory, killed and started again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvpool.cli import cli
from kvpool.client import Client, Session, connect, connect_async
from kvpool.proto.outcomes import Outcome
from kvpool.store.ssd.files import data_name
from tests.ssd.samples import namespace
from tests.store.daemons import RunningDaemon, eventually, http_get

SPACE = namespace(128 << 10)
TOKENS = 4
MEMORY = 8 << 20
"""Room for some 30 chunks of 256 KiB."""


def prompt(name: int, chunks: int) -> list[int]:
    return [name * 1000 + at for at in range(chunks * TOKENS)]


def payload(name: int, chunks: int) -> Any:
    """What this chain stores: the same in every life."""
    dice = np.random.default_rng(name)
    return dice.integers(0, 256, (100, 256 << 10), np.uint8)[:chunks]


def flags(folder: Path, *more: str) -> list[str]:
    return [
        *("--capacity", str(MEMORY), "--ssd-path", str(folder / "ssd"), "--ssd-capacity", "64MiB"),
        *("--policy", "lru", "--ssd-mode", "write_through", *more),
    ]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with closing(RunningDaemon(tmp_path, *flags(tmp_path))) as running:
        yield running


@contextmanager
def living(folder: Path, *more: str) -> Iterator[tuple[RunningDaemon, Client]]:
    """A daemon on the SSD of the one before, and a client of it."""
    with (
        closing(RunningDaemon(folder, *flags(folder, *more))) as daemon,
        connect(daemon.address) as client,
    ):
        yield daemon, client


def ssd_status(client: Client) -> dict[str, object]:
    status: dict[str, object] = client.status()["domains"]["local"]["ssd"]
    return status


def chunks_on_ssd(client: Client) -> int:
    count = ssd_status(client)["chunks"]
    assert isinstance(count, int)
    return count


def on_ssd(client: Client, chunks: int) -> bool:
    return chunks_on_ssd(client) == chunks


def publish_more_than_fits(client: Client, session: Session) -> None:
    """Chains 0 to 11 of eight chunks each, as fast as the SSD takes them."""
    for name in range(12):
        published = session.publish(prompt(name, 8), payload(name, 8))
        assert published.stored
        eventually(partial(on_ssd, client, 8 * (name + 1)), "all of it is written")


def pull_right(session: Session, name: int, chunks: int = 8) -> None:
    with session.match(prompt(name, chunks)) as match:
        assert match.chunks == chunks
        into = session.payload(chunks)
        pulled = session.pull(match, into)
        assert pulled.ok, pulled
        assert np.array_equal(into, payload(name, chunks))


def test_what_memory_had_no_room_for_is_pulled_from_the_ssd(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(SPACE)
        publish_more_than_fits(client, session)
        with session.match(prompt(0, 8)) as match:
            assert (match.chunks, match.ssd_chunks) == (8, 8)
            assert match.load_s > 0
            explained = session.explain(prompt(0, 8))
            assert [one.tier for one in explained] == ["SSD"] * 8
        pull_right(session, 0)
        assert [one.tier for one in session.explain(prompt(0, 8))] == ["DRAM"] * 8
        for name in range(12):
            pull_right(session, name)
        status = ssd_status(client)
        counters = status["counters"]
        assert isinstance(counters, dict)
        assert counters["hit_chunks"] > 8 and counters["corrupt_chunks"] == 0
        assert "direct" in status and status["reason"]
        shown = CliRunner().invoke(cli, ["status", "--address", daemon.address])
        assert "write-through" in shown.output and "blocks of" in shown.output


def test_views_may_be_borrowed_of_what_was_on_the_ssd(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(SPACE)
        publish_more_than_fits(client, session)
        with session.match(prompt(0, 8)) as match:
            lent = session.borrow(match)
            assert lent.ok
            assert np.array_equal(np.stack(lent.views), payload(0, 8))


def test_an_async_client_and_a_stream_pull_from_the_ssd_too(tmp_path: Path) -> None:
    with closing(RunningDaemon(tmp_path, *flags(tmp_path, "--tcp", "127.0.0.1:0"))) as daemon:
        with connect(daemon.address) as client:
            publish_more_than_fits(client, client.open(SPACE))
        with connect(daemon.ready["tcp"]) as remote:
            pull_right(remote.open(SPACE), 0)

        async def pull() -> None:
            async with connect_async(daemon.address) as client:
                session = await client.open(SPACE)
                with await session.match(prompt(1, 8)) as match:
                    into = session.payload(8)
                    assert match.ssd_chunks and (await session.pull(match, into)).ok
                    assert np.array_equal(into, payload(1, 8))

        asyncio.run(pull())


def test_another_session_adopts_a_match_whose_end_is_on_the_ssd(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client, connect(daemon.address) as worker:
        session, other = client.open(SPACE), worker.open(SPACE)
        publish_more_than_fits(client, session)
        with session.match(prompt(0, 8)) as match, other.adopt(match.lease, match.keys) as adopted:
            assert adopted.chunks == 8
            into = other.payload(8)
            assert other.pull(adopted, into).ok
            assert np.array_equal(into, payload(0, 8))


def test_a_prefix_is_brought_up_ahead_of_its_request(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(SPACE)
        publish_more_than_fits(client, session)
        words = ["warm", "--address", daemon.address, "--json", "--tokens"]
        warmed = CliRunner().invoke(cli, [*words, ",".join(map(str, prompt(0, 8)))])
        assert warmed.exit_code == 0, warmed.output
        assert json.loads(warmed.stdout) == {"chunks": 8, "tokens": 32}
        with session.match(prompt(0, 8), peek=True) as match:
            assert match.ssd_chunks == 0
        assert session.prefetch(prompt(1, 8)) == 8
        eventually(
            lambda: session.match(prompt(1, 8), peek=True).ssd_chunks == 0, "it comes by itself"
        )


def test_after_kill_9_all_that_was_announced_is_served_at_once(tmp_path: Path) -> None:
    with living(tmp_path) as (daemon, client):
        publish_more_than_fits(client, client.open(SPACE))
        daemon.kill()
    with living(tmp_path) as (_, client):
        assert chunks_on_ssd(client) == 96
        session = client.open(SPACE)
        for name in range(12):
            pull_right(session, name)
        counters = ssd_status(client)["counters"]
        assert isinstance(counters, dict) and counters["corrupt_chunks"] == 0


def test_a_stop_saves_what_only_memory_has(tmp_path: Path) -> None:
    with living(tmp_path, "--ssd-mode", "write_back") as (daemon, client):
        assert client.open(SPACE).publish(prompt(0, 8), payload(0, 8)).stored
        assert chunks_on_ssd(client) == 0
        assert daemon.stop() == 0
    with living(tmp_path) as (_, client):
        pull_right(client.open(SPACE), 0)


@pytest.mark.parametrize("kind", ["flip", "zero page"])
def test_damage_at_rest_is_a_miss_and_the_next_publish_works(tmp_path: Path, kind: str) -> None:
    with living(tmp_path, "--ssd-mode", "write_back") as (daemon, client):
        assert client.open(SPACE).publish(prompt(0, 8), payload(0, 8)).stored
        assert daemon.stop() == 0
    path = tmp_path / "ssd" / "local" / data_name(0)
    raw = bytearray(path.read_bytes())
    content = payload(0, 8)[3].tobytes()
    at = raw.find(content[:64]) + 5000
    raw[at : at + (1 if kind == "flip" else 4096)] = (
        bytes([raw[at] ^ 1]) if kind == "flip" else bytes(4096)
    )
    path.write_bytes(bytes(raw))
    with living(tmp_path) as (_, client):
        session = client.open(SPACE)
        into = session.payload(8)
        with session.match(prompt(0, 8)) as match:
            assert match.chunks == 8
            pulled = session.pull(match, into)
            assert pulled.chunks == 3 and pulled.outcomes[3] == Outcome.CORRUPT
        assert np.array_equal(into[:3], payload(0, 8)[:3])
        assert session.publish(prompt(0, 8), payload(0, 8)).stored
        pull_right(session, 0)


def test_what_loads_slower_than_it_computes_is_no_hit(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(SPACE)
        publish_more_than_fits(client, session)
        with session.match(prompt(0, 8), prefill_tokens_s=1e12) as match:
            assert (match.chunks, match.skipped, match.reason.name) == (0, 8, "SLOW_TIER")
        with session.match(prompt(0, 8), prefill_tokens_s=1.0) as match:
            assert (match.chunks, match.skipped) == (8, 0)


def test_delete_and_clear_reach_the_ssd(daemon: RunningDaemon) -> None:
    with connect(daemon.address) as client:
        session = client.open(SPACE)
        publish_more_than_fits(client, session)
        assert set(session.delete(prompt(0, 8))) == {Outcome.OK}
        assert session.match(prompt(0, 8), peek=True).chunks == 0
        assert session.clear() > 0
        assert chunks_on_ssd(client) == 0


def test_the_tier_is_in_health_and_metrics(tmp_path: Path) -> None:
    with closing(RunningDaemon(tmp_path, *flags(tmp_path, "--http", "127.0.0.1:0"))) as daemon:
        with connect(daemon.address) as client:
            session = client.open(SPACE)
            publish_more_than_fits(client, session)
            pull_right(session, 0)
        _, text = http_get(f"{daemon.ready['http']}/metrics")
        assert 'kvpool_ssd_down{domain="local"} 0.0' in text
        assert 'kvpool_ssd_hit_chunks_total{domain="local"} 8.0' in text
        code, text = http_get(f"{daemon.ready['http']}/health")
        assert code == 200 and "ok" in text


def test_a_capacity_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    more = ["--ssd-path", str(tmp_path / "ssd"), "--ssd-capacity", "1000TiB"]
    with closing(RunningDaemon(tmp_path, *more, wait=False)) as daemon:
        assert daemon.process.wait(60) != 0
    assert "more bytes" in daemon.log.read_text() and "left" in daemon.log.read_text()


def test_an_admission_that_the_policy_cannot_answer_is_refused_by_name(tmp_path: Path) -> None:
    with closing(
        RunningDaemon(tmp_path, *flags(tmp_path, "--ssd-admission", "phz"), wait=False)
    ) as daemon:
        assert daemon.process.wait(60) != 0
    assert "admission 'phz' needs a policy that values rows" in daemon.log.read_text()


def test_a_path_without_a_capacity_is_refused_by_name(tmp_path: Path) -> None:
    with closing(
        RunningDaemon(tmp_path, "--ssd-path", str(tmp_path / "ssd"), wait=False)
    ) as daemon:
        assert daemon.process.wait(60) != 0
    assert "ssd_capacity 0" in daemon.log.read_text()
