"""Both sides of a session: turns, versions, strangers, late answers, and bytes of older peers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.proto import frames
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BY_CODE,
    BusyError,
    InvalidError,
    KvpoolError,
    ProtocolError,
    TooLargeError,
    VersionError,
)
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.proto.session import (
    HELLO_MAX,
    NESTED_MAX,
    TEXT_MAX,
    VERSION_MAX,
    VERSION_MIN,
    ClientSession,
    ServerSession,
    State,
    common_version,
    error_body,
    orphan_release,
    parse_request,
    parse_response,
    request_body,
    request_frame,
    response_body,
    response_frame,
)
from tests.proto import wire_samples
from tests.proto.examples import examples
from tests.proto.samples import pieces

REQUESTS = wire_samples.kinds("Request")
RESPONSES = wire_samples.kinds("Response")
HELLO = wire.Hello(version_min=VERSION_MIN, version_max=VERSION_MAX)
WELCOME = wire.Welcome(version=VERSION_MAX)
LEASE = bytes(range(16))


def request(kind: str) -> Message:
    return wire_samples.body("Request", kind, filled=False)


def response(kind: str) -> Message:
    return wire_samples.body("Response", kind, filled=False)


def ready_server() -> ServerSession:
    server = ServerSession()
    server.receive(request_frame(1, HELLO))
    return server


def ready_client() -> ClientSession:
    client = ClientSession()
    hello_id, _ = client.request(HELLO)
    client.receive(response_body(hello_id, WELCOME))
    return client


def field(number: int, value: int | bytes) -> bytes:
    """One field as the protobuf encoding defines it; a second opinion on golden bytes."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


# Turns: the state machine as a table


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_server_hears_hello_first_and_once(kind: str) -> None:
    first, later = ServerSession(), ready_server()
    frame = request_frame(7, request(kind))
    taken, refused = (first, later) if kind == "hello" else (later, first)

    [accepted] = taken.receive(frame)
    assert accepted is not None
    assert (accepted.id, accepted.WhichOneof("body")) == (7, kind)
    assert taken.state is State.READY

    with pytest.raises(ProtocolError, match="Hello"):
        refused.receive(frame)
    assert refused.state is State.FAILED
    assert refused.receive(request_frame(1, HELLO)) == []


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_client_says_hello_first_and_once(kind: str) -> None:
    new, waiting, ready = ClientSession(), ClientSession(), ready_client()
    waiting.request(HELLO)
    for client, allowed in (
        (new, kind == "hello"),
        (waiting, False),  # a second Hello would end the connection
        (ready, kind != "hello"),
    ):
        before = set(client.waiting)
        if allowed:
            request_id, frame = client.request(request(kind))
            assert frame == request_frame(request_id, request(kind))
            assert client.waiting == before | {request_id}
        else:
            with pytest.raises(ProtocolError, match="out of turn"):
                client.request(request(kind))
            assert client.waiting == before


@pytest.mark.parametrize("kind", RESPONSES)
def test_a_client_takes_any_response_but_a_welcome_only_to_its_hello(kind: str) -> None:
    new, waiting, ready = ClientSession(), ClientSession(), ready_client()
    hello_id, _ = waiting.request(HELLO)
    answer = WELCOME if kind == "welcome" else response(kind)
    for client, state in ((new, State.HELLO), (waiting, State.HELLO), (ready, State.READY)):
        if kind == "welcome" and client is not waiting:
            with pytest.raises(ProtocolError, match="Welcome is out of turn"):
                client.receive(response_body(1, answer))
            assert client.state is State.FAILED
            continue
        request_id, message, wanted = client.receive(response_body(hello_id, answer))
        assert (request_id, message) == (hello_id, answer)
        assert wanted is (client is waiting)
        assert client.state is (State.READY if kind == "welcome" else state)


def test_a_failed_client_sends_nothing_more() -> None:
    client = ready_client()
    with pytest.raises(ProtocolError):
        client.receive(b"\xff")
    assert client.state is State.FAILED
    for body in (HELLO, wire.Status()):
        with pytest.raises(ProtocolError, match="out of turn in state failed"):
            client.request(body)


