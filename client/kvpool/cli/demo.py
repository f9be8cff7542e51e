"""`kvpool demo`: a conversation with and without the store, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.option("--turns", type=click.IntRange(min=1), help="How many questions to ask.")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="A GGUF file of the Llama architecture with SmolLM2's tokenizer, instead of fetching one.",
)
@click.option("--random-weights", is_flag=True, help="Fetch nothing: the text will be noise.")
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds for all but the download."
)
@click.option("--json", "as_json", is_flag=True, help="Only one JSON object on stdout, at the end.")
def demo(
    turns: int | None, model: Path | None, random_weights: bool, timeout: float, as_json: bool
) -> None:
    """Run a real model with and without the store, and compare.

    Starts a daemon, a prefill process and a decode process for itself, fetches a small model
    (93 MB, kept for the next time), and leaves no process behind.
    """
    from rich.console import Console

    from kvpool.bench.demo import Options, run
    from kvpool.bench.demo_view import View

    options = Options(turns or 0, model, random_weights, timeout_s=timeout)
    report = run(options, View(Console(quiet=as_json, highlight=False)))
    if as_json:
        click.echo(json.dumps(report.as_json()))
