"""The descriptor port: hands the memory of a domain to clients that hold an attach token.

    client: attach token (one frame)  ──►  daemon: "ok" or an Error (one frame), then descriptors

An event loop cannot pass descriptors, so each connection is served by a thread, within a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

from kvpool.proto import session as protocol
from kvpool.proto.errors import DeniedError, KvpoolError
from kvpool.store.service import Service
from kvpool.transfer.descriptors import send_descriptors
from kvpool.transfer.memory import SharedRegion
from kvpool.transfer.stream import Stream

log = logging.getLogger("kvpool")

DEADLINE_S = 5.0
THREADS = 32
"""Clients that are served at once; those that say nothing hold a thread for the deadline."""

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Handover:
    """Serves `listener`, which stays the caller's to close. `close` ends it."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        self._listener.setblocking(False)
        self._streams: set[Stream] = set()
        self._threads = ThreadPoolExecutor(THREADS, "kvpool-handover")
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._accept(), name="handover")

    async def close(self) -> None:
        """Takes no more clients and ends those that are being served."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for stream in list(self._streams):
            stream.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or a client that has gone already
                log.warning("the descriptor socket cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            stream = Stream(sock, exact=True)
            self._streams.add(stream)
            self._threads.submit(self._serve, stream)

    def _serve(self, stream: Stream) -> None:
        end = time.monotonic() + DEADLINE_S
        try:
            regions, writable = self._redeem(stream, end)
            stream.send(b"ok", deadline=end - time.monotonic())
            send_descriptors(stream.sock, regions, writable, end - time.monotonic())
        except KvpoolError as error:
            log.warning("descriptors were not handed over: %s", error)
        except Exception:
            log.exception("handing over descriptors failed")
        finally:
            self._streams.discard(stream)
            stream.close()

    def _redeem(self, stream: Stream, end: float) -> tuple[list[SharedRegion], bool]:
        """Raises after it has told the client why."""
        try:
            _check_peer(stream.sock)
            token = stream.receive(deadline=DEADLINE_S)
            answer = asyncio.run_coroutine_threadsafe(self._regions_of(token), self._loop)
            return answer.result(max(0.0, end - time.monotonic()))
        except KvpoolError as error:
            if stream.broken is None:
                body = protocol.response_body(0, protocol.error_body(error))
                stream.send(body, deadline=max(0.1, end - time.monotonic()))
            raise

    async def _regions_of(self, token: bytes) -> tuple[list[SharedRegion], bool]:
        """Runs on the loop: the service belongs to its thread."""
        ticket = self._service.redeem(token)
        return ticket.domain.pool.regions, ticket.writable


def _check_peer(sock: socket.socket) -> None:
    """Raises `DeniedError` unless the peer is this user or root, whatever the socket's mode."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (0, os.getuid()):
        raise DeniedError(f"user {uid} may not map the memory of user {os.getuid()}")
