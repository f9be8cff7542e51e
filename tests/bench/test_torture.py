"""Daemons that are killed under load lose nothing that they announced."""

from __future__ import annotations

import json
from typing import cast

import pytest
from click.testing import CliRunner

from kvpool.bench import torture, torture_client
from kvpool.bench.torture import Tally
from kvpool.cli import cli
from kvpool.client import Session


def test_killed_daemons_lose_nothing_that_they_announced_and_serve_no_wrong_byte() -> None:
    result = CliRunner().invoke(cli, ["bench", "torture", "--loops", "4", "--json"])
    assert result.exit_code == 0, result.output
    (figures,) = json.loads(result.stdout)["rows"]
    assert figures["loops"] == 4 and figures["acknowledged"] > 0 and figures["pulled"] > 0
    assert figures["wrong"] == figures["lost"] == 0


def test_chunks_of_different_places_differ_in_every_line() -> None:
    one, other = torture_client.payload(1, 0), torture_client.payload(1, 1)
    for at in range(0, one.size, torture_client.LINE):
        assert (one[at : at + torture_client.LINE] != other[at : at + torture_client.LINE]).any()


def test_only_what_was_announced_last_and_not_deleted_is_promised() -> None:
    tally = Tally()
    for chain, chunks in ((1, 3), (1, 5), (1, 4), (2, 8), (2, 0)):
        tally.hear({"chain": chain, "chunks": chunks})
    assert tally.promised == {1: 5}
    assert tally.acknowledged == 13


def test_a_promised_chunk_that_is_not_delivered_is_lost_once_whatever_came_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally = Tally(promised={1: 4})
    monkeypatch.setattr(
        torture, "pull", lambda session, chain: ([True, False, True, True, True], 0)
    )
    for _ in range(2):
        tally.check(cast(Session, None))
    assert (tally.lost, tally.pulled) == (1, 3)


@pytest.mark.parametrize("bad", ["wrong", "lost"])
def test_a_wrong_or_lost_chunk_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    row = {"loops": 1, "acknowledged": 8, "wrong": 0, "lost": 0}
    monkeypatch.setattr(torture, "run", lambda *arguments: row | {bad: 1})
    assert CliRunner().invoke(cli, ["bench", "torture", "--json"]).exit_code == 1
