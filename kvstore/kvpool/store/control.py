"""The daemon's control port: frames over Unix and TCP sockets on the event loop.

    open ──hello──► serving ──fault──► deaf (memory attached) ──EOF──► closed
      │                │  └───fault, nothing attached──────────────────► closed
      └──deadline──────┴──────────────────────────────────────EOF──────► closed

A client that has mapped the memory may be copying at any time. Whatever it does wrong, what it
holds is given back only when it closes its end, which it does after its last copy.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from typing import cast

from kvpool.proto import frames
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, DeadlineError, KvpoolError
from kvpool.store.keepalive import keep_alive
from kvpool.store.service import Service

log = logging.getLogger("kvpool")

HELLO_DEADLINE_S = 10.0
CONNECTIONS_MAX = 4096
AWAKE_S = 0.0001
"""How long the loop polls after an answer before it sleeps. A core that sleeps wakes with empty
caches, and a lookup takes twice as long in them."""
TURN_S = 0.002
"""How long one client's requests may keep the loop, checked between requests."""


class Control:
    """All control connections of a daemon; a factory of protocols for the loop's servers."""

    def __init__(
        self,
        service: Service,
        connections_max: int = CONNECTIONS_MAX,
        hello_deadline_s: float = HELLO_DEADLINE_S,
    ) -> None:
        self.service = service
        self.connections_max = connections_max
        self.hello_deadline_s = hello_deadline_s
        self.open: set[ControlProtocol] = set()
        self.refused = 0
        self._resting = False
        """`_watch` is due."""
        self._behind = False
        """Something was answered since the service caught up."""
        self._awake_until = 0.0

    def __call__(self) -> ControlProtocol:
        return ControlProtocol(self)

    def rest(self) -> None:
        """Nobody waits just now: the service may catch up, while the client looks at its answer.
        Its next request often follows at once, so the loop stays awake for a moment."""
        self._behind = True
        self._awake_until = time.monotonic() + AWAKE_S
        if not self._resting:
            self._resting = True
            asyncio.get_running_loop().call_soon(self._watch)

    def _watch(self) -> None:
        self._resting = False  # first: what fails below is tried again after the next answer
        if self._behind:
            self._behind = False
            self.service.catch_up()
        if time.monotonic() < self._awake_until:
            self._resting = True
            asyncio.get_running_loop().call_soon(self._watch)

    def close(self) -> None:
        """Ends all connections, after the daemon's last answer on each."""
        for connection in list(self.open):
            connection.close()


class ControlProtocol(asyncio.Protocol):
    """One control connection."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._session = protocol.ServerSession()
        self._pending: deque[wire.Request | None] = deque()
        self._working = False
        """`_work` is due."""
        self._greeting = True
        """No Hello was answered yet."""
        self._full = False
        """The peer does not take its answers."""
        self._deaf = False
        self._paused = False
        """Its bytes are not read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        control = self._control
        sock = transport.get_extra_info("socket")
        local = sock.family == socket.AF_UNIX
        host = "" if local else transport.get_extra_info("sockname")[0]
        self._connection = control.service.connect(local=local, host=host)
        self._hello_timer = asyncio.get_running_loop().call_later(
            control.hello_deadline_s, self._hello_is_late
        )
        control.open.add(self)
        keep_alive(sock)
        if len(control.open) > control.connections_max:
            control.refused += 1
            self._fail(BusyError(f"{control.connections_max} connections are open already"))

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._pending.extend(self._session.receive(data))
        except KvpoolError as error:
            self._control.service.counters.protocol_faults += 1
            log.warning("%s: %s", self._name, error)
            self._fail(error)
            return
        if not self._working:
            self._work()

    def _work(self) -> None:
        """Answers what is pending, for a short time: then it is the others' turn."""
        self._working = False
        pending = self._pending
        if not pending:
            return
        answer = self._answer(pending.popleft())
        if pending:
            until = time.monotonic() + TURN_S
            answers = [answer]
            while pending and time.monotonic() < until:
                answers.append(self._answer(pending.popleft()))
            answer = b"".join(answers)
        if answer:
            self._transport.write(answer)
        if self._greeting:
            self._check_hello()
        if pending or self._paused:
            self._go_on()
        if not pending:
            self._control.rest()

    def _go_on(self) -> None:
        """Reads only while nothing is pending and the peer takes its answers."""
        if self._deaf or self._transport.is_closing():
            return
        pause = bool(self._full or self._pending)
        if pause is not self._paused:
            self._paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()
        if self._pending and not self._full and not self._working:
            self._working = True
            asyncio.get_running_loop().call_soon(self._work)

    def _check_hello(self) -> None:
        """After the first answers. A ping is none to wait for."""
        if self._connection.welcomed:
            self._greeting = False
            self._hello_timer.cancel()
        elif self._session.state is protocol.State.READY:  # refused, and there is no second one
            self._hello_timer.cancel()
            self.close()

    def _answer(self, request: wire.Request | None) -> bytes:
        if request is None:
            return frames.PING
        answer = self._connection.handle(request)
        if answer is None:
            return b""
        try:
            return protocol.response_frame(request.id, answer)
        except KvpoolError as error:  # the answer exceeds a frame
            return protocol.response_frame(request.id, protocol.error_body(error))

    @property
    def _name(self) -> str:
        return f"client {self._connection.client or '?'} (pid {self._connection.pid or '?'})"

    def _hello_is_late(self) -> None:
        self._fail(DeadlineError(f"no Hello within {self._control.hello_deadline_s} s"))

    def _fail(self, error: KvpoolError) -> None:
        """Tells the peer and hears it no more."""
        self._deaf = True
        self._pending.clear()
        self._hello_timer.cancel()
        self._transport.write(protocol.response_frame(0, protocol.error_body(error)))
        if not self._connection.attached:
            self._transport.close()
        else:
            self._paused = False
            self._transport.resume_reading()  # to notice when it closes its end

    def close(self) -> None:
        self._transport.close()

    def pause_writing(self) -> None:
        self._full = True
        self._go_on()

    def resume_writing(self) -> None:
        self._full = False
        self._go_on()

    def eof_received(self) -> bool:
        return False  # close

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self._pending.clear()
        self._control.open.discard(self)
        self._connection.close()
