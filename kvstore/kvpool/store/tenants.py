"""Who may use the daemon: tenants, their tokens and the trust domain whose memory they share.

    [tenants.search]                 [domains.shared]
    token = "…"                      capacity = "10GiB"
    domain = "shared"
    map = true                       [http]
    reserve = "2GiB"                 token = "…"           (for /metrics, if HTTP is on)
    quota = "4GiB"

`reserve` are bytes of the domain's pool that other tenants do not take away, `quota` those that the
tenant may hold; without them tenants share the pool as it comes.

Without a file there is one tenant "default" in domain "local", mapped, without a token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.proto.errors import ConfigError, DeniedError
from kvpool.store.accounts import Limits
from kvpool.store.config import ServeConfig
from kvpool.store.service import Identity
from kvpool.store.values import host_port, parse_size, read_toml, suggestion

log = logging.getLogger("kvpool")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,31}")
TOKEN_SHORT = 16
"""Tokens of fewer characters can be guessed; a warning says so."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One credential. Only the hash of its token is kept."""

    identity: Identity
    token_hash: bytes
    limits: Limits


@dataclass(frozen=True, slots=True)
class Tenants:
    """All credentials, and the capacity of each trust domain in bytes."""

    domains: Mapping[str, int]
    tenants: tuple[Tenant, ...] = ()
    http_token_hash: bytes | None = None

    def authenticate(self, token: str, local: bool) -> Identity:
        """The identity of `token`. Raises `DeniedError`.

        Takes as long for a wrong token as for a right one, and whichever tenant has it.
        """
        if not self.tenants:
            return Identity("default", "local", mapped=True)
        given = _hash(token)
        found: Identity | None = None
        for tenant in self.tenants:
            if hmac.compare_digest(tenant.token_hash, given):
                found = tenant.identity
        if found is None:
            missing = "no token was given" if not token else "the token is wrong"
            raise DeniedError(f"{missing}; present the token of a tenant")
        return found

    def allows_http(self, token: str) -> bool:
        """Whether `token` may read /metrics."""
        expected = self.http_token_hash
        return expected is None or hmac.compare_digest(expected, _hash(token))

    def limits_of(self, domain: str) -> dict[str, Limits]:
        """Of the tenants of `domain` that have any."""
        mine = [tenant for tenant in self.tenants if tenant.identity.domain == domain]
        return {t.identity.tenant: t.limits for t in mine if t.limits != Limits()}

    @property
    def needs_streams(self) -> frozenset[str]:
        """Domains with a tenant that may not map, so that its bytes must be streamed."""
        identities = [tenant.identity for tenant in self.tenants]
        return frozenset(i.domain for i in identities if not i.mapped)


def load_tenants(config: ServeConfig) -> Tenants:
    """The tenants of the daemon. Raises `ConfigError`, also for an address that other machines
    can reach without credentials."""
    if not config.tenants:
        for name in ("tcp", "http"):
            _check_private(name, getattr(config, name), config.insecure)
        return Tenants({"local": config.capacity})
    return _parse(read_toml(config.tenants), config)


def is_loopback(host: str) -> bool:
    """True only for numbers and names that cannot mean another machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_private(name: str, address: str, insecure: bool) -> None:
    if not address or insecure or is_loopback(host_port(address).host):
        return
    raise ConfigError(
        f"{name} {address} can be reached from other machines, and nobody would need a token: "
        "name a tenants file (--tenants PATH), listen on 127.0.0.1, or accept it with --insecure"
    )


def _parse(content: Mapping[str, Any], config: ServeConfig) -> Tenants:
    path = config.tenants
    _check_keys(content, ("tenants", "domains", "http"), path)
    entries = content.get("tenants") or {}
    if not entries:
        raise ConfigError(f"{path} has no [tenants.NAME] table, so nobody could use the daemon")
    tenants = tuple(_tenant(name, entry, path) for name, entry in entries.items())
    if len({tenant.token_hash for tenant in tenants}) < len(tenants):
        raise ConfigError(f"{path}: two tenants have the same token; the token tells them apart")
    http_token = _http_token(content, config)
    if http_token is not None and http_token in {tenant.token_hash for tenant in tenants}:
        raise ConfigError(f"{path}: the [http] token is also a tenant's; choose another")
    found = Tenants(_domains(content, tenants, config), tenants, http_token)
    for domain, capacity in found.domains.items():
        reserved = sum(limits.reserve for limits in found.limits_of(domain).values())
        if reserved > capacity:
            raise ConfigError(
                f"{path}: the tenants of domain {domain!r} reserve {reserved} bytes of {capacity}"
            )
    return found


def _tenant(name: str, entry: Any, path: str) -> Tenant:
    where = f"{path}: [tenants.{name}]"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where} is no name: up to 32 letters, digits, - and _")
    _check_keys(entry, ("token", "domain", "map", "reserve", "quota"), where)
    token = _required_text(entry, "token", where)
    domain = _required_text(entry, "domain", where)
    mapped = entry.get("map", True)
    if not isinstance(mapped, bool):
        raise ConfigError(f"{where} map = {mapped!r} is neither true nor false")
    if len(token) < TOKEN_SHORT:
        log.warning("%s: a token below %d characters can be guessed", where, TOKEN_SHORT)
    return Tenant(Identity(name, domain, mapped), _hash(token), _limits(entry, where))


def _limits(entry: Mapping[str, Any], where: str) -> Limits:
    limits = Limits(*(parse_size(entry.get(key, 0)) for key in ("reserve", "quota")))
    if limits.quota and limits.reserve > limits.quota:
        raise ConfigError(
            f"{where} reserves {limits.reserve} bytes, beyond its quota of {limits.quota}"
        )
    if "quota" in entry and not limits.quota:
        raise ConfigError(f"{where} quota = 0 would keep the tenant out; for none, leave it out")
    return limits


def _domains(
    content: Mapping[str, Any], tenants: tuple[Tenant, ...], config: ServeConfig
) -> dict[str, int]:
    """Capacity by domain; a single domain that is not declared gets the daemon's capacity."""
    path = config.tenants
    declared: dict[str, int] = {}
    for name, entry in (content.get("domains") or {}).items():
        where = f"{path}: [domains.{name}]"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where} is no name: up to 32 letters, digits, - and _")
        _check_keys(entry, ("capacity",), where)
        declared[name] = parse_size(entry.get("capacity", config.capacity))
    used = list(dict.fromkeys(tenant.identity.domain for tenant in tenants))
    if not declared and len(used) == 1 and _NAME.fullmatch(used[0]):
        return {used[0]: config.capacity}
    for domain in used:
        if domain not in declared:
            hint = suggestion(domain, declared) if declared else "add its table"
            raise ConfigError(f"{path}: there is no [domains.{domain}]; {hint}")
    return declared


def _http_token(content: Mapping[str, Any], config: ServeConfig) -> bytes | None:
    where = f"{config.tenants}: [http]"
    entry = content.get("http")
    if entry is None:
        if config.http:
            raise ConfigError(
                f"{where} is missing: with a tenants file /metrics needs a token as well, "
                'e.g. [http] token = "…"; or leave http empty'
            )
        return None
    _check_keys(entry, ("token",), where)
    return _hash(_required_text(entry, "token", where))


def _check_keys(entry: Any, accepted: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a table, not {entry!r}")
    for key in entry:
        if key not in accepted:
            raise ConfigError(f"unknown key {key!r} in {where}; {suggestion(key, accepted)}")


def _required_text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f'{where} needs {key} = "…", not {value!r}')
    return value


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
