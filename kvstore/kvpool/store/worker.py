"""The data worker: a process that streams the bytes of one trust domain.

Bulk bytes must not pass through the daemon's event loop, nor through threads beside it. The worker
is an ordinary client on the same host: it maps the pool once, and each of its connections has its
own connection to the daemon, on which it leases and commits in the name of the client. It ends with
the daemon: when its stdin or its own connection closes.

stdin: one line of JSON (`WorkerConfig`). stdout: one line of JSON when it listens, {"port": …}.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass

from kvpool.proto.errors import KvpoolError
from kvpool.store.caller import Caller, hello
from kvpool.store.keepalive import keep_alive
from kvpool.store.poolmap import PoolMap, Spaces
from kvpool.store.streaming import DataConnection
from kvpool.transfer.sockets import close_listener, listen
from kvpool.transfer.stream import Stream

log = logging.getLogger("kvpool")

CONNECTIONS_MAX = 512
"""Each has a thread. More wait in the backlog until one ends."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the daemon tells a worker. The secret never appears in arguments or environment."""

    daemon: str
    """Address of the daemon's control port, unix:PATH."""
    secret: str
    """Of the domain, in hexadecimal."""
    unix: str
    """Address to listen on, unix:PATH."""
    tcp_host: str
    """Host to listen on, at a port that the system chooses; empty: no TCP."""
    log_level: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Worker:
    """Listens from construction on."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._secret = bytes.fromhex(config.secret)
        self._daemon = Caller(config.daemon, hello(config.secret, "data worker", self._secret))
        self._pool = PoolMap(self._daemon)
        self._spaces = Spaces()
        self._slots = threading.Semaphore(CONNECTIONS_MAX)
        self._listeners = [listen(config.unix)]
        self.port = 0
        if config.tcp_host:
            host = f"[{config.tcp_host}]" if ":" in config.tcp_host else config.tcp_host
            self._listeners.append(listen(f"tcp://{host}:0"))
            self.port = self._listeners[-1].getsockname()[1]

    def run(self) -> None:
        """Serves until the daemon is gone."""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        watched = select.poll()
        for fd in (sys.stdin.fileno(), self._daemon.stream.fileno()):
            watched.register(fd, select.POLLRDHUP)  # hang-up and error are always reported
        watched.poll()
        unix = self._listeners[0]
        unix.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would keep it alive
        close_listener(unix)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._slots.acquire()
            try:
                sock, _ = listener.accept()
            except OSError as error:  # out of descriptors, or a client that has gone already
                self._slots.release()
                log.warning("cannot accept: %s", error)
                time.sleep(0.1)
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            keep_alive(sock)
            with Stream(sock) as stream:
                DataConnection(
                    stream, self._config.daemon, self._secret, self._pool, self._spaces
                ).serve()
        except KvpoolError as error:
            log.debug("a data connection ended: %s", error)
        except Exception:
            log.exception("a data connection failed")
        finally:
            self._slots.release()


def main() -> None:
    """Runs a worker on the configuration that comes over stdin."""
    config = WorkerConfig(**json.loads(sys.stdin.readline()))
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s data worker %(levelname)s %(message)s"
    )
    worker = Worker(config)
    print(json.dumps({"port": worker.port}), flush=True)
    worker.run()
    os._exit(0)  # without waiting for threads that are sending to somebody


if __name__ == "__main__":
    main()
