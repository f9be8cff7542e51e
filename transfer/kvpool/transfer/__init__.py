"""Moving bytes between regions of memory, of this process, this host or another. Knows no keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.proto.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.transfer.base import Transport

TRANSPORTS = ("inproc", "shm", "tcp")
"""The names that `make_transport` knows."""


def make_transport(name: str, **options: Any) -> Transport:
    """The transport called `name`, made with its class's own arguments; imports nothing else.

    Raises `ConfigError` for an unknown name: a transport is never silently replaced by another.
    """
    if name == "inproc":
        from kvpool.transfer.inproc import InprocTransport

        return InprocTransport(**options)
    if name == "shm":
        from kvpool.transfer.shm import ShmTransport

        return ShmTransport(**options)
    if name == "tcp":
        from kvpool.transfer.tcp import TcpTransport

        return TcpTransport(**options)
    raise ConfigError(f"no transport is called {name!r}; there are: {', '.join(TRANSPORTS)}")
