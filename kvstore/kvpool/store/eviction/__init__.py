"""Which chunk goes when room is needed. A policy is one file here and one line below."""

from __future__ import annotations

from importlib import import_module

from kvpool.proto.errors import ConfigError
from kvpool.store.eviction.base import Evictable, Facts, Policy

# Imported on first use, so that a policy that nobody chose costs nothing.
_POLICIES = {
    "lru": "kvpool.store.eviction.lru:LruPolicy",
    "s3fifo": "kvpool.store.eviction.s3fifo:S3FifoPolicy",
    "belady": "kvpool.store.eviction.belady:BeladyPolicy",
    "phz": "kvpool.store.eviction.phz:PhzPolicy",
    "phz-cost": "kvpool.store.eviction.phz:CostWeightedPhz",
}
DEFAULT_POLICY = "phz"
_WITHOUT_FACTS = {"lru"}
_SEEDED = {"phz", "phz-cost"}
_FOR_REPLAYS = {
    "belady": "knows the future",
    "phz-cost": "asks for depths, which a store does not keep",
}


def online_policy(name: object) -> str:
    """`name`, if a store can run that policy. `ConfigError` otherwise."""
    online = [known for known in _POLICIES if known not in _FOR_REPLAYS]
    if name in _FOR_REPLAYS:
        why = _FOR_REPLAYS[str(name)]
        raise ConfigError(f"{name!r} {why}: it serves replays; choose {', '.join(online)}")
    if name not in online:
        raise ConfigError(f"{name!r} is none of {', '.join(online)}")
    return str(name)


def policy_names() -> tuple[str, ...]:
    """The names that `make_policy` accepts."""
    return tuple(_POLICIES)


def make_policy(
    name: str,
    capacity: int,
    evictable: Evictable,
    facts: Facts | None = None,
    seed: int = 0,
) -> Policy:
    """A new, empty policy for rows below `capacity`. `ConfigError` for an unknown name.

    `seed` makes the choices of a policy that samples unpredictable.
    """
    if name not in _POLICIES:
        raise ConfigError(f"there is no eviction policy {name!r}; choose {', '.join(_POLICIES)}")
    module, _, kind = _POLICIES[name].partition(":")
    known = () if name in _WITHOUT_FACTS else (facts,)
    seeds = {"seed": seed} if name in _SEEDED else {}
    policy: Policy = getattr(import_module(module), kind)(capacity, evictable, *known, **seeds)
    return policy
