"""`kvpool bench`: measurements beside their yardsticks."""

from __future__ import annotations

import sys

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
