"""A bounded memory of what left the store and why, so that a miss can say more than "miss"."""

from __future__ import annotations

import numpy as np

from kvpool.proto.outcomes import Reason


class Ghosts:
    """Direct-mapped: the newest departure wins its slot. 16 bytes per slot, allocated once."""

    def __init__(self, slots_log2: int = 16) -> None:
        self._mask = (1 << slots_log2) - 1
        self._tag = np.zeros(1 << slots_log2, np.uint64)
        self._reason = np.zeros(1 << slots_log2, np.uint8)

    def add(self, key: bytes, reason: Reason) -> None:
        tag = int.from_bytes(key[8:16], "little")
        self._tag[tag & self._mask] = tag
        self._reason[tag & self._mask] = reason

    def reason(self, key: bytes) -> Reason:
        """Why `key` is gone, or NEVER_STORED as far as this memory reaches."""
        tag = int.from_bytes(key[8:16], "little")
        if tag and int(self._tag[tag & self._mask]) == tag:
            return Reason(int(self._reason[tag & self._mask]))
        return Reason.NEVER_STORED
