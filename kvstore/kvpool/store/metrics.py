"""What a daemon tells Prometheus: `Service.status` as counters and gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STATES = ("starting", "ok", "degraded", "draining")

_COUNTERS = {
    "matches": "Matches asked for, peeks excluded",
    "hit_chunks": "Chunks that matches found",
    "missed_matches": "Matches that ended before the last key",
    "published_chunks": "Chunks that became visible",
    "published_bytes": "Bytes that became visible",
    "evicted_chunks": "Chunks that made room for others",
    "reassigned_segments": "Segments that were emptied for another size of chunk",
    "deleted_chunks": "Chunks that were deleted or cleared",
    "corrupt_chunks": "Chunks that a reader found corrupt",
    "busy": "Requests for which there was no room",
    "expired_leases": "Leases that ran out before they were given back",
    "hints": "Hints given",
}
_GAUGES = {
    "capacity": ("capacity_bytes", "Bytes that the pool may have"),
    "ready": ("ready_bytes", "Bytes of the pool that are there"),
    "chunks": ("chunks", "Rows of the index in use"),
    "chunks_max": ("chunks_max", "Rows of the index"),
    "leases": ("leases", "Leases that are held"),
    "data_workers": ("data_workers", "Data workers that are ready"),
}


class Collected(Collector):
    """Metrics of one daemon, made from its status when they are asked for."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield _gauge("connections", "Clients that are connected", status["connections"])
        state = GaugeMetricFamily("kvpool_state", "1 for the current state", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(status["state"] == name))
        yield state
        yield from _service_counters(status["counters"])
        yield from _loop_metrics(status)
        yield from _domain_metrics(status["domains"])


def exposition(status: Callable[[], Mapping[str, Any]]) -> bytes:
    """The text for /metrics. Has a registry of its own: nothing of the process leaks in."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(status))
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvpool_{name}", text, value=value)


def _service_counters(counters: Mapping[str, Any]) -> Iterator[Metric]:
    connections = CounterMetricFamily("kvpool_connections_opened", "Clients that ever connected")
    connections.add_metric([], counters["connections"])
    yield connections
    faults = CounterMetricFamily("kvpool_protocol_faults", "Connections that sent garbage")
    faults.add_metric([], counters["protocol_faults"])
    yield faults
    for name, label in (("requests", "verb"), ("errors", "error")):
        family = CounterMetricFamily(f"kvpool_{name}", f"{name} by {label}", labels=[label])
        for value, count in sorted(counters[name].items()):
            family.add_metric([value], count)
        yield family


def _loop_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge(
        "event_loop_lag_seconds",
        "Worst delay of the event loop in the last 10 to 20 seconds",
        status["event_loop_lag_s"],
    )
    ages = GaugeMetricFamily(
        "kvpool_loop_last_run_age_seconds", "Time since a background loop ran", labels=["loop"]
    )
    failures = CounterMetricFamily(
        "kvpool_loop_failures", "Runs of a background loop that raised", labels=["loop"]
    )
    for name, loop in sorted(status["loops"].items()):
        ages.add_metric([name], loop["last_run_age_s"])
        failures.add_metric([name], loop["failures"])
    yield ages
    yield failures


def _domain_metrics(domains: Mapping[str, Any]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"kvpool_{name}", text, labels=["domain"])
        for domain, figures in domains.items():
            counter.add_metric([domain], figures["counters"][name])
        yield counter
    for key, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"kvpool_{name}", text, labels=["domain"])
        for domain, figures in domains.items():
            gauge.add_metric([domain], figures[key])
        yield gauge
    held = GaugeMetricFamily(
        "kvpool_bytes", "Bytes of the pool by what holds them", labels=["domain", "by"]
    )
    for domain, figures in domains.items():
        for by, value in figures["bytes"].items():
            if by != "total":
                held.add_metric([domain, by], value)
    yield held