def test_pings_are_heard_in_every_state_and_change_none() -> None:
    server = ServerSession()
    assert server.receive(frames.PING) == [None]
    assert server.state is State.HELLO
    server = ready_server()
    assert server.receive(frames.PING + request_frame(2, wire.Status()) + frames.PING) == [
        None,
        wire.Request(id=2, status=wire.Status()),
        None,
    ]
    for client in (ClientSession(), ready_client()):
        state = client.state
        assert client.receive(b"")[2] is False
        assert client.state is state


def test_requests_before_a_fault_in_the_same_bytes_are_lost_and_none_follows() -> None:
    server = ready_server()
    with pytest.raises(ProtocolError, match="second Hello"):
        server.receive(request_frame(2, wire.Status()) + request_frame(3, HELLO))
    assert server.receive(request_frame(4, wire.Status())) == []


# Versions


@pytest.mark.parametrize(
    ("minimum", "maximum"), [(VERSION_MIN, VERSION_MAX), (0, VERSION_MAX), (VERSION_MAX, 2**32 - 1)]
)
def test_the_highest_common_version_is_chosen(minimum: int, maximum: int) -> None:
    assert common_version(minimum, maximum) == VERSION_MAX


@pytest.mark.parametrize(
    ("minimum", "maximum"), [(0, 0), (VERSION_MAX + 1, VERSION_MAX + 2), (5, 0), (2**32 - 1, 0)]
)
def test_without_a_common_version_both_ranges_are_shown(minimum: int, maximum: int) -> None:
    with pytest.raises(VersionError) as caught:
        common_version(minimum, maximum)
    assert f"{minimum}..{maximum}" in str(caught.value)
    assert f"{VERSION_MIN}..{VERSION_MAX}" in str(caught.value)


@pytest.mark.parametrize("version", [VERSION_MIN - 1, VERSION_MAX + 1, 2**32 - 1])
def test_a_welcome_of_a_version_that_was_not_offered_is_refused(version: int) -> None:
    client = ClientSession()
    hello_id, _ = client.request(HELLO)
    with pytest.raises(VersionError, match=rf"{version}; .*{VERSION_MIN}\.\.{VERSION_MAX}"):
        client.receive(response_body(hello_id, wire.Welcome(version=version)))
    assert client.state is State.FAILED


# Newer peers


NEWS = field(1000, b"news") + field(1001, 7)


def test_an_unknown_verb_is_no_fault_once_hello_was_said() -> None:
    server = ready_server()
    [unknown] = server.receive(frames.encode(field(1, 9) + NEWS))
    assert unknown is not None
    assert (unknown.id, unknown.WhichOneof("body")) == (9, None)
    assert server.state is State.READY
    with pytest.raises(ProtocolError, match="must be Hello"):
        ServerSession().receive(frames.encode(field(1, 9) + NEWS))


@pytest.mark.parametrize("kind", REQUESTS)
def test_unknown_fields_in_any_request_are_tolerated(kind: str) -> None:
    number = wire.Request.DESCRIPTOR.fields_by_name[kind].number
    plain = wire_samples.body("Request", kind)
    body = field(1, 9) + field(number, plain.SerializeToString() + NEWS) + NEWS
    server = ServerSession() if kind == "hello" else ready_server()
    [accepted] = server.receive(frames.encode(body))
    assert accepted is not None
    known = getattr(accepted, kind)
    known.DiscardUnknownFields()
    assert known == plain


@pytest.mark.parametrize("kind", RESPONSES)
def test_unknown_fields_in_any_response_are_tolerated(kind: str) -> None:
    number = wire.Response.DESCRIPTOR.fields_by_name[kind].number
    plain = wire_samples.body("Response", kind)
    request_id, message = parse_response(
        field(1, 9) + field(number, plain.SerializeToString() + NEWS) + NEWS
    )
    message.DiscardUnknownFields()
    assert (request_id, message) == (9, plain)


def test_an_answer_of_an_unknown_kind_fails_its_request_and_not_the_session() -> None:
    client = ready_client()
    request_id, _ = client.request(wire.Status())
    answered, message, wanted = client.receive(field(1, request_id) + NEWS)
    assert (answered, wanted) == (request_id, True)
    assert isinstance(message, wire.Error)
    assert message.code == ProtocolError.code
    assert client.state is State.READY


