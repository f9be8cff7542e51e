"""The daemon's service inside the caller's own process: no socket, no credential, one domain."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from kvpool.store.eviction import DEFAULT_POLICY
from kvpool.store.service import Identity, Service, new_domain


def embedded_service(
    capacity: int,
    chunks: int = 0,
    policy: str = DEFAULT_POLICY,
    clock: Callable[[], float] = time.monotonic,
    entropy: Callable[[int], bytes] = os.urandom,
) -> Service:
    """A service of `capacity` bytes for tenant "default" of domain "local", mapped.

    Pages are taken as they are first written, not at the start. `chunks` bounds the index (0: in
    proportion to the capacity), `clock` counts seconds, and `entropy(n)` gives n unpredictable
    bytes. Raises `ConfigError` for a capacity below the minimum. Who is done with the service
    closes its pools.
    """
    domain = new_domain(
        "local", capacity, chunks=chunks, policy=policy, clock=clock, entropy=entropy
    )
    domain.pool.grow_lazily()
    identity = Identity("default", domain.name, mapped=True)
    return Service(
        {domain.name: domain}, authenticate=lambda token, local: identity, entropy=entropy
    )
