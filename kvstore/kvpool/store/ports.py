"""The daemon's sockets: control (Unix and TCP), descriptors, HTTP.

All are taken before any memory, so that a second daemon on the same addresses fails at once.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from kvpool.proto.errors import ConfigError
from kvpool.store.config import ServeConfig
from kvpool.store.control import Control
from kvpool.store.handover import Handover
from kvpool.store.http import HEADER_BYTES_MAX, HttpPort
from kvpool.store.service import Service
from kvpool.transfer.sockets import address_of, close_listener, listen


class Ports:
    """Everything that a daemon listens on. The addresses are known once they are open."""

    def __init__(self, config: ServeConfig, service: Service, http: HttpPort) -> None:
        self.address = f"unix:{config.socket}"
        self.tcp_address = ""
        self.http_address = ""
        self.control = Control(service)
        self._config = config
        self._service = service
        self._http = http
        self._handover: Handover | None = None
        self._accepting: list[Callable[[], None]] = []
        self._closing: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Raises `ConfigError`, `InvalidError` (somebody listens there) and `UnreachableError`.
        What was opened before that is for `close`."""
        config = self._config
        prepare_folder(Path(config.socket).parent)
        control = listen(self.address)
        self._accepting.append(functools.partial(close_listener, control))
        descriptors = listen(self._service.attach_address)
        self._closing.append(functools.partial(close_listener, descriptors))
        tcp = listen(f"tcp://{config.tcp}") if config.tcp else None
        if tcp is not None:
            self._accepting.append(tcp.close)
            self.tcp_address = address_of(tcp)
        if config.http:
            await self._open_http(listen(f"tcp://{config.http}"))
        self._handover = Handover(self._service, descriptors)
        # The servers get duplicates: closing a listener of ours also removes its file.
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self.control, sock=control.dup())
        self._accepting.append(server.close)
        if tcp is not None:
            tcp_server = await loop.create_server(self.control, sock=tcp.dup())
            self._accepting.append(tcp_server.close)

    async def _open_http(self, listener: socket.socket) -> None:
        self._closing.append(listener.close)
        self.http_address = address_of(listener).replace("tcp://", "http://")
        server = await asyncio.start_server(
            self._http.serve, sock=listener.dup(), limit=HEADER_BYTES_MAX
        )
        self._closing.append(server.close)

    def stop_accepting(self) -> None:
        """No new control connections: those who dial are refused at once. Idempotent."""
        while self._accepting:
            self._accepting.pop()()

    async def close(self) -> None:
        """Ends all connections and removes the sockets. Idempotent."""
        self.stop_accepting()
        if self._handover is not None:
            await self._handover.close()
        self.control.close()
        while self._closing:
            self._closing.pop()()


def prepare_folder(folder: Path) -> None:
    """Makes the private folder of the sockets. Raises `ConfigError` for one that others can
    write to: they could put a socket of their own there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"no folder {folder} for the socket: {error.strerror}") from error
    if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others can write to {folder}, where the socket should be; choose another --socket, "
            f"or take their right away (chmod go-w {folder})"
        )
