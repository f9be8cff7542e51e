"""A bounded memory of what left the store and why, so that a miss can say more than "miss"."""

from __future__ import annotations

from array import array

from kvpool.proto.outcomes import Reason

_MULTIPLIER = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


class Ghosts:
    """Direct-mapped: the newest departure wins its slot. 9 bytes per slot, allocated once.

    A key is remembered by 64 of its bits, so a wrong reason (never a wrong hit) is possible with
    probability 2^-64 per look-up.
    """

    def __init__(self, slots_log2: int = 16) -> None:
        self._mask = (1 << slots_log2) - 1
        self._tags = array("Q", bytes(8 << slots_log2))
        self._reasons = bytearray(1 << slots_log2)

    def add(self, namespace: int, key: bytes, reason: Reason) -> None:
        tag = _tag(namespace, key)
        self._tags[tag & self._mask] = tag
        self._reasons[tag & self._mask] = reason

    def reason(self, namespace: int, key: bytes) -> Reason:
        """Why `key` is gone, or NEVER_STORED as far as this memory reaches."""
        tag = _tag(namespace, key)
        if self._tags[tag & self._mask] == tag:
            return Reason(self._reasons[tag & self._mask])
        return Reason.NEVER_STORED


def _tag(namespace: int, key: bytes) -> int:
    """Not 0, which marks an empty slot."""
    return int.from_bytes(key[8:16], "little") ^ namespace * _MULTIPLIER & _U64 or 1
