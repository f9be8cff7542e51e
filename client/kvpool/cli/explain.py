"""`kvpool explain`: a prompt chunk by chunk, up to the first miss and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.store import (
    known_namespace,
    prompt_options,
    prompt_tokens,
    reach,
    show,
    size,
    store_options,
)
from kvpool.proto.outcomes import Outcome

if TYPE_CHECKING:
    from kvpool.client import Explanation


@click.command()
@store_options
@prompt_options
def explain(
    address: str | None,
    token: str,
    timeout: float,
    as_json: bool,
    namespace: str | None,
    tokens: str | None,
    text: str | None,
    model: str | None,
) -> None:
    """Show each chunk of a prompt: key, tier, bytes, parts, leases and age, or why it misses."""
    prompt = prompt_tokens(tokens, text, model)
    with reach(address, token, timeout) as client:
        session = client.open(known_namespace(client, namespace))
        told = session.explain(prompt)
    size_ = session.namespace.chunk_tokens
    value = {"tokens": len(prompt), "chunk_tokens": size_, "chunks": [_row(e) for e in told]}
    show(as_json, value, lambda: _lines(len(prompt), size_, told))


def _row(told: Explanation) -> dict[str, Any]:
    row = asdict(told)
    return row | {
        "key": told.key.hex(),
        "outcome": told.outcome.name,
        "reason": told.reason.name if told.outcome is not Outcome.HIT else None,
    }


def _lines(tokens: int, chunk_tokens: int, told: Sequence[Explanation]) -> list[str]:
    lines = []
    for i, chunk in enumerate(told):
        span = f"{i * chunk_tokens:>6}-{(i + 1) * chunk_tokens:<6} {chunk.key.hex()[:16]}"
        if chunk.outcome is not Outcome.HIT:
            reason = chunk.reason.name.lower().replace("_", " ")
            lines.append(f"{span} {chunk.outcome.name}: {reason}")
            rest = len(told) - i - 1
            if rest:
                lines.append(f"       {rest} more chunks are behind this gap")
            break
        lines.append(
            f"{span} {chunk.tier} {size(chunk.nbytes)} parts {','.join(chunk.parts)} "
            f"leases {chunk.leases} pins {chunk.pins} used {chunk.age_s:.1f} s ago"
        )
    tail = tokens % chunk_tokens
    if tail:
        lines.append(f"{tokens - tail:>6}-{tokens:<6} partial tail, not stored")
    return lines
