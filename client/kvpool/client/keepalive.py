"""How a client notices that the machine of its daemon has vanished."""

from __future__ import annotations

import socket
from asyncio.trsock import TransportSocket

IDLE_S, INTERVAL_S, PROBES = 5, 5, 3
UNANSWERED_MS = 20_000


def keep_alive(sock: socket.socket | TransportSocket) -> None:
    """Lets the kernel break a TCP connection whose peer is silent for 20 seconds."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
