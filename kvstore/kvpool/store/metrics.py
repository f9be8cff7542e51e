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
    "refused_pins": "Pins refused because more would be pinned than may be",
    "ignored_experience": "Policies that could not use what an earlier life learned",
}
_COUNTERS_BY = {
    "evictions": ("reason", "Chunks that made room, by what the room was for"),
    "hint_kinds": ("kind", "What hints said"),
    "hint_ends": ("end", "What became of hints"),
}
_TIER = "dram"
_GAUGES = {
    "capacity": ("capacity_bytes", "Bytes that the pool may have"),
    "ready": ("ready_bytes", "Bytes of the pool that are there"),
    "chunks": ("chunks", "Rows of the index in use"),
    "chunks_max": ("chunks_max", "Rows of the index"),
    "leases": ("leases", "Leases that are held"),
    "data_workers": ("data_workers", "Data workers that are ready"),
    "ttls": ("ttls", "Chains that have a time to live"),
}


_SSD_COUNTERS = {
    "hit_chunks": "Chunks that matches found on the SSD and not in memory",
    "skipped_chunks": "Chunks on the SSD that would have taken longer to load than to compute",
    "learned_skipped_chunks": "Of these, by a prefill speed that was learned from publishes",
    "written_chunks": "Chunks that were written",
    "written_bytes": "Bytes of these",
    "device_bytes": "The same in whole blocks of the device",
    "read_chunks": "Chunks that were read and right",
    "read_bytes": "Bytes of these",
    "promoted_chunks": "Chunks that came back into memory",
    "failed_chunks": "Chunks that should have and did not",
    "evicted_chunks": "Chunks that made room for others on the SSD",
    "reassigned_segments": "Segments of the SSD that were emptied for another size of chunks",
    "deleted_chunks": "Entries that were deleted, evicted ones among them",
    "corrupt_chunks": "Chunks whose bytes were not what had been written",
    "read_errors": "Reads that the device refused",
    "declined_chunks": "Chunks that leave memory and were not worth writing",
    "unsaved_chunks": "Chunks that memory evicted before they could be written",
    "refused_writes": "Writes that were not taken: the tier was slow, full or down",
    "unsummed_chunks": "Chunks not written because their writer stored no sums",
    "commits": "Commits of the catalogue",
}
_SSD_GAUGES = {
    "capacity": "Bytes that are reserved on the SSD",
    "chunks": "Chunks on the SSD",
    "waiting_chunks": "Chunks that were published and wait for room in the queue",
    "writing_bytes": "Bytes that wait for being written, or are",
    "reading_bytes": "Bytes that wait for being read, or are",
    "quarantined_bytes": "Bytes of places where damage was found",
    "read_bytes_s": "What the device reads per second, as learned",
    "write_amplification": "Bytes written to the device for each byte stored",
    "writes_per_hit": "Chunks written for each chunk that a match found",
    "downs": "How often the tier went down",
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
        yield from _policy_metrics(status["domains"])
        yield from _tenant_metrics(status["domains"])
        ignored = CounterMetricFamily(
            "kvpool_ignored_learned_files", "Files of what policies learned that were of no use"
        )
        ignored.add_metric([], status.get("ignored_learned_files", 0))
        yield ignored


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
    for key, text in (("chains", "Chains that are pinned"), ("claims", "Pins of chains")):
        pins = GaugeMetricFamily(f"kvpool_pinned_{key}", text, labels=["domain"])
        for domain, figures in domains.items():
            pins.add_metric([domain], figures["pins"][key])
        yield pins
    yield from _ssd_metrics({name: one["ssd"] for name, one in domains.items() if one["ssd"]})


def _policy_metrics(domains: Mapping[str, Any]) -> Iterator[Metric]:
    """Per tier and policy; a policy's own figures are those of its `statistics`."""
    for key, (label, text) in _COUNTERS_BY.items():
        labels = ["domain", "tier", "policy", label]
        counter = CounterMetricFamily(f"kvpool_{key}", text, labels=labels)
        for domain, figures in domains.items():
            for word, count in figures["counters"][key].items():
                counter.add_metric([domain, _TIER, figures["policy"], word], count)
        yield counter
    families: dict[str, GaugeMetricFamily] = {}
    labels = ["domain", "tier", "policy", "shape", "owner"]
    for domain, figures in domains.items():
        for one in figures["policies"]:
            where = [domain, _TIER, figures["policy"], one["shape"], one["owner"]]
            for name, value in _policy_figures(one).items():
                family = families.get(name) or GaugeMetricFamily(
                    f"kvpool_policy_{name}", f"{name} of an eviction policy", labels=labels
                )
                families[name] = family
                family.add_metric(where, value)
    yield from families.values()


def _policy_figures(one: Mapping[str, Any]) -> dict[str, float]:
    """Without its names, and with a lead that is never negative."""
    figures = {name: value for name, value in one.items() if name not in ("shape", "owner")}
    if "lead" in figures:
        lead = figures.pop("lead")
        figures |= {"lead": max(0, lead), "behind": max(0, -lead)}
    return figures


def _tenant_metrics(domains: Mapping[str, Any]) -> Iterator[Metric]:
    held = GaugeMetricFamily(
        "kvpool_tenant_bytes",
        "Bytes of the pool that a tenant has, has pinned, and may have (0: no limit)",
        labels=["domain", "tenant", "by"],
    )
    evicted = CounterMetricFamily(
        "kvpool_tenant_evicted_chunks",
        "Chunks of a tenant that made room for others",
        labels=["domain", "tenant"],
    )
    for domain, figures in domains.items():
        for account in figures["tenants"]:
            for by in ("used", "pinned", "reserve", "quota"):
                held.add_metric([domain, account["tenant"], by], account[by])
            evicted.add_metric([domain, account["tenant"]], account["evicted_chunks"])
    yield held
    yield evicted


def _ssd_metrics(tiers: Mapping[str, Any]) -> Iterator[Metric]:
    for name, text in _SSD_COUNTERS.items():
        counter = CounterMetricFamily(f"kvpool_ssd_{name}", text, labels=["domain"])
        for domain, figures in tiers.items():
            counter.add_metric([domain], figures["counters"][name])
        yield counter
    for name, text in _SSD_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvpool_ssd_{name}", text, labels=["domain"])
        for domain, figures in tiers.items():
            gauge.add_metric([domain], figures[name])
        yield gauge
    down = GaugeMetricFamily("kvpool_ssd_down", "1 while the tier is down", labels=["domain"])
    for domain, figures in tiers.items():
        down.add_metric([domain], float(bool(figures["down"])))
    yield down
