"""The session state machine of both sides: bytes in, messages out, no sockets.

    server   HELLO ──hello──► READY ──any verb──► READY
               │                │
               └──── fault ─────┴──► FAILED (answers nothing more; the driver closes)

A fault is a stream that cannot be trusted any more: a bad frame, a message that does not parse, a
verb before Hello or a second Hello. A request that parses but cannot be served is no fault: it
gets an Error and the session goes on, so newer clients may ask for verbs that we do not know.
The client fails on the same faults of its peer, on a Welcome out of turn and on an Error about
the connection (id 0).

What a stranger can make us hold is small: before Hello a frame has at most `HELLO_MAX` bytes, and
messages that nest others, which parse to 30 times their size, at most `NESTED_MAX`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from kvpool.proto import frames
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    InvalidError,
    KvpoolError,
    ProtocolError,
    TooLargeError,
    VersionError,
    from_code,
)

VERSION_MIN = 1
VERSION_MAX = 1
FEATURES = frozenset({"adopt", "fetch", "hints", "pins"})
HELLO_MAX = 64 << 10
"""Largest body in bytes of the first frame, when nobody knows yet who sends it."""
NESTED_MAX = 1 << 20
"""Largest body in bytes of a message with repeated fields; columns are `bytes`, up to a frame."""
TEXT_MAX = 4096
"""Longest text of an Error in characters."""

_NESTED_REQUESTS = frozenset({wire.Request.HELLO_FIELD_NUMBER, wire.Request.OPEN_FIELD_NUMBER})
_NESTED_RESPONSES = frozenset({wire.Response.WELCOME_FIELD_NUMBER})
_TOP_FIELDS_MAX = 16


_BYTE = [bytes((byte,)) for byte in range(256)]


class _Kind(NamedTuple):
    """How a message travels in its envelope."""

    tag: bytes
    """Its field's key on the wire (number << 3 | length-delimited)."""
    nested: bool
    """It has repeated fields, so its size is limited."""


def _kinds(envelope: type[Message], nested: frozenset[int]) -> dict[type[Message], _Kind]:
    kinds = {}
    for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields:
        assert field.message_type is not None
        message: type[Message] = getattr(wire, field.message_type.name)
        kinds[message] = _Kind(_as_varint(field.number << 3 | 2), field.number in nested)
    return kinds


def _as_varint(number: int) -> bytes:
    if number <= 0x7F:
        return _BYTE[number]
    if number <= 0x3FFF:
        return _BYTE[number & 0x7F | 0x80] + _BYTE[number >> 7]
    return _BYTE[number & 0x7F | 0x80] + _as_varint(number >> 7)


_REQUESTS = _kinds(wire.Request, _NESTED_REQUESTS)
_RESPONSES = _kinds(wire.Response, _NESTED_RESPONSES)


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
    return _serialized(_REQUESTS, "Request", request_id, body)


def request_frame(request_id: int, body: Message) -> bytes:
    """The whole frame of one request."""
    return frames.encode(request_body(request_id, body))


def response_body(request_id: int, body: Message) -> bytes:
    """The body of one response's frame."""
    return _serialized(_RESPONSES, "Response", request_id, body)


def response_frame(request_id: int, body: Message) -> bytes:
    """The whole frame of one response."""
    return frames.encode(response_body(request_id, body))


def error_body(error: KvpoolError) -> wire.Error:
    """The message that carries `error` to the peer."""
    text = str(error).encode(errors="backslashreplace").decode()
    if len(text) > TEXT_MAX:
        text = text[: TEXT_MAX - 1] + "…"
    return wire.Error(code=error.code, text=text)


def parse_request(body: bytes) -> wire.Request:
    """Raises `ProtocolError` if `body` is no Request."""
    if len(body) > NESTED_MAX:
        _check_nested(body, _NESTED_REQUESTS)
    try:
        return wire.Request.FromString(body)
    except (DecodeError, UnicodeError) as error:
        raise ProtocolError(f"{len(body)} bytes are no request: {error}") from error


def parse_response(body: bytes) -> tuple[int, Message]:
    """(request id, message). Raises `ProtocolError`, or the error that the peer reports about
    the connection itself (id 0).

    A kind that this version does not know becomes an Error for the request that it answers; if it
    answers none (id 0: a ping, news from a newer peer), it is returned as the Response itself.
    """
    if len(body) > NESTED_MAX:
        _check_nested(body, _NESTED_RESPONSES)
    try:
        response = wire.Response.FromString(body)
    except (DecodeError, UnicodeError) as error:
        raise ProtocolError(f"{len(body)} bytes are no response: {error}") from error
    request_id, kind = response.id, response.WhichOneof("body")
    if kind is None:
        unknown = ProtocolError("the response is of a kind that this version does not know")
        return request_id, error_body(unknown) if request_id else response
    if kind == "error" and not request_id:
        raise from_code(response.error.code, response.error.text)
    return request_id, getattr(response, kind)