def test_unasked_news_of_an_unknown_kind_is_no_answer_and_no_fault() -> None:
    client = ready_client()
    request_id, _ = client.request(wire.Status())
    number, message, wanted = client.receive(NEWS)
    assert (number, wanted) == (0, False)
    assert orphan_release(message) is None
    assert client.waiting == {request_id}


def test_unknown_outcomes_and_reasons_in_a_response_are_read() -> None:
    _, message = parse_response(
        response_body(1, wire.Matched(miss_outcome=250, miss_reason=2**32 - 1))
    )
    assert isinstance(message, wire.Matched)
    assert Outcome(message.miss_outcome) is Outcome.MISS
    assert Reason(message.miss_reason) is Reason.UNKNOWN


# Late answers


def test_a_late_answer_is_not_wanted_and_its_lease_is_given_back() -> None:
    client = ready_client()
    late, _ = client.request(wire.Match())
    client.abandon(late)
    timely, _ = client.request(wire.Match())
    for request_id, expected in ((late, False), (timely, True), (timely, False)):
        _, message, wanted = client.receive(response_body(request_id, wire.Matched(lease=LEASE)))
        assert wanted is expected
        assert orphan_release(message) == wire.Release(leases=LEASE)


def test_numbers_are_never_used_twice() -> None:
    client = ready_client()
    numbers = [client.request(wire.Status())[0] for _ in range(100)]
    assert numbers == list(range(2, 102))


def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    client = ready_client()
    with pytest.raises(TooLargeError):
        client.request(wire.Open(digest=bytes(NESTED_MAX)))
    assert client.waiting == set()


@pytest.mark.parametrize("kind", RESPONSES)
def test_every_response_that_grants_a_lease_can_be_given_back(kind: str) -> None:
    message = response(kind)
    assert orphan_release(message) is None
    if "lease" not in message.DESCRIPTOR.fields_by_name:
        assert orphan_release(wire_samples.body("Response", kind)) is None
        return
    message.lease = LEASE  # type: ignore[attr-defined]
    release = orphan_release(message)
    assert release is not None
    assert LEASE in request_body(0, release)
    assert parse_request(request_body(0, release)).id == 0


def test_a_late_reservation_is_aborted() -> None:
    assert orphan_release(wire.Reserved(lease=LEASE)) == wire.Abort(lease=LEASE)


# Errors


@pytest.mark.parametrize("code", BY_CODE)
def test_an_error_about_the_connection_is_raised_and_ends_it(code: int) -> None:
    client = ready_client()
    with pytest.raises(BY_CODE[code], match="why"):
        client.receive(response_body(0, error_body(BY_CODE[code]("why"))))
    assert client.state is State.FAILED


def test_an_error_about_a_request_is_its_answer() -> None:
    client = ready_client()
    request_id, _ = client.request(wire.Match())
    busy = error_body(BusyError("0 of 10 bytes are free"))
    assert client.receive(response_body(request_id, busy)) == (request_id, busy, True)
    assert client.state is State.READY


@pytest.mark.parametrize("text", ["x" * 10**6, "\0" * 10**6, "é" * 10**6], ids=["x", "nul", "é"])
def test_an_error_text_of_any_length_is_sent_short(text: str) -> None:
    frame = response_frame(1, error_body(InvalidError(text)))
    assert len(frame) < 3 * TEXT_MAX
    assert error_body(InvalidError("x" * TEXT_MAX)).text == "x" * TEXT_MAX
    assert error_body(InvalidError("x" * (TEXT_MAX + 1))).text == "x" * (TEXT_MAX - 1) + "…"


def test_an_error_text_that_has_no_utf_8_form_is_sent_escaped() -> None:
    # Such as the name of a file that is not UTF-8.
    assert error_body(InvalidError("caf\udce9 é")).text == "caf\\udce9 é"


@pytest.mark.parametrize("body", [WELCOME, wire.PartRecord(), wire.Request()])
def test_what_is_no_kind_of_request_is_refused(body: Message) -> None:
    with pytest.raises(InvalidError, match="no kind of Request"):
        request_frame(1, body)


