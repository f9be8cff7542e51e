"""Replays: what a trace says, what a policy makes of it, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvpool.bench import replay
from kvpool.bench.hints import hints_of
from kvpool.bench.simulation import prepare
from kvpool.bench.traces import NEVER, make_trace, read_trace
from kvpool.bench.two_tiers import TwoTiers
from kvpool.bench.workloads import make_workload, workload_names
from kvpool.cli.bench import replay as command
from kvpool.proto.errors import ConfigError, InvalidError

TINY = "0,a,b\n1,c,d\n2,a,b\n3,c,d\n4,a,b,x\n"
"""Two chains of two blocks in turn: five blocks in all, 11 references."""

ISSUED = {
    "policy",
    "capacity",
    "blocks",
    "references",
    "hits",
    "hit_ratio",
    "saved_work",
    "evictions",
    "writes",
    "gap_closed",
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.csv"
    path.write_text(TINY)
    return str(path)


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(command, [*arguments, "--jobs", "1", "--plot", "", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) == {"machine", "command", "rows"}
    rows: list[dict[str, Any]] = document["rows"]
    return rows


class TestFormats:
    def test_plain_lines_are_a_time_and_the_keys_of_a_chain(self, tiny: str) -> None:
        trace = read_trace(Path(tiny))
        assert [request.time_s for request in trace.requests] == [0, 1, 2, 3, 4]
        assert [request.blocks.tolist() for request in trace.requests] == [
            [0, 1],
            [2, 3],
            [0, 1],
            [2, 3],
            [0, 1, 4],
        ]
        assert (trace.unique, trace.references) == (5, 11)

    def test_of_mooncakes_blocks_only_full_ones_are_read(self, tmp_path: Path) -> None:
        path = tmp_path / "mooncake.jsonl"
        record = {"timestamp": 2500, "input_length": 2 * 512 + 511, "hash_ids": [7, 8, 9]}
        path.write_text(json.dumps(record | {"stop_reason": "tool_calls"}) + "\n")
        (request,) = read_trace(path).requests
        assert (request.time_s, request.blocks.tolist(), request.stop) == (
            2.5,
            [0, 1],
            "tool_calls",
        )

    def test_the_same_key_below_others_is_another_block(self) -> None:
        trace = make_trace("test", [(0, "ab"), (1, "cb")])
        assert trace.unique == 4

    @pytest.mark.parametrize("text", ["{}", "yesterday,a,b", '{"timestamp": 1}', "[1"])
    def test_what_is_no_request_is_refused_with_its_line(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "bad"
        path.write_text(f"0,a\n{text}\n")
        with pytest.raises(InvalidError, match="line 2"):
            read_trace(path)

    def test_next_uses_are_numbers_of_references(self, tiny: str) -> None:
        uses = read_trace(Path(tiny)).next_uses()
        assert uses[0].tolist() == [4, 5]
        assert uses[4].tolist() == [NEVER, NEVER, NEVER]

    def test_own_workloads_have_seeds(self) -> None:
        """The first one, if none is given."""
        sizes = [replay.load(name).references for name in ("cycles", "cycles:1", "cycles:2")]
        assert sizes[0] == sizes[1] != sizes[2]

    def test_random_loads_are_of_all_sizes(self) -> None:
        sizes = [make_workload("random", seed=seed).references for seed in range(20)]
        assert min(sizes) < 10_000
        assert max(sizes) > 200_000

    @pytest.mark.parametrize("name", workload_names())
    def test_own_workloads_are_the_same_each_time(self, name: str) -> None:
        one, other = (make_workload(name, scale=0.02) for _ in range(2))
        assert [r.blocks.tolist() for r in one.requests] == [
            r.blocks.tolist() for r in other.requests
        ]


class TestCounts:
    def test_with_room_for_one_chain_lru_never_hits_and_the_optimum_keeps_one(
        self, tiny: str
    ) -> None:
        """The optimum keeps a and b: hits at 2 and at 4, two blocks each; c and d get no room."""
        lru, best = rows_of(tiny, "--capacity", "40%", "--policy", "lru,belady")
        assert (lru["blocks"], lru["references"], lru["hits"]) == (2, 11, 0)
        assert (best["hits"], best["writes"], best["evictions"]) == (4, 2, 0)
        assert (lru["gap_closed"], best["gap_closed"]) == (0, 1)

    def test_with_room_for_all_every_repeated_block_hits(self, tiny: str) -> None:
        (row,) = rows_of(tiny, "--capacity", "100%", "--policy", "lru")
        assert (row["hits"], row["writes"], row["evictions"]) == (6, 5, 0)
        assert row["gap_closed"] is None

    def test_deeper_blocks_save_more_work(self, tiny: str) -> None:
        """Work of a block: 1 + its position / 30,500 tokens."""
        (row,) = rows_of(tiny, "--capacity", "100%", "--policy", "lru")
        second, third = 1 + 512 / 30_500, 1 + 1024 / 30_500
        work = 5 * (1 + second) + third
        assert row["saved_work"] == pytest.approx(3 * (1 + second) / work)


class TestTwoTiers:
    @pytest.mark.parametrize("policy", ["lru", "s3fifo", "phz"])
    def test_what_leaves_dram_is_found_on_the_ssd(self, tiny: str, policy: str) -> None:
        """DRAM holds one chain, the SSD all: each repeated block hits, in one of the two."""
        (row,) = rows_of(tiny, "--capacity", "40%", "--policy", policy, "--ssd", "2x")
        assert (row["blocks"], row["ssd_blocks"]) == (2, 4)
        assert row["hits"] == row["dram_hits"] + row["ssd_hits"] == 6
        assert row["dram_hits"] == 0
        assert row["ssd_writes"] == 4, "a copy stays: what comes back is not written again"

    @pytest.mark.parametrize("admission", ["always", "second_touch", "phz"])
    def test_tiers_never_hold_more_than_fits_and_stay_prefix_closed(self, admission: str) -> None:
        prepared = prepare(make_workload("chats", scale=0.03))
        tiers = TwoTiers(prepared, 60, 200, "phz", admission)
        for number in range(len(prepared.trace.requests)):
            tiers.serve(number)
            if number % 20 == 0:
                tiers.check_integrity()
        tiers.check_integrity()
        assert tiers.counts.ssd_hits > 0

    def test_admitting_less_writes_less(self) -> None:
        prepared = prepare(make_workload("chats", scale=0.04))
        writes = {}
        for admission in ("always", "second_touch", "phz"):
            tiers = TwoTiers(prepared, 40, 200, "phz", admission)
            for number in range(len(prepared.trace.requests)):
                tiers.serve(number)
            writes[admission] = tiers.counts.ssd_writes
        assert writes["second_touch"] < writes["always"]
        assert writes["phz"] < writes["always"]

    def test_an_admission_that_asks_for_values_needs_a_policy_that_has_them(self) -> None:
        prepared = prepare(make_trace("test", [(0, "ab")]))
        with pytest.raises(ConfigError, match="choose phz"):
            TwoTiers(prepared, 2, 2, "lru", "second_touch")
        with pytest.raises(ConfigError, match="choose always, second_touch, phz"):
            TwoTiers(prepared, 2, 2, "lru", "sometimes")


class TestHints:
    def test_the_oracle_tells_whether_the_last_block_is_used_again(self, tiny: str) -> None:
        trace = read_trace(Path(tiny))
        hints = hints_of(trace, trace.next_uses(), "oracle")
        assert [h.will_continue if h else None for h in hints] == [1, 1, 1, 0, 0]

    def test_stop_reasons_of_the_trace_are_believed(self, tmp_path: Path) -> None:
        path = tmp_path / "stops.jsonl"
        stops = ["tool_calls", "stop", None]
        lines = [
            {"timestamp": 0, "input_length": 512, "hash_ids": [1], "stop_reason": stop}
            for stop in stops
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
        trace = read_trace(path)
        hints = hints_of(trace, trace.next_uses(), "stop")
        assert [h.will_continue if h else None for h in hints] == [0.97, 0.71, None]

    @pytest.mark.parametrize("kind", ["none", "oracle", "stop"])
    def test_each_kind_can_be_replayed(self, tiny: str, kind: str) -> None:
        (row,) = rows_of(tiny, "--capacity", "100%", "--policy", "phz", "--hints", kind)
        assert row["hits"] == 6


class TestCommand:
    def test_rows_have_what_other_tools_read(self, tiny: str) -> None:
        rows = rows_of(tiny, "--capacity", "40%,0.8", "--policy", "lru,s3fifo,phz,phz-cost,belady")
        assert [(r["policy"], r["capacity"]) for r in rows][:3] == [
            ("lru", 0.4),
            ("lru", 0.8),
            ("s3fifo", 0.4),
        ]
        assert all(set(row) >= ISSUED for row in rows)

    def test_people_get_a_table_and_a_plot(self, tiny: str, tmp_path: Path) -> None:
        plot = tmp_path / "{}.svg"
        arguments = [tiny, "--capacity", "40%,80%", "--policy", "lru", "--jobs", "1"]
        result = CliRunner().invoke(command, [*arguments, "--plot", str(plot)])
        assert result.exit_code == 0, result.output
        assert "| policy | capacity % | blocks |" in result.stdout
        assert (tmp_path / "tiny.svg").read_text().startswith("<svg")

    def test_without_a_trace_there_are_recorded_ones_or_our_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert replay.default_traces() == ["agents", "chats"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--capacity", "200%"], "no list of what is asked for"),
            (["--ssd", "much"], "no multiple such as 10x"),
            (["--hints", "rumours"], "'rumours' is not one of"),
        ],
    )
    def test_options_that_make_no_sense_are_refused(
        self, tiny: str, arguments: list[str], message: str
    ) -> None:
        result = CliRunner().invoke(command, [tiny, *arguments])
        assert result.exit_code == 2
        assert message in result.output

    @pytest.mark.parametrize(
        ("trace", "policies", "message"),
        [
            ("nowhere", ("lru",), "no trace 'nowhere'"),
            ("chats:x", ("lru",), "no trace 'chats:x'.* as 'chats:7'"),
            ("chats", ("lur",), "no eviction policy 'lur'"),
        ],
    )
    def test_unknown_names_are_refused_with_those_there_are(
        self, trace: str, policies: tuple[str, ...], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            replay.run(trace, [0.1], policies, "none", lambda text: None)


def test_keys_are_random_so_that_the_index_sees_digests() -> None:
    prepared = prepare(make_trace("test", [(0, "abc"), (1, "ab")]))
    assert list(map(len, prepared.keys)) == [3 * 32, 2 * 32]
    assert prepared.keys[0].startswith(prepared.keys[1])
    assert len(set(prepared.tags.tolist())) == 3
