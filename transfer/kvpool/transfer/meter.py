"""What transfers cost, learned while they happen."""

from __future__ import annotations

import threading

from kvpool.transfer.base import Cost

SMALL = 64 << 10
"""Bytes up to which a transfer's time tells of latency rather than of bandwidth."""

WEIGHT = 0.25
"""Weight of the newest observation (EWMA)."""


class Meter:
    """An affine model, seconds = latency + nbytes / bandwidth, refreshed by EWMA. Thread-safe."""

    def __init__(self, latency_s: float, bytes_per_s: float, cpu_s_per_byte: float) -> None:
        """The figures to assume until something was measured."""
        self._lock = threading.Lock()
        self._latency_s = latency_s
        self._s_per_byte = 1 / bytes_per_s
        self._cpu_s_per_byte = cpu_s_per_byte
        self._measured = False

    def observe(self, nbytes: int, seconds: float) -> None:
        """A transfer of `nbytes` bytes took `seconds`."""
        with self._lock:
            if nbytes <= SMALL:
                self._latency_s += WEIGHT * (seconds - self._latency_s)
                return
            s_per_byte = max(seconds - self._latency_s, 0) / nbytes
            weight = WEIGHT if self._measured else 1
            self._s_per_byte += weight * (s_per_byte - self._s_per_byte)
            self._measured = True

    def estimate(self, nbytes: int) -> Cost:
        """The cost of `nbytes` bytes; `"measured"` once a larger transfer was observed."""
        with self._lock:
            return Cost(
                self._latency_s + nbytes * self._s_per_byte,
                nbytes * self._cpu_s_per_byte,
                "measured" if self._measured else "assumed",
            )
