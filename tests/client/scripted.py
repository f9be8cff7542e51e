"""A daemon that does as it is told: the real service behind real sockets, but for what a test
scripts of its answers.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from kvpool.client import Client, LocalStore
from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.transfer.descriptors import send_descriptors
from kvpool.transfer.stream import Stream

Answer = Message | bytes | None
"""A message; raw bytes to send instead of a frame; None for nothing at all."""
Script = Callable[[wire.Request, Callable[[], Answer]], Answer]
"""Given a request and what the service would answer."""


Connect = Callable[..., Client]
"""Connects to an address, blocking or async: what the fixture `dial` gives."""


class Hang(Exception):
    """Raised by a script: the connection is closed at once."""


class ScriptedDaemon:
    """Listens on `address`. `script` has what is said instead of the truth, by verb."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        self.address = f"unix:{self.path}"
        self.script: dict[str, Script] = {}
        self.heard: list[str] = []
        """Every verb that came, in order."""
        self.connections = 0
        self.reading = threading.Event()
        """Requests are read only while this is set."""
        self.reading.set()
        self.renew()
        self._streams: list[Stream] = []
        self._listener: socket.socket | None = None
        self.listen()

    def renew(self) -> None:
        """A new life: nothing is stored, and no namespace known."""
        self.store = LocalStore(32 << 20, chunks=4096)
        self.store.service.attach_address = f"{self.address}.fds"

    def listen(self) -> None:
        for path, serve in ((self.path, self._serve), (Path(f"{self.path}.fds"), self._hand_over)):
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen(128)
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def cut(self) -> None:
        """Closes all connections."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.abort()

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.cut()
        self.store.close()

    def count(self, verb: str) -> int:
        return self.heard.count(verb)

    def _accept(self, listener: socket.socket, serve: Callable[[Stream], None]) -> None:
        with listener:
            while True:
                sock, _ = listener.accept()
                stream = Stream(sock, exact=True)
                self._streams.append(stream)
                threading.Thread(target=self._run, args=(stream, serve), daemon=True).start()

    def _run(self, stream: Stream, serve: Callable[[Stream], None]) -> None:
        with contextlib.suppress(Exception), stream:
            serve(stream)

    def _serve(self, stream: Stream) -> None:
        self.connections += 1
        service = self.store.service
        connection = service.connect(local=True)
        try:
            while True:
                body = stream.receive(deadline=60)
                self.reading.wait()
                if not body:
                    stream.send(b"", deadline=1)
                    continue
                request = protocol.parse_request(body)
                verb = request.WhichOneof("body") or ""
                self.heard.append(verb)

                def truth(request: wire.Request = request) -> Answer:
                    service.reap()
                    return connection.handle(request)

                script = self.script.get(verb)
                answer = script(request, truth) if script else truth()
                if isinstance(answer, bytes):
                    stream.sock.sendall(answer)
                elif answer is not None:
                    stream.send(protocol.response_body(request.id, answer), deadline=5)
        finally:
            connection.close()

    def _hand_over(self, stream: Stream) -> None:
        ticket = self.store.service.redeem(stream.receive(deadline=5))
        stream.send(b"ok", deadline=5)
        send_descriptors(stream.sock, ticket.domain.pool.regions, ticket.writable, 5)


def never(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
    """Does nothing and says nothing."""
    return None


def late(seconds: float) -> Script:
    """Answers truthfully, but late."""

    def script(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
        answer = truth()
        time.sleep(seconds)
        return answer

    return script


def half(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
    """The first half of a frame."""
    answer = truth()
    assert isinstance(answer, Message)
    frame = frames.encode(protocol.response_body(request.id, answer))
    return frame[: len(frame) // 2]


def says(answer: Any) -> Script:
    """Always the same, without doing anything."""
    return lambda request, truth: answer


def hang_up(request: wire.Request, truth: Callable[[], Answer]) -> Answer:
    raise Hang
