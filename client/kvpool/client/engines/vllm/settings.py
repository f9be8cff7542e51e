"""What a user says in vLLM's `kv_transfer_config`, and the client that follows from it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any

from kvpool.client import Client, Session, connect
from kvpool.client.engines.vllm.identity import Identity, Variant
from kvpool.proto.errors import ConfigError

SESSIONS = 64
"""Adapters and salts whose key chains are remembered; the least recently used goes first."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `kv_connector_extra_config`."""

    address: str
    """Of the daemon: ``unix:PATH`` or ``tcp://HOST:PORT``."""
    token: str = ""
    chunk_tokens: int = 0
    """A multiple of vLLM's block size; 0: the smallest that has at least 256 tokens."""
    load: str = "async"
    """``async``: other requests go on meanwhile. ``sync``: the step waits, which is a little faster
    for a request that is alone; see `one_step_at_a_time`."""

    @classmethod
    def of(cls, transfer: Any) -> Settings:
        """From vLLM's `KVTransferConfig`. Raises `ConfigError`."""
        given = dict(transfer.kv_connector_extra_config or {})
        known = [field.name for field in fields(cls)]
        unknown = set(given) - set(known)
        if unknown or "address" not in given:
            raise ConfigError(
                f"kv_connector_extra_config has {sorted(given)}; address is needed, and "
                f"{', '.join(known[1:])} are possible"
            )
        settings = cls(**given)
        if settings.load not in ("sync", "async"):
            raise ConfigError(f"load={settings.load!r} is neither 'async' nor 'sync'")
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy must be 'recompute': vLLM's default fails every request "
                "whose KV could not be loaded, which a store may never cause"
            )
        return settings

    def connect(self, name: str, deadline_s: float) -> Client:
        return connect(self.address, token=self.token, name=name, deadline_s=deadline_s)


def one_step_at_a_time(config: Any) -> bool:
    """Whether the engine of a `VllmConfig` knows how a step ended before anything else uses it.

    Only then may a step wait for its loads. Other workers would compute with what one of them could
    not load, and so would the next step, if it has begun already; what they save would be wrong.
    """
    return bool(config.parallel_config.world_size == config.max_concurrent_batches == 1)


class Sessions:
    """One session per variant. Thread-safe."""

    def __init__(self, client: Client, identity: Identity) -> None:
        self._client = client
        self._identity = identity
        self._sessions: OrderedDict[Variant, Session] = OrderedDict()
        self._lock = Lock()

    def of(self, variant: Variant) -> Session:
        """Opens it if need be, which may wait for the store as long as the client's deadline."""
        with self._lock:
            session = self._sessions.get(variant)
            if session is None:
                session = self._client.open(self._identity.namespace(variant))
                self._sessions[variant] = session
                while len(self._sessions) > SESSIONS:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(variant)
            return session

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def close(self) -> None:
        self._client.close()