def _serialized(
    kinds: dict[type[Message], _Kind], envelope: str, request_id: int, message: Message
) -> bytes:
    """The envelope around `message`, as protobuf would encode it, but without a copy of the
    message: id (field 1, left out if 0), then the message as a length-delimited field."""
    kind = kinds.get(type(message))
    if kind is None:
        raise InvalidError(f"{message.DESCRIPTOR.name} is no kind of {envelope}")
    if not 0 <= request_id < 1 << 64:
        raise InvalidError(f"request id {request_id} is no unsigned 64-bit number")
    content = message.SerializeToString()
    head = kind.tag + _as_varint(len(content))
    if request_id:
        head = b"\x08" + _as_varint(request_id) + head
    body = head + content
    if kind.nested and len(body) > NESTED_MAX:
        raise TooLargeError(
            f"{message.DESCRIPTOR.name} has {len(body)} bytes; the limit is {NESTED_MAX}"
        )
    return body


def _check_nested(body: bytes, nested: frozenset[int]) -> None:
    """Refuses a body over `NESTED_MAX` with a field of `nested`. Raises `ProtocolError`.

    Reads only the top level: tag (field number << 3 | wire type), then a value to skip.
    """
    at = 0
    for _ in range(_TOP_FIELDS_MAX):
        tag, at = _varint(body, at)
        if tag >> 32:
            raise ProtocolError(f"a tag of {tag:#x}, over 32 bits")
        if tag >> 3 in nested:
            raise ProtocolError(
                f"field {tag >> 3} in {len(body)} bytes; {NESTED_MAX} are allowed with it"
            )
        match tag & 7:
            case 0:
                _, at = _varint(body, at)
            case 1:
                at += 8
            case 2:
                nbytes, at = _varint(body, at)
                at += nbytes
            case 5:
                at += 4
            case wire_type:
                raise ProtocolError(f"wire type {wire_type} in a large message")
        if at >= len(body):
            return
    raise ProtocolError(f"a large message has more than {_TOP_FIELDS_MAX} fields")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """(value, end) of the varint at `at`, of at most 10 bytes. Raises `ProtocolError`."""
    value = 0
    for shift, byte in enumerate(body[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ProtocolError("a varint that does not end")


class ServerSession:
    """The daemon's side of one connection."""

    __slots__ = ("_decoder", "_limit", "state")

    def __init__(self) -> None:
        self._decoder = frames.FrameDecoder()
        self._limit = HELLO_MAX
        self.state = State.HELLO

    def receive(self, data: bytes | bytearray | memoryview) -> list[wire.Request | None]:
        """The requests that `data` completes, in order; None stands for a ping.

        Raises `ProtocolError` and fails the session on a fault; requests before it are lost.
        """
        if self.state is State.FAILED:
            return []
        requests: list[wire.Request | None] = []
        try:
            self._decoder.push(data)
            while (body := self._decoder.take(self._limit)) is not None:
                requests.append(self._accept(body) if body else None)
        except ProtocolError:
            self.state = State.FAILED
            raise
        return requests

    def _accept(self, body: bytes) -> wire.Request:
        request = parse_request(body)
        greeting = self.state is State.HELLO
        if request.HasField("hello") is not greeting:
            raise ProtocolError("the first message must be Hello" if greeting else "a second Hello")
        if greeting:
            self.state, self._limit = State.READY, frames.MAX_FRAME
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
        try:
            return request_id, request_frame(request_id, body)
        except KvpoolError:
            self.abandon(request_id)  # never sent, never answered
            raise

    def number(self, body: Message) -> int:
        """The id under which `body` is sent and awaited. Raises `ProtocolError` out of turn."""
        if isinstance(body, wire.Hello):
            in_turn = self.state is State.HELLO and self._next_id == 1
        else:
            in_turn = self.state is State.READY
        if not in_turn:
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
        try:
            request_id, message = parse_response(body)
            if isinstance(message, wire.Welcome):
                self._welcome(message)
        except KvpoolError:
            self.state = State.FAILED
            raise
        wanted = request_id in self.waiting
        self.waiting.discard(request_id)
        return request_id, message, wanted

    def _welcome(self, message: wire.Welcome) -> None:
        if self.state is not State.HELLO or self._next_id == 1:
            raise ProtocolError(f"a Welcome is out of turn in state {self.state.value}")
        if not VERSION_MIN <= message.version <= VERSION_MAX:
            raise VersionError(
                f"the daemon chose protocol version {message.version}; this side offered "
                f"{VERSION_MIN}..{VERSION_MAX}"
            )
        self.state = State.READY


def orphan_release(message: Message) -> Message | None:
    """What to send (one-way) when `message` came too late, so that its lease does not linger."""
    if isinstance(message, wire.Matched) and message.lease:
        return wire.Release(leases=message.lease)
    if isinstance(message, wire.Reserved) and message.lease:
        return wire.Abort(lease=message.lease)
    return None
