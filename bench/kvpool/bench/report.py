"""How benches report: the machine, rows as JSON or as a table, medians with their spread."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def document(command: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON of every bench."""
    return {"machine": machine(), "command": command, "rows": [dict(row) for row in rows]}


def text(command: str, rows: Sequence[Row]) -> list[str]:
    """The same under a line about the machine, as a Markdown table for each kind of row."""
    facts = machine()
    head = (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"Linux {facts['kernel']}, Python {facts['python']}, NumPy {facts['numpy']}"
    )
    lines = [f"`{command}`", "", head]
    for names, alike in itertools.groupby(rows, key=list):
        lines += ["", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += ["| " + " | ".join(_cell(row.get(n)) for n in names) + " |" for row in alike]
    return lines


def emit(command: str, rows: Sequence[Row], as_json: bool) -> list[str]:
    """What a bench prints on stdout."""
    return [json.dumps(document(command, rows))] if as_json else text(command, rows)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` (0 to 1) quantile of `values`."""
    return float(np.quantile(np.asarray(values), share))


def spread(values: Sequence[float]) -> str:
    """Smallest to largest, for people."""
    return f"{min(values):.3g}-{max(values):.3g}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
