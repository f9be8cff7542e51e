"""Daemons that are killed under load lose nothing that they announced."""

from __future__ import annotations

import json

from click.testing import CliRunner

from kvpool.bench import torture
from kvpool.cli import cli


def test_killed_daemons_lose_nothing_that_they_announced_and_serve_no_wrong_byte() -> None:
    result = CliRunner().invoke(cli, ["bench", "torture", "--loops", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["loops"] == 2 and figures["acknowledged"] > 0 and figures["pulled"] > 0
    assert figures["wrong"] == figures["lost"] == 0


def test_chunks_of_different_places_differ_in_every_line() -> None:
    one, other = torture.payload(1, 0), torture.payload(1, 1)
    for at in range(0, one.size, torture.LINE):
        assert (one[at : at + torture.LINE] != other[at : at + torture.LINE]).any()
