"""`kvpool status`: what the daemon holds and does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from kvpool.cli.store import reach, show, size, store_options


@click.command()
@store_options
def status(address: str | None, token: str, timeout: float, as_json: bool) -> None:
    """Show capacity, what holds it, namespaces, counters and warnings."""
    with reach(address, token, timeout) as client:
        report = client.status()
    show(as_json, report, lambda: list(_lines(report)))


def _account(account: dict[str, Any]) -> Iterator[str]:
    yield f"{size(account['used'])} used"
    yield f"{size(account['pinned'])} pinned"
    for word in ("reserve", "quota"):
        if account[word]:
            yield f"{word} {size(account[word])}"


def _prefill(tokens_s: float) -> str:
    return f", seems to compute {tokens_s:.0f} tokens/s" if tokens_s else ""


def _ssd(tier: dict[str, Any]) -> Iterator[str]:
    how = "direct" if tier["direct"] else "buffered"
    mode = "write-through" if tier["write_through"] else "write-back"
    yield (
        f"  ssd {tier['path']}: {size(tier['slabs']['used_bytes'])} used of "
        f"{size(tier['capacity'])}, {tier['chunks']} chunks, {mode}, {how} I/O in blocks of "
        f"{tier['block_bytes']} ({tier['reason']})"
    )
    yield (
        f"    queues: {size(tier['writing_bytes'])} to write, {size(tier['reading_bytes'])} to "
        f"read; reads {size(int(tier['read_bytes_s']))}/s; catalogue "
        f"{size(tier['catalogue']['file_bytes'])} of {size(tier['catalogue']['map_bytes'])}; "
        f"write amplification {tier['write_amplification']:.2f}, "
        f"{tier['writes_per_hit']:.1f} writes per hit"
    )
    yield "    " + ", ".join(f"{k} {v}" for k, v in tier["counters"].items() if v)
    if tier["down"] or tier["full"]:
        yield f"    down: {tier['down'] or tier['full']}"


def _lines(report: dict[str, Any]) -> Iterator[str]:
    state = "draining" if report["draining"] else "serving"
    yield f"{state}, tenant {report['tenant']}, {report['connections']} connections"
    for name, domain in report["domains"].items():
        held = domain["bytes"]
        yield (
            f"domain {name}: {size(held['stored'])} stored of {size(held['total'])}, "
            f"{domain['chunks']} chunks (at most {domain['chunks_max']}), policy {domain['policy']}"
        )
        yield "  " + ", ".join(
            f"{word} {size(held[word])}"
            for word in ("leased", "pinned", "evictable", "writing", "quarantined")
        )
        yield "  " + ", ".join(f"{k} {v}" for k, v in domain["counters"].items() if v)
        for account in domain["tenants"]:
            yield f"  tenant {account['tenant']}: " + ", ".join(_account(account))
        for space in domain["namespaces"]:
            yield (
                f"  namespace {space['id']}: {space['digest'][:16]} {space['model']}, "
                f"{space['chunk_tokens']} tokens and {size(space['chunk_bytes'])} a chunk, "
                f"{space['published']} published, {space['hit_chunks']} hit"
                + _prefill(space["prefill_tokens_s"])
            )
        if domain.get("ssd"):
            yield from _ssd(domain["ssd"])
        for warning in domain["warnings"]:
            yield f"  warning: {warning}"