def test_what_is_no_kind_of_response_is_refused() -> None:
    with pytest.raises(InvalidError, match="Hello is no kind of Response"):
        response_frame(1, HELLO)


# Strangers and bombs


def test_before_hello_no_more_than_a_hello_is_buffered() -> None:
    server = ServerSession()
    with pytest.raises(ProtocolError, match="exceeds 0x10000"):
        server.receive(frames.PREFIX.pack(HELLO_MAX + 1))
    assert server.state is State.FAILED
    hello = request_body(1, wire.Hello(token="x" * (HELLO_MAX - 10)))
    assert len(hello) == HELLO_MAX
    [accepted] = ServerSession().receive(frames.encode(hello))
    assert accepted is not None


def test_large_requests_may_follow_hello_in_the_same_bytes() -> None:
    match = wire.Match(keys=bytes(2 * NESTED_MAX))
    stream = request_frame(1, HELLO) + request_frame(2, match)
    assert [r.id for r in ServerSession().receive(stream) if r] == [1, 2]


def test_a_stranger_is_told_what_it_looks_like() -> None:
    for opening, hint in ((b"GET / HTTP/1.1\r\n\r\n", "HTTP"), (b"\x16\x03\x01\x02\0", "TLS")):
        with pytest.raises(ProtocolError, match=hint):
            ServerSession().receive(opening)


@pytest.mark.parametrize("envelope", wire_samples.ENVELOPES)
def test_only_columns_may_be_large(envelope: str) -> None:
    parse: Any = {"Request": parse_request, "Response": parse_response}[envelope]
    make: Any = {"Request": request_body, "Response": response_body}[envelope]
    descriptor = wire_samples.ENVELOPES[envelope].DESCRIPTOR
    for kind in wire_samples.kinds(envelope):
        message = wire_samples.body(envelope, kind)
        number = descriptor.fields_by_name[kind].number
        large = field(1, 300) + field(
            number, message.SerializeToString() + field(999, bytes(NESTED_MAX))
        )
        if wire_samples.is_nested(message):
            with pytest.raises(ProtocolError, match=f"field {number} in"):
                parse(large)
            message.MergeFromString(field(999, bytes(NESTED_MAX)))
            with pytest.raises(TooLargeError):
                make(300, message)
        else:
            parse(large)


BOMB = field(3, field(1, b"\x3a\0" * NESTED_MAX))  # Open with a million empty parts


@pytest.mark.parametrize(
    "body",
    [
        BOMB,
        field(1, 1) + BOMB,
        field(5, b"") + BOMB,
        field(1000, bytes(NESTED_MAX)) + BOMB,
        b"\xc1\x3e" + bytes(8) + b"\xc5\x3e" + bytes(4) + BOMB,  # fixed64 and fixed32 before it
        b"\x9a\x80\x80\x80\x00" + BOMB[1:],  # the same tag in a longer varint
        field(1, 1) * 40 + BOMB,
        b"\xcb\x3e" + bytes(NESTED_MAX),  # a group
        b"\x80" * 2 * NESTED_MAX,  # a tag that never ends
        b"\xff" * 9 + b"\x01" + bytes(NESTED_MAX),  # a tag of 64 bits
        field(1, 1) * NESTED_MAX,
    ],
    ids=range(11),
)
def test_a_bomb_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_request(body)


def test_a_large_message_that_is_cut_is_refused() -> None:
    whole = request_body(1, wire.Match(keys=bytes(2 * NESTED_MAX)))
    for body in (whole[:-1], whole + b"\x0a", whole + b"\x0d\0"):
        with pytest.raises(ProtocolError):
            parse_request(body)


