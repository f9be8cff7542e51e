"""`kvpool rm`: deletes chunks by key or by prompt."""

from __future__ import annotations

import click

from kvpool.cli.store import (
    known_namespace,
    parse_keys,
    prompt_options,
    prompt_tokens,
    reach,
    show,
    store_options,
)
from kvpool.proto.errors import InvalidError
from kvpool.proto.outcomes import Outcome


@click.command()
@store_options
@prompt_options
@click.argument("keys", nargs=-1)
def rm(
    address: str | None,
    token: str,
    timeout: float,
    as_json: bool,
    namespace: str | None,
    tokens: str | None,
    text: str | None,
    model: str | None,
    keys: tuple[str, ...],
) -> None:
    """Delete the chunks with these KEYS, or all chunks of a prompt (--tokens, --text)."""
    if bool(keys) == (tokens is not None or text is not None):
        raise InvalidError("say what to delete: KEYS, or a prompt by --tokens or --text")
    prompt = parse_keys(keys) if keys else prompt_tokens(tokens, text, model)
    with reach(address, token, timeout) as client:
        session = client.open(known_namespace(client, namespace))
        outcomes = session.delete(prompt)
    deleted = sum(outcome is Outcome.OK for outcome in outcomes)
    absent = len(outcomes) - deleted
    show(
        as_json,
        {"deleted": deleted, "absent": absent},
        lambda: [f"deleted {deleted} chunks, {absent} were not stored"],
    )
