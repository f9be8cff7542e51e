"""What each tenant has of a pool, and what it may have: reserves and quotas.

A *reserve* is what others do not take away: while a tenant holds no more, only itself evicts its
chunks. A *quota* is what a tenant may hold: at its quota a new chunk takes the place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant in its domain, in bytes; 0: none."""

    reserve: int = 0
    quota: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's bytes of a pool. All of a chunk's extents count, leased or not."""

    tenant: str
    limits: Limits
    used: int = 0
    """Stored, being written or quarantined."""
    pinned: int = 0
    evicted_chunks: int = 0

    @property
    def owner(self) -> str:
        """Whose policies order its chunks: its own if it has limits, else those of all others."""
        return self.tenant if self.limits.reserve or self.limits.quota else ""

    @property
    def left(self) -> float:
        """Bytes to its quota."""
        return self.limits.quota - self.used if self.limits.quota else math.inf

    @property
    def spare(self) -> int:
        """Bytes that others may take."""
        return max(0, self.used - self.limits.reserve)


class Accounts:
    """By tenant, from its first namespace on."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        self._limits = limits
        self._accounts: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def of(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._limits.get(tenant, Limits()))
            self._accounts[tenant] = account
        return account

    def reserved_by_others(self, tenant: str) -> int:
        """Bytes that `tenant` must leave to others."""
        return sum(limits.reserve for name, limits in self._limits.items() if name != tenant)
