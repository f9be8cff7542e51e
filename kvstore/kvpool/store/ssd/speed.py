"""How fast the device reads, learned from its reads."""

from __future__ import annotations

_WEIGHT = 0.1
"""Of a new observation."""
_BYTES_MIN = 64 << 10
"""Smaller reads tell the latency, not the speed."""


class Speed:
    """A running mean of seconds per byte, over all reads that run side by side."""

    def __init__(self, bytes_s: float) -> None:
        """`bytes_s`: what was measured at the start."""
        self._byte_s = 1 / bytes_s
        self._last = 0.0

    @property
    def bytes_s(self) -> float:
        return 1 / self._byte_s

    def learn(self, nbytes: int, started: float, ended: float) -> None:
        """A read of `nbytes` was submitted at `started` and came back at `ended`.

        Reads side by side end one after the other: what counts is the time since the one before.
        """
        seconds = ended - max(started, self._last)
        self._last = ended
        if nbytes >= _BYTES_MIN and seconds > 0:
            self._byte_s += _WEIGHT * (seconds / nbytes - self._byte_s)

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` take."""
        return nbytes * self._byte_s
