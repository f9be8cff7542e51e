"""A blocking caller of the daemon, for the daemon's own processes and threads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Self

from google.protobuf.message import Message

from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import KvpoolError, ProtocolError, from_code
from kvpool.transfer.copying import Bytes
from kvpool.transfer.descriptors import map_regions, receive_descriptors
from kvpool.transfer.memory import MappedRegion
from kvpool.transfer.sockets import connect
from kvpool.transfer.stream import Stream, dial

DEADLINE_S = 5.0


class Caller:
    """One connection, one request at a time.

    Every call raises what the daemon reports, `DeadlineError` after `deadline_s` and
    `UnreachableError`; after one of these two the connection is of no use any more.
    """

    def __init__(self, address: str, hello: wire.Hello, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._session = protocol.ClientSession()
        self.stream = dial(address, deadline_s)
        try:
            welcome = self.call(hello)
        except BaseException:
            self.stream.close()
            raise
        assert isinstance(welcome, wire.Welcome)
        self.welcome = welcome

    def call(self, body: Message) -> Message:
        """The response to `body`."""
        return self.receive(self.send(body))

    def send(self, body: Message, buffers: Sequence[Bytes] = ()) -> int:
        """Sends `body` and raw bytes behind it; returns the request's id."""
        request_id = self._session.number(body)
        frame = protocol.request_body(request_id, body)
        self.stream.send(frame, buffers, deadline=self._deadline_s)
        return request_id

    def receive(self, request_id: int) -> Message:
        """The next response to `request_id`."""
        try:
            answer_id, message, _ = self._session.receive(
                self.stream.receive(deadline=self._deadline_s)
            )
            if answer_id != request_id:
                raise ProtocolError(f"an answer to {answer_id} instead of {request_id}")
        except KvpoolError:
            self.stream.abort()  # a late answer would be taken for the next one
            raise
        if isinstance(message, wire.Error):
            raise from_code(message.code, message.text)
        return message

    def receive_into(self, buffers: Sequence[Bytes]) -> None:
        """Raw bytes behind the last response."""
        self.stream.receive_into(buffers, deadline=self._deadline_s)

    def notify(self, body: Message) -> None:
        """Sends without wanting a response."""
        self.stream.send(protocol.request_body(0, body), deadline=self._deadline_s)

    def attach(self, writable: bool) -> tuple[int, list[MappedRegion]]:
        """(bytes per region, all regions that there are now, mapped)."""
        attached = self.call(wire.Attach(writable=writable))
        assert isinstance(attached, wire.Attached)
        end = time.monotonic() + self._deadline_s
        sock = connect(self.welcome.attach_address, self._deadline_s)
        with Stream(sock, exact=True) as stream:
            stream.send(attached.token, deadline=self._deadline_s)
            answer = stream.receive(deadline=self._deadline_s)
            if answer != b"ok":
                protocol.parse_response(answer)  # raises the daemon's refusal
                raise ProtocolError("the descriptor socket answered with something else")
            passed = receive_descriptors(sock, max(end - time.monotonic(), 0.001))
        return attached.region_bytes, map_regions(sorted(passed, key=lambda one: one.region.id))

    def close(self) -> None:
        self.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello(token: str, client: str, worker: bytes = b"") -> wire.Hello:
    """The Hello of this process."""
    return wire.Hello(
        version_min=protocol.VERSION_MIN,
        version_max=protocol.VERSION_MAX,
        features=sorted(protocol.FEATURES),
        token=token,
        client=client,
        pid=os.getpid(),
        worker=worker,
    )
