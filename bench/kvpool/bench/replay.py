"""`kvpool bench replay`: hit ratios of eviction policies under a trace, beside the optimum.

Each (policy, capacity) is one simulation (`simulation`); they are independent and run on all cores.
Plain LRU and Belady's optimum are always run, because the result that matters is how much of the
gap between them a policy closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from kvpool.bench.hints import hints_of
from kvpool.bench.plot import line_plot
from kvpool.bench.report import Row
from kvpool.bench.simulation import Counts, Prepared, Simulation, prepare
from kvpool.bench.traces import Trace, read_trace
from kvpool.bench.two_tiers import TwoTiers
from kvpool.bench.workloads import make_workload, workload_names
from kvpool.proto.errors import ConfigError
from kvpool.store.eviction import policy_names

SHARED_TRACES = Path("../shared/traces")
"""Recorded traces, if there are any beside the project."""
_REFERENCES = ("lru", "belady")


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    trace: str
    policy: str
    share: float
    hints: str
    ssd: float = 0.0
    """The SSD's capacity over that of DRAM."""
    admission: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    blocks: int
    """The capacity, of DRAM if there are two tiers."""
    counts: Counts
    seconds: float
    """Of one core."""


def default_traces() -> list[str]:
    """The recorded traces beside the project, or two of our own."""
    recorded = sorted(map(str, SHARED_TRACES.glob("*.jsonl")))
    return recorded or ["agents", "chats"]


def load(trace: str) -> Trace:
    """A file's trace, or one of our own by name, or by `name:seed`."""
    name, _, seed = trace.partition(":")
    if name in workload_names() and (seed.isdecimal() or name == trace):
        return make_workload(name, seed=int(seed or 1))
    if not Path(trace).is_file():
        names = ", ".join(workload_names())
        raise ConfigError(
            f"there is no trace {trace!r}: give a file, or one of {names}, or one of these with "
            "another seed, as 'chats:7'"
        )
    return read_trace(Path(trace))


def run(
    trace: str,
    shares: Sequence[float],
    policies: Sequence[str],
    hints: str,
    progress: Callable[[str], None],
    workers: int = 1,
) -> list[Row]:
    """Rows for each policy and capacity, in this order; see `docs/eviction.md`."""
    for policy in policies:
        if policy not in policy_names():
            raise ConfigError(f"no eviction policy {policy!r}; choose {', '.join(policy_names())}")
    wanted = list(dict.fromkeys([*policies, *_REFERENCES]))
    jobs = [Job(trace, policy, share, hints) for share in shares for policy in wanted]
    results: dict[Job, Result] = {}
    for job, result in _simulate(jobs, workers):
        results[job] = result
        progress(f"{len(results)} of {len(jobs)}: {job.policy} at {job.share:.3g}")
    return [
        _row(Job(trace, policy, share, hints), results) for policy in policies for share in shares
    ]


def run_two_tiers(
    trace: str,
    shares: Sequence[float],
    policies: Sequence[str],
    hints: str,
    ssd: float,
    admissions: Sequence[str],
    progress: Callable[[str], None],
    workers: int = 1,
) -> list[Row]:
    """Rows for each policy, admission and DRAM capacity, with an SSD of `ssd` times that."""
    for policy in policies:
        if policy == "belady" or policy not in policy_names():
            raise ConfigError(f"{policy!r} does not order two tiers; choose lru, s3fifo, phz")
    jobs = [
        Job(trace, policy, share, hints, ssd, admission)
        for policy in policies
        for admission in admissions
        for share in shares
    ]
    results: dict[Job, Result] = {}
    for job, result in _simulate(jobs, workers):
        results[job] = result
        progress(f"{len(results)} of {len(jobs)}: {job.policy}, {job.admission} at {job.share:.3g}")
    return [_two_tier_row(job, results[job]) for job in jobs]


def table(rows: Sequence[Row]) -> list[Row]:
    """The rows as people read them: shares in percent."""
    return [{_HEADS.get(name, name): _cell(name, row[name]) for name in row} for row in rows]


def plot(trace: str, rows: Sequence[Row]) -> str:
    """An SVG of hit ratios over capacity."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = " ".join(filter(None, [row["policy"], row.get("admission")]))
        lines.setdefault(name, []).append((100 * row["capacity"], 100 * row["hit_ratio"]))
    return line_plot(
        f"Hit ratio on {Path(trace).stem}", "capacity, % of unique blocks", "hits, %", lines
    )


def _row(job: Job, results: Mapping[Job, Result]) -> Row:
    lru, optimum = (results[replace(job, policy=name)].counts.hits for name in _REFERENCES)
    hits = results[job].counts.hits
    gap = (hits - lru) / (optimum - lru) if optimum > lru else None
    return {**_figures(job, results[job]), "gap_closed": gap, **_speed(results[job])}


def _two_tier_row(job: Job, result: Result) -> Row:
    """With `ssd_writes_per_hit` on the SSD, and `write_amplification`: SSD writes per block that
    was published."""
    counts = result.counts
    return {
        **_figures(job, result),
        "gap_closed": None,
        "admission": job.admission,
        "ssd_blocks": _ssd_blocks(job, result.blocks),
        "dram_hits": counts.hits - counts.ssd_hits,
        "ssd_hits": counts.ssd_hits,
        "ssd_writes": counts.ssd_writes,
        "ssd_writes_per_hit": counts.ssd_writes / counts.ssd_hits if counts.ssd_hits else None,
        "write_amplification": counts.ssd_writes / counts.writes,
        **_speed(result),
    }


def _figures(job: Job, result: Result) -> Row:
    counts = result.counts
    return {
        "policy": job.policy,
        "capacity": job.share,
        "blocks": result.blocks,
        "references": counts.references,
        "hits": counts.hits,
        "hit_ratio": counts.hits / counts.references,
        "saved_work": counts.saved_work / counts.work,
        "evictions": counts.evictions,
        "writes": counts.writes,
    }


def _speed(result: Result) -> Row:
    return {"references_per_s": result.counts.references / result.seconds}


def _ssd_blocks(job: Job, dram: int) -> int:
    return max(1, round(job.ssd * dram))


_PERCENT = {"capacity", "hit_ratio", "saved_work", "gap_closed"}
_HEADS = {
    "capacity": "capacity %",
    "hit_ratio": "hit ratio %",
    "saved_work": "saved work %",
    "gap_closed": "of the gap %",
    "references_per_s": "references/s",
}


def _cell(name: str, value: object) -> object:
    if name in _PERCENT and isinstance(value, float):
        return f"{100 * value:g}" if name == "capacity" else f"{100 * value:.2f}"
    if name == "references_per_s":
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value


def _simulate(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Result]]:
    """In order of completion."""
    if workers <= 1:
        yield from ((job, simulate(job)) for job in jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(simulate, job): job for job in jobs}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def simulate(job: Job) -> Result:
    """Replays the job's trace from its beginning."""
    prepared = _prepared(job.trace)
    hints = hints_of(prepared.trace, prepared.next_uses, job.hints)
    blocks = prepared.trace.capacity(job.share)
    simulation = (
        TwoTiers(prepared, blocks, _ssd_blocks(job, blocks), job.policy, job.admission)
        if job.ssd
        else Simulation(prepared, blocks, job.policy)
    )
    start = time.process_time()
    for number, hint in enumerate(hints):
        simulation.serve(number, hint)
    return Result(blocks, simulation.counts, time.process_time() - start)


@cache
def _prepared(trace: str) -> Prepared:
    """A process reads each trace once."""
    return prepare(load(trace))
