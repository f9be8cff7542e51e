"""The bench of evictions does what it says that it measures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvpool.bench.evict import _Store, run
from kvpool.cli.bench import evict


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "phz"])
def test_a_full_store_gives_up_as_many_chunks_as_it_takes_in(policy: str) -> None:
    store = _Store(policy, 500)
    assert store.fill() > 0
    for batch in (1, 20, 100):
        assert store.request(batch).chunks == batch
        assert store._index.room == 0
    store._policy.check_integrity()


def test_each_batch_size_has_a_row() -> None:
    rows = run("phz", 300, 60, lambda text: None, batches=(1, 20))
    assert [(row["rows"], row["at_a_time"]) for row in rows] == [(300, 1), (300, 20)]
    for row in rows:
        assert 0 < row["evict_us"] < row["with_uses_us"]
        assert row["longest_ms"] * 1e3 >= row["with_uses_us"] / 2


def test_the_command_reports_them() -> None:
    result = CliRunner().invoke(evict, ["--rows", "2000", "--chunks", "2000", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["at_a_time"] for row in json.loads(result.stdout)["rows"]] == [1, 20, 100, 1000]
