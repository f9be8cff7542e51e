"""What one daemon is told, where each value came from, and the only look at the environment.

    flags  >  environment (KVPOOL_<FIELD>)  >  file (TOML, `--config PATH`)  >  defaults

An unknown key is an error with a suggestion, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpool.proto.errors import ConfigError
from kvpool.store.eviction import DEFAULT_POLICY, online_policy
from kvpool.store.eviction.admission import DEFAULT_ADMISSION, admission_names
from kvpool.store.pool import CAPACITY_MIN
from kvpool.store.values import (
    parse_count,
    parse_host_port,
    parse_one_of,
    parse_seconds,
    parse_share,
    parse_size,
    parse_text,
    parse_truth,
    read_toml,
    suggestion,
)

PREFIX = "KVPOOL_"
CLIENT_VARIABLES = ("KVPOOL_ADDRESS", "KVPOOL_TOKEN")
"""Variables of the client's commands; the daemon leaves them alone."""
DATA_WORKERS_MAX = 16
SSD_MODES = ("write_back", "write_through")
LOG_LEVELS = ("debug", "info", "warning", "error")


def _setting(default: Any, kind: Callable[[Any], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": kind, "help": text})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `kvpool serve` can be told. Sizes are bytes, durations seconds."""

    socket: str = _setting(
        "",
        parse_text,
        "Path of the Unix socket; its folder is made private. Change it to run a second daemon. "
        "Default: kvpool/kvpool.sock in $XDG_RUNTIME_DIR, or in ~/.cache without one.",
    )
    capacity: int = _setting(
        1 << 30,
        parse_size,
        "Memory of the pool, e.g. 10GiB. All of it is taken at the start. Raise it when chunks "
        "are evicted before they are used again.",
    )
    chunks: int = _setting(
        0,
        parse_count,
        "Most chunks that the index can name; 0: one per 16 KiB of capacity, at least 65536. "
        "Raise it for chunks smaller than 16 KiB.",
    )
    segment_bytes: int = _setting(
        0,
        parse_size,
        "Unit in which memory is given to one size of chunk; 0: max(64 MiB, 8 chunks). Lower it "
        "when many different sizes share a small pool.",
    )
    policy: str = _setting(
        DEFAULT_POLICY,
        online_policy,
        "What is evicted: phz learns when chunks are used again, s3fifo resists scans, lru is the "
        "plain order of use. Change it to compare; phz keeps up with lru by itself.",
    )
    learned: str = _setting(
        "",
        parse_text,
        "File that keeps what the eviction policy learned across restarts; none: nowhere. "
        "Default: beside the socket. Change it when the socket's folder does not outlive a boot.",
    )
    pinned_share: float = _setting(
        1.0,
        parse_share,
        "Share of a pool that may be pinned, 0 to 1; a pin beyond it is refused. Lower it when "
        "pins crowd out everything else.",
    )
    lease_s: float = _setting(
        30.0,
        parse_seconds,
        "How long a match or a reservation holds, in seconds. Raise it when pulls over slow "
        "links end EXPIRED.",
    )
    tcp: str = _setting(
        "",
        parse_host_port,
        "HOST:PORT for clients of other machines; empty: none. Port 0 lets the system choose.",
    )
    http: str = _setting(
        "",
        parse_host_port,
        "HOST:PORT for /metrics and /health; empty: none. Port 0 lets the system choose.",
    )
    ssd_path: str = _setting(
        "",
        parse_text,
        "Folder for chunks that memory has no room for; empty: none. They outlive the daemon. "
        "It is made private; give each daemon one of its own.",
    )
    ssd_capacity: int = _setting(
        0,
        parse_size,
        "Bytes on the SSD, e.g. 100GiB; all of it is reserved at the start. Needed with ssd_path.",
    )
    ssd_mode: str = _setting(
        "write_back",
        parse_one_of(SSD_MODES),
        "write_back: chunks are written before memory evicts them. write_through: soon after they "
        "are published, so that a crash loses less, at the price of more writes.",
    )
    ssd_admission: str = _setting(
        DEFAULT_ADMISSION,
        parse_one_of(admission_names()),
        "What of the chunks that leave memory is written back: always all; second_touch only what "
        "was used again; phz all but what is least likely to be. The last two spare the SSD and "
        "need the policy phz.",
    )
    data_workers: int = _setting(
        1,
        parse_count,
        f"Processes per trust domain that stream bytes, 1 to {DATA_WORKERS_MAX}. Raise it when "
        "one core cannot fill the network.",
    )
    tenants: str = _setting(
        "",
        parse_text,
        "TOML file with tenants, their tokens and trust domains; empty: one tenant, no token. "
        "Needed for addresses that other machines can reach.",
    )
    insecure: bool = _setting(
        False,
        parse_truth,
        "Serve addresses that other machines can reach without any token. Only for networks "
        "where every machine is trusted.",
    )
    headroom: int = _setting(
        512 << 20,
        parse_size,
        "Memory that the pool leaves free for everything else on the machine. Raise it when "
        "engines on the same machine still have to grow.",
    )
    drain_s: float = _setting(
        10.0,
        parse_seconds,
        "How long a stop waits for leases to be given back, in seconds. Raise it when pulls "
        "take longer than that.",
    )
    log_level: str = _setting(
        "info", parse_one_of(LOG_LEVELS), f"What is logged to stderr: {', '.join(LOG_LEVELS)}."
    )
    populate: bool = _setting(
        True,
        parse_truth,
        "Take all pages at the start. Turn it off for a faster start, at the price of slower "
        "first writes and of running out of memory later instead of now.",
    )

    @property
    def learned_path(self) -> str:
        """Where `learned` is; empty: nowhere."""
        if self.learned == "none":
            return ""
        return self.learned or f"{self.socket}.learned"

    def __post_init__(self) -> None:
        if self.capacity < CAPACITY_MIN:
            raise ConfigError(f"capacity {self.capacity} is below the minimum of {CAPACITY_MIN}")
        if not 1 <= self.data_workers <= DATA_WORKERS_MAX:
            raise ConfigError(f"data_workers {self.data_workers} is not 1 to {DATA_WORKERS_MAX}")
        if bool(self.ssd_path) != bool(self.ssd_capacity):
            raise ConfigError(
                f"ssd_path {self.ssd_path!r} with ssd_capacity {self.ssd_capacity}: give both, or "
                "none for a store in memory only"
            )
        if not self.lease_s:
            raise ConfigError("lease_s 0 would let every lease expire at once")


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration and the origin of each of its values."""

    config: ServeConfig
    origins: dict[str, str]

    def effective(self) -> dict[str, dict[str, Any]]:
        """Field → value and origin, in the order of `ServeConfig`."""
        return {
            name: {"value": getattr(self.config, name), "origin": origin}
            for name, origin in self.origins.items()
        }


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The effective configuration. `flags` holds only what was given on the command line.

    Raises `ConfigError`, which names the key, the value and its origin.
    """
    environ = os.environ if environ is None else environ
    path = path or environ.get(f"{PREFIX}CONFIG")
    given: dict[str, tuple[Any, str]] = {}
    for key, value in read_toml(path).items() if path else ():
        given[_known(key, path or "")] = value, f"file {path}"
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in (f"{PREFIX}CONFIG", *CLIENT_VARIABLES):
            key = _known(name.removeprefix(PREFIX).lower(), "the environment", PREFIX)
            given[key] = value, f"environment {name}"
    for key, value in (flags or {}).items():
        given[_known(key, "the flags")] = value, f"flag {flag_of(key)}"
    return _settings(given, environ)


def _settings(given: Mapping[str, tuple[Any, str]], environ: Mapping[str, str]) -> Settings:
    values: dict[str, Any] = {"socket": default_socket(environ)}
    origins = {setting.name: "default" for setting in fields(ServeConfig)}
    for setting in fields(ServeConfig):
        if setting.name in given:
            raw, origin = given[setting.name]
            try:
                values[setting.name] = setting.metadata["parse"](raw)
            except ConfigError as error:
                raise ConfigError(f"{setting.name} ({origin}): {error}") from None
            origins[setting.name] = origin
    return Settings(ServeConfig(**values), origins)


def settings() -> tuple[Field[Any], ...]:
    """The fields of `ServeConfig`; `metadata["help"]` says what each is and when to change it."""
    return fields(ServeConfig)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def default_socket(environ: Mapping[str, str] | None = None) -> str:
    """Where a daemon listens and its clients look unless told otherwise. Never in /tmp, where
    anybody could be there first."""
    environ = os.environ if environ is None else environ
    runtime = environ.get("XDG_RUNTIME_DIR")
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return str(Path(runtime or cache, "kvpool", "kvpool.sock"))


def _known(key: str, origin: str, prefix: str = "") -> str:
    names = [setting.name for setting in fields(ServeConfig)]
    if key in names:
        return key
    shown = f"{prefix}{key}".upper() if prefix else key
    raise ConfigError(f"unknown key {shown!r} in {origin}; {suggestion(key, names, prefix)}")
