"""`kvpool keys`: the keys that the daemon holds, page by page."""

from __future__ import annotations

import json
from itertools import islice

import click

from kvpool.cli.store import reach, store_options


@click.command()
@store_options
@click.option("--limit", default=0, help="Stop after so many keys; 0: all.")
@click.option("--page", default=1000, show_default=True, help="Keys per request.")
def keys(
    address: str | None, token: str, timeout: float, as_json: bool, limit: int, page: int
) -> None:
    """List stored keys, one per line."""
    with reach(address, token, timeout) as client:
        found = islice(client.keys(page=max(1, page)), limit or None)
        if as_json:
            click.echo(json.dumps({"keys": [key.hex() for key in found]}))
            return
        for key in found:
            click.echo(key.hex())
