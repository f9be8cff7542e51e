"""`kvpool warm`: brings the stored prefix of a prompt from the SSD into memory."""

from __future__ import annotations

import click

from kvpool.cli.store import (
    known_namespace,
    prompt_options,
    prompt_tokens,
    reach,
    show,
    store_options,
)


@click.command()
@store_options
@prompt_options
def warm(
    address: str | None,
    token: str,
    timeout: float,
    as_json: bool,
    namespace: str | None,
    tokens: str | None,
    text: str | None,
    model: str | None,
) -> None:
    """Load what is stored of a prompt into memory, and wait until it is there."""
    prompt = prompt_tokens(tokens, text, model)
    with reach(address, token, timeout) as client:
        session = client.open(known_namespace(client, namespace))
        chunks = session.prefetch(prompt, wait=True)
    value = {"chunks": chunks, "tokens": chunks * session.namespace.chunk_tokens}
    show(as_json, value, lambda: [f"{chunks} chunks, {value['tokens']} tokens, are in memory"])
