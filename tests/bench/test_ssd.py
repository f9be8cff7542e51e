"""The bench of the SSD tier measures what it says, on little data."""

from __future__ import annotations

import math
from pathlib import Path

from kvpool.bench import ssd, ssd_restart
from kvpool.bench.report import text


def test_a_pull_reads_from_the_ssd_and_a_demotion_is_over_when_it_is_announced(
    tmp_path: Path,
) -> None:
    pull, demote = ssd.move(str(tmp_path), 1 << 20, 1, lambda text: None, total=16 << 20)
    assert (pull["op"], demote["op"]) == ("pull", "demote")  # it raises for what was in memory
    for row in (pull, demote):
        assert row["transport"] == "ssd" and row["size"] == 1 << 20
        assert math.isclose(row["gb_per_s"], (16 << 20) / row["p50_us"] / 1e3)
        assert row["yardstick_gb_per_s"] > 0 and row["yardstick_cpu_s_per_gb"] > 0


def test_a_restart_holds_the_chunks_of_the_catalogue_and_serves_the_one_with_data(
    tmp_path: Path,
) -> None:
    row = ssd_restart.measure(str(tmp_path), 1000, lambda text: None)  # it raises otherwise
    assert row["chunks"] == 1000 and row["first_hit_s"] > 0


def test_rows_of_different_kinds_have_a_table_each() -> None:
    lines = text("bench", [{"op": "pull", "size": 1}, {"op": "restart", "chunks": 2}])
    tables = ["| op | size |", "|---|---|", "| pull | 1 |", ""]
    assert lines[-7:] == [*tables, "| op | chunks |", "|---|---|", "| restart | 2 |"]
