"""How a TCP peer that has vanished without a word is noticed."""

from __future__ import annotations

import socket

IDLE_S = 30
INTERVAL_S = 10
PROBES = 3
UNACKNOWLEDGED_MS = 60_000


def keep_alive(sock: socket.socket) -> None:
    """The connection of `sock` breaks a minute after its peer has gone; no-op on Unix sockets."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