golden_bodies = st.sampled_from(
    [
        bytes.fromhex(entry["hex"])
        for entries in wire_samples.load().values()
        for entry in entries.values()
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid body with a few bytes changed, cut or put in."""
    body = bytearray(draw(golden_bodies))
    for at, new, cut in draw(
        st.lists(
            st.tuples(st.integers(0, 600), st.binary(max_size=3), st.integers(0, 3)), max_size=3
        )
    ):
        start = at % (len(body) + 1)
        body[start : start + cut] = new
    return bytes(body)


@given(st.one_of(st.binary(max_size=60), damaged()))
@examples(3)
def test_no_bytes_of_a_peer_raise_a_foreign_exception(body: bytes) -> None:
    for receive in (
        parse_request,
        parse_response,
        ready_client().receive,
        lambda body: ready_server().receive(frames.encode(body)),
    ):
        with contextlib.suppress(KvpoolError):
            receive(body)


@pytest.mark.parametrize("depth", [99, 101, 5000, 100_000])
def test_deep_nesting_of_unknown_groups_is_no_recursion(depth: int) -> None:
    for body in (b"\xcb\x3e" * depth, b"\xcb\x3e" * depth + b"\xcc\x3e" * depth):
        for parse in (parse_request, parse_response):
            with contextlib.suppress(ProtocolError):
                parse(body)


def test_text_that_is_no_utf_8_is_a_protocol_error_in_every_protobuf_runtime() -> None:
    bodies = [field(2, field(4, b"\xff")), field(2, field(2, b"\xff"))]  # Hello.token, Error.text
    with pytest.raises(ProtocolError):
        parse_request(bodies[0])
    with pytest.raises(ProtocolError):
        parse_response(bodies[1])
    script = f"""if True:
        from kvpool.proto import errors, session
        for parse, body in zip((session.parse_request, session.parse_response), {bodies}):
            try:
                parse(body)
            except errors.ProtocolError:
                print("refused")
        """
    proto = Path(__file__).resolve().parents[2] / "proto"
    environment = {
        **os.environ,
        "PYTHONPATH": str(proto),
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
    }
    output = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["refused", "refused"]


# Bytes of older peers


def golden_entries() -> list[Any]:
    return [
        pytest.param(envelope, name, entry, id=f"{envelope} {name}")
        for envelope, entries in wire_samples.load().items()
        for name, entry in entries.items()
    ]


@pytest.mark.parametrize(("envelope", "name", "entry"), golden_entries())
def test_the_bytes_of_a_peer_of_version_1_mean_what_they_meant(
    envelope: str, name: str, entry: dict[str, str]
) -> None:
    raw = bytes.fromhex(entry["hex"])
    meant = text_format.Parse(entry["text"], wire_samples.ENVELOPES[envelope]())
    read = wire_samples.ENVELOPES[envelope].FromString(raw)
    assert read == meant
    assert read.WhichOneof("body") == name.partition(" ")[0]
    assert meant.SerializeToString(deterministic=True) == raw


@pytest.mark.parametrize(
    ("envelope", "kind"),
    [(e, kind) for e in wire_samples.ENVELOPES for kind in wire_samples.kinds(e)],
)
def test_every_kind_is_frozen_with_all_its_fields(envelope: str, kind: str) -> None:
    frozen = {entry["hex"] for entry in wire_samples.load()[envelope].values()}
    sample = wire_samples.sample(envelope, kind).SerializeToString(deterministic=True)
    assert sample.hex() in frozen, "run `python -m tests.proto.wire_samples`; it only adds"


def test_golden_bytes_are_what_the_protobuf_encoding_says() -> None:
    golden = wire_samples.load()
    match = field(1, 2**31 + 1) + field(2, b"keys\0\xff") + field(3, 2**63 + 3)
    match += field(4, 2**31 + 4) + field(5, 1)
    assert golden["Request"]["match"]["hex"] == (field(1, 300) + field(5, match)).hex()
    matched = b"".join(field(i, 2**31 + i) for i in (1, 2, 3)) + field(4, b"lease\0\xff")
    matched += field(5, 2**31 + 5) + field(6, b"extents\0\xff")
    assert golden["Response"]["matched"]["hex"] == (field(1, 300) + field(6, matched)).hex()


def test_a_one_way_request_has_no_number_on_the_wire() -> None:
    assert request_frame(0, wire.Release(leases=LEASE)) == b"\0\0\0\x14" + field(9, field(1, LEASE))


# Both sides together, whatever the boundaries


class Conversation(RuleBasedStateMachine):
    """A client and a server over two pipes that deliver any number of bytes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.server = ClientSession(), ServerSession()
        self.decoder = frames.FrameDecoder()
        self.to_server, self.to_client = bytearray(), bytearray()
        self.sent: list[tuple[int, str]] = []
        self.heard: list[tuple[int, str]] = []
        self.unanswered: list[tuple[int, str]] = []
        self.pings = 0
        self.abandoned: set[int] = set()
        self.expected: set[int] = set()

    def _send(self, kind: str, body: Message) -> None:
        request_id, frame = self.client.request(body)
        self.sent.append((request_id, kind))
        self.expected.add(request_id)
        self.to_server += frame

    @initialize()
    def say_hello(self) -> None:
        self._send("hello", HELLO)

    @precondition(lambda self: self.client.state is State.READY)
    @rule(kind=st.sampled_from([kind for kind in REQUESTS if kind != "hello"]))
    def ask(self, kind: str) -> None:
        self._send(kind, wire_samples.body("Request", kind))

    @rule()
    def ping(self) -> None:
        self.to_server += frames.PING

    @rule()
    def ping_back(self) -> None:
        self.to_client += frames.PING

    @rule(index=st.integers(0, 100))
    def give_up(self, index: int) -> None:
        waiting = sorted(self.expected - {1})
        if waiting:
            request_id = waiting[index % len(waiting)]
            self.client.abandon(request_id)
            self.expected.remove(request_id)
            self.abandoned.add(request_id)

    @rule(nbytes=st.integers(1, 200))
    def deliver_to_server(self, nbytes: int) -> None:
        for request in self.server.receive(bytes(self.to_server[:nbytes])):
            if request is not None:
                heard = (request.id, request.WhichOneof("body") or "")
                self.heard.append(heard)
                self.unanswered.append(heard)
        del self.to_server[:nbytes]

    @precondition(lambda self: self.unanswered)
    @rule(index=st.integers(0, 100), kind=st.sampled_from(RESPONSES))
    def answer(self, index: int, kind: str) -> None:
        request_id, asked = self.unanswered.pop(index % len(self.unanswered))
        if asked == "hello":
            body: Message = WELCOME
        else:
            kind = "count" if kind == "welcome" else kind
            body = wire_samples.body("Response", kind)
        self.to_client += response_frame(request_id, body)

    @rule(nbytes=st.integers(1, 200))
    def deliver_to_client(self, nbytes: int) -> None:
        for body in self.decoder.feed(bytes(self.to_client[:nbytes])):
            request_id, _, wanted = self.client.receive(body)
            assert wanted is (request_id in self.expected)
            assert wanted or not request_id or request_id in self.abandoned
            self.expected.discard(request_id)
        del self.to_client[:nbytes]

    @invariant()
    def requests_are_heard_once_and_in_order(self) -> None:
        assert self.heard == self.sent[: len(self.heard)]

    @invariant()
    def the_client_waits_for_what_it_asked_and_nothing_else(self) -> None:
        assert self.client.waiting == self.expected

    def teardown(self) -> None:
        """In the end everything is heard and answered."""
        while self.to_server or self.unanswered or self.to_client:
            self.deliver_to_server(1 << 20)
            while self.unanswered:
                self.answer(0, "count")
            self.deliver_to_client(1 << 20)
        assert self.heard == self.sent
        assert self.client.waiting == set()
        assert self.decoder.buffered == 0


TestConversation = Conversation.TestCase
TestConversation.settings = settings(examples(0.4), stateful_step_count=40)


@given(
    st.lists(st.sampled_from(REQUESTS[1:]), max_size=6), st.lists(st.integers(0, 2000), max_size=20)
)
@examples(0.5)
def test_a_server_hears_the_same_however_the_stream_is_cut(
    kinds: list[str], cuts: list[int]
) -> None:
    bodies: list[Message] = [HELLO, *(wire_samples.body("Request", kind) for kind in kinds)]
    stream = b"".join(request_frame(i + 1, body) for i, body in enumerate(bodies))
    server = ServerSession()
    heard = [request for piece in pieces(stream, cuts) for request in server.receive(piece)]
    assert [r and (r.id, getattr(r, r.WhichOneof("body") or "")) for r in heard] == list(
        enumerate(bodies, 1)
    )
