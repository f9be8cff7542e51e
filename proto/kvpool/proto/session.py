"""The session state machine of both sides: bytes in, messages out, no sockets.

    server   HELLO ──hello──► READY ──any verb──► READY
               │                │
               └──── fault ─────┴──► FAILED (answers nothing more; the driver closes)

A fault is a stream that cannot be trusted any more: a bad frame, a message that does not parse, a
verb before Hello or a second Hello. A request that parses but cannot be served is no fault: it
gets an Error and the session goes on, so newer clients may ask for verbs that we do not know.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvpool.proto import frames
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import KvpoolError, ProtocolError, VersionError, from_code

VERSION_MIN = 1
VERSION_MAX = 1
FEATURES = frozenset({"adopt", "fetch", "hints", "pins"})

_REQUEST_FIELD = {
    field.message_type.full_name: field.name
    for field in wire.Request.DESCRIPTOR.oneofs_by_name["body"].fields
}
_RESPONSE_FIELD = {
    field.message_type.full_name: field.name
    for field in wire.Response.DESCRIPTOR.oneofs_by_name["body"].fields
}


class State(Enum):
    HELLO = "hello"
    READY = "ready"
    FAILED = "failed"


def common_version(minimum: int, maximum: int) -> int:
    """The highest version that both sides speak. Raises `VersionError` with both ranges."""
    version = min(maximum, VERSION_MAX)
    if version < max(minimum, VERSION_MIN):
        raise VersionError(
            f"no common protocol version: the peer speaks {minimum}..{maximum}, "
            f"this side {VERSION_MIN}..{VERSION_MAX}; upgrade the older one"
        )
    return version


def request_body(request_id: int, body: Message) -> bytes:
    """The body of one request's frame; id 0 wants no response."""
    fields: dict[str, Any] = {_REQUEST_FIELD[body.DESCRIPTOR.full_name]: body, "id": request_id}
    return wire.Request(**fields).SerializeToString()


def request_frame(request_id: int, body: Message) -> bytes:
    """The whole frame of one request."""
    return frames.encode(request_body(request_id, body))


def response_body(request_id: int, body: Message) -> bytes:
    """The body of one response's frame."""
    fields: dict[str, Any] = {_RESPONSE_FIELD[body.DESCRIPTOR.full_name]: body, "id": request_id}
    return wire.Response(**fields).SerializeToString()


def response_frame(request_id: int, body: Message) -> bytes:
    """The whole frame of one response."""
    return frames.encode(response_body(request_id, body))


def error_body(error: KvpoolError) -> wire.Error:
    """The message that carries `error` to the peer."""
    return wire.Error(code=error.code, text=str(error))


def parse_request(body: bytes) -> wire.Request:
    """Raises `ProtocolError` if `body` is no Request."""
    try:
        return wire.Request.FromString(body)
    except DecodeError as error:
        raise ProtocolError(f"{len(body)} bytes are no request: {error}") from error


def parse_response(body: bytes) -> tuple[int, Message]:
    """(request id, message). Raises `ProtocolError`, or the error that the peer reports about
    the connection itself (id 0)."""
    try:
        response = wire.Response.FromString(body)
    except DecodeError as error:
        raise ProtocolError(f"{len(body)} bytes are no response: {error}") from error
    kind = response.WhichOneof("body")
    if kind is None:
        raise ProtocolError("the response is empty or of a kind that this version does not know")
    message: Message = getattr(response, kind)
    if response.id == 0 and kind == "error":
        raise from_code(response.error.code, response.error.text)
    return response.id, message


class ServerSession:
    """The daemon's side of one connection."""

    __slots__ = ("_decoder", "state")

    def __init__(self) -> None:
        self._decoder = frames.FrameDecoder()
        self.state = State.HELLO

    def receive(self, data: bytes | bytearray | memoryview) -> list[wire.Request | None]:
        """The requests that `data` completes, in order; None stands for a ping.

        Raises `ProtocolError` and fails the session on a fault; requests before it are lost.
        """
        if self.state is State.FAILED:
            return []
        try:
            return [self._accept(body) for body in self._decoder.feed(data)]
        except ProtocolError:
            self.state = State.FAILED
            raise

    def _accept(self, body: bytes) -> wire.Request | None:
        if not body:
            return None
        request = parse_request(body)
        is_hello = request.HasField("hello")
        if is_hello is not (self.state is State.HELLO):
            raise ProtocolError("a second Hello" if is_hello else "the first message must be Hello")
        self.state = State.READY
        return request


class ClientSession:
    """The client's side of one connection: numbers requests, sorts responses."""

    __slots__ = ("_next_id", "state", "waiting")

    def __init__(self) -> None:
        self._next_id = 1
        self.state = State.HELLO
        self.waiting: set[int] = set()

    def request(self, body: Message) -> tuple[int, bytes]:
        """(id, frame) of a request that wants a response. Raises `ProtocolError` out of turn."""
        request_id = self.number(body)
        return request_id, request_frame(request_id, body)

    def number(self, body: Message) -> int:
        """The id under which `body` is sent and awaited. Raises `ProtocolError` out of turn."""
        is_hello = isinstance(body, wire.Hello)
        if is_hello is not (self.state is State.HELLO):
            raise ProtocolError(
                f"{body.DESCRIPTOR.name} is out of turn in state {self.state.value}"
            )
        request_id = self._next_id
        self._next_id += 1
        self.waiting.add(request_id)
        return request_id

    def abandon(self, request_id: int) -> None:
        """Nobody waits for this response any more; when it comes late it is an orphan."""
        self.waiting.discard(request_id)

    def receive(self, body: bytes) -> tuple[int, Message, bool]:
        """(id, message, wanted). Raises `ProtocolError` or the peer's connection error."""
        request_id, message = parse_response(body)
        wanted = request_id in self.waiting
        self.waiting.discard(request_id)
        if isinstance(message, wire.Welcome):
            if not VERSION_MIN <= message.version <= VERSION_MAX:
                raise VersionError(f"the daemon chose version {message.version}, not offered by us")
            self.state = State.READY
        return request_id, message, wanted


def orphan_release(message: Message) -> Message | None:
    """What to send (one-way) when `message` came too late, so that its lease does not linger."""
    if isinstance(message, wire.Matched) and message.lease:
        return wire.Release(leases=message.lease)
    if isinstance(message, wire.Reserved) and message.lease:
        return wire.Abort(lease=message.lease)
    return None
