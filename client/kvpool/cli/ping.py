"""`kvpool ping`: is the daemon there, and how far away."""

from __future__ import annotations

import statistics

import click

from kvpool.cli.store import reach, show, store_options


@click.command()
@store_options
@click.option("--count", default=5, show_default=True, help="Round trips.")
def ping(address: str | None, token: str, timeout: float, as_json: bool, count: int) -> None:
    """Measure round trips to the daemon, and show how bytes would travel."""
    with reach(address, token, timeout) as client:
        times = [client.ping() * 1e6 for _ in range(max(1, count))]
        route = client.route()
    median = statistics.median(times)
    show(
        as_json,
        {
            "round_trips": len(times),
            "p50_us": median,
            "max_us": max(times),
            "route": route.name,
            "reason": route.reason,
        },
        lambda: [
            f"{len(times)} round trips: median {median:.0f} µs, worst {max(times):.0f} µs",
            f"bytes travel by {route.name}: {route.reason}",
        ],
    )
