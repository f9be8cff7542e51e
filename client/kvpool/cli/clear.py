"""`kvpool clear`: deletes everything of a tenant, or of one namespace."""

from __future__ import annotations

import click

from kvpool.cli.store import known_namespace, reach, show, store_options
from kvpool.proto.errors import InvalidError


@click.command()
@store_options
@click.option("--namespace", default=None, help="Only this one; default: all of the tenant's.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    address: str | None,
    token: str,
    timeout: float,
    as_json: bool,
    namespace: str | None,
    yes: bool,
) -> None:
    """Delete every chunk of this tenant."""
    if not yes:
        if as_json:
            raise InvalidError("clear asks before it deletes; give --yes together with --json")
        click.confirm("Delete every stored chunk?", abort=True)
    with reach(address, token, timeout) as client:
        if namespace is None:
            count = client.clear()
        else:
            count = client.open(known_namespace(client, namespace)).clear()
    show(as_json, {"deleted": count}, lambda: [f"deleted {count} chunks"])
