"""`kvpool config`: what a daemon would be told, and by whom."""

from __future__ import annotations

import json
from typing import Any

import click

from kvpool.cli.serve import config_options, given


@click.group()
def config() -> None:
    """Look at the configuration of a daemon."""


@config.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(path: str | None, as_json: bool, **options: Any) -> None:
    """Show the value that `kvpool serve` would use for each key, and where it comes from."""
    from kvpool.store.config import load

    effective = load(given(options), path=path).effective()
    if as_json:
        click.echo(json.dumps(effective))
        return
    width = max(map(len, effective))
    values = {name: json.dumps(entry["value"]) for name, entry in effective.items()}
    broad = max(map(len, values.values()))
    for name, entry in effective.items():
        click.echo(f"{name:{width}}  {values[name]:{broad}}  {entry['origin']}")
