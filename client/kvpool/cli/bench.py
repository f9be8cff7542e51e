"""`kvpool bench`: measurements beside their yardsticks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


@click.group()
def bench() -> None:
    """Measure this machine. Results belong into bench/RESULTS.md, with machine, date, command."""


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _command() -> str:
    return " ".join(["kvpool", *sys.argv[1:]])


@bench.command()
@click.option("--chunks", default=600_000, show_default=True, help="Resident chunks.")
@click.option("--rounds", default=9, show_default=True, help="Interleaved rounds.")
@click.option("--samples", default=200, show_default=True, help="Matches per round and size.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def lookup(chunks: int, rounds: int, samples: int, as_json: bool) -> None:
    """Match 1, 128 and 1024 keys among many, idle and while a second client publishes."""
    from kvpool.bench import lookup as bench_lookup
    from kvpool.bench.report import emit

    rows = bench_lookup.run(chunks, rounds, samples, _progress)
    _progress("")
    for line in emit(_command(), rows, as_json):
        click.echo(line)


@bench.command()
@click.option("--policy", default="phz", show_default=True, help="lru, s3fifo or phz.")
@click.option("--rows", default=1_000_000, show_default=True, help="Resident chunks.")
@click.option("--chunks", default=60_000, show_default=True, help="Evictions per batch size.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def evict(policy: str, rows: int, chunks: int, as_json: bool) -> None:
    """Evict 1, 20, 100 and 1000 chunks at a time from many, without their bytes."""
    from kvpool.bench import evict as bench_evict
    from kvpool.bench.report import emit
    from kvpool.store.eviction import online_policy

    found = bench_evict.run(online_policy(policy), rows, chunks, _progress)
    _progress("")
    for line in emit(_command(), found, as_json):
        click.echo(line)


@bench.command()
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=click.Choice(["shm", "tcp"]),
    default=("shm", "tcp"),
    help="Default: both.",
)
@click.option(
    "--size", "sizes", multiple=True, type=int, help="MiB per chunk. Default: 2, 8 and 32."
)
@click.option("--rounds", default=9, show_default=True, help="Interleaved rounds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def transfer(
    transports: tuple[str, ...], sizes: tuple[int, ...], rounds: int, as_json: bool
) -> None:
    """Pull, publish and borrow 256 MiB at a time, beside memcpy and a bare socket."""
    from kvpool.bench import transfer as bench_transfer
    from kvpool.bench.report import emit

    wanted = [size << 20 for size in sizes] or list(bench_transfer.SIZES)
    rows = bench_transfer.run(transports, wanted, rounds, _progress)
    _progress("")
    for line in emit(_command(), rows, as_json):
        click.echo(line)


@bench.command()
@click.option("--engine", type=click.Choice(["hf", "vllm"]), required=True, help="Which one.")
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False),
    default=sys.executable,
    help="Interpreter that has the engine, e.g. of `.ci/engines`. Default: this one.",
)
@click.option(
    "--tokens", "lengths", multiple=True, type=int, help="Of a prompt. Default: 512, 1024, 1536."
)
@click.option(
    "--pairs", default=10, show_default=True, help="Prompts per length. Each is a hit five times."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def engine(engine: str, python: str, lengths: tuple[int, ...], pairs: int, as_json: bool) -> None:
    """Time to the first token of a real engine: no store, a miss, a hit, its own prefix cache."""
    from kvpool.bench import engines
    from kvpool.bench.report import emit

    rows = engines.run(engine, python, lengths or engines.LENGTHS, pairs, _progress)
    _progress("")
    for line in emit(_command(), rows, as_json):
        click.echo(line)


@bench.command()
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False),
    help="Folder on the device to be measured. Default: that of temporary files.",
)
@click.option(
    "--size", "sizes", multiple=True, type=int, help="MiB per chunk. Default: 2, 8 and 32."
)
@click.option("--rounds", default=7, show_default=True, help="Interleaved rounds.")
@click.option("--chunks", default=100_000, show_default=True, help="In the catalogue of a restart.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def ssd(path: str | None, sizes: tuple[int, ...], rounds: int, chunks: int, as_json: bool) -> None:
    """Pull from the SSD and demote to it beside the bare device; restart; match meanwhile."""
    from kvpool.bench import ssd as bench_ssd
    from kvpool.bench.report import emit

    wanted = [size << 20 for size in sizes] or list(bench_ssd.SIZES)
    rows = bench_ssd.run(path, wanted, rounds, chunks, _progress)
    _progress("")
    for line in emit(_command(), rows, as_json):
        click.echo(line)


@bench.command()
@click.option("--loops", default=20, show_default=True, help="Daemons that are killed.")
@click.option("--seed", default=0, show_default=True, help="Of the moments and the chunks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def torture(ctx: click.Context, loops: int, seed: int, as_json: bool) -> None:
    """Kill -9 a daemon with an SSD under load, again and again, and check all that it announced.

    Exits with 1 if a byte was wrong or a chunk that was announced is lost.
    """
    from kvpool.bench import torture as bench_torture
    from kvpool.bench.report import emit

    row = bench_torture.run(loops, seed, _progress)
    _progress("")
    for line in emit(_command(), [row], as_json):
        click.echo(line)
    if row["wrong"] or row["lost"]:
        ctx.exit(1)


class _List(click.ParamType[Any]):
    """Values between commas."""

    name = "list"

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tuple(self._kind(item.strip()) for item in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of what is asked for", param, ctx)


class _Times(click.ParamType[Any]):
    """`10x`."""

    name = "times"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            times = float(str(value).removesuffix("x"))
        except ValueError:
            times = math.nan
        if not 0 <= times < math.inf:
            self.fail(f"{value!r} is no multiple such as 10x", param, ctx)
        return times


def _share(text: str) -> float:
    """`2%` or `0.02`."""
    share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 < share <= 1:
        raise ValueError(text)
    return share


@bench.command()
@click.argument("traces", nargs=-1)
@click.option(
    "--capacity",
    "shares",
    type=_List(_share),
    default="0.5%,1%,2%,5%,10%,20%,50%",
    show_default=True,
    help="Shares of the trace's unique blocks.",
)
@click.option(
    "--policy",
    "policies",
    type=_List(str),
    help="Eviction policies. Default: lru,s3fifo,phz,belady; with --ssd lru,phz.",
)
@click.option(
    "--hints",
    type=click.Choice(["none", "oracle", "stop"]),
    default="none",
    show_default=True,
    help="What engines tell: nothing, whether a session goes on, or why an answer stopped.",
)
@click.option(
    "--ssd", type=_Times(), default=0.0, help="An SSD below: its capacity over DRAM's, as `10x`."
)
@click.option(
    "--admission",
    "admissions",
    type=_List(str),
    default="always",
    show_default=True,
    help="What goes to the SSD: always, second_touch, phz.",
)
@click.option("--jobs", default=0, help="Processes. Default: one per core.")
@click.option("--plot", default="replay-{}.svg", show_default=True, help="File; {}: the trace.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per trace on stdout.")
def replay(
    traces: tuple[str, ...],
    shares: tuple[float, ...],
    policies: tuple[str, ...] | None,
    hints: str,
    ssd: float,
    admissions: tuple[str, ...],
    jobs: int,
    plot: str,
    as_json: bool,
) -> None:
    """Replay TRACES against eviction policies, in simulated time, beside the optimum.

    A trace is a file (Mooncake's JSONL, or lines of `timestamp, key, key, ...`) or a built-in one:
    agents, chats, documents, cycles, recent, phases, random; with another seed as chats:7. Default:
    ../shared/traces/*.jsonl if there are any, else agents and chats. With --ssd there are two tiers
    and no gap to an optimum.
    """
    from kvpool.bench import replay as bench_replay
    from kvpool.bench.report import emit

    if policies is None:
        policies = ("lru", "phz") if ssd else ("lru", "s3fifo", "phz", "belady")
    for trace in traces or bench_replay.default_traces():
        workers = jobs or os.cpu_count() or 1
        if ssd:
            rows = bench_replay.run_two_tiers(
                trace, shares, policies, hints, ssd, admissions, _progress, workers
            )
        else:
            rows = bench_replay.run(trace, shares, policies, hints, _progress, workers)
        _progress("")
        if plot:
            name = Path(plot.format(Path(trace).stem))
            name.write_text(bench_replay.plot(trace, rows))
        for line in emit(_command(), rows if as_json else bench_replay.table(rows), as_json):
            click.echo(line)
