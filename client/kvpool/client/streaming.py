"""Bytes over a stream, for sessions that do not map the store's memory (remote, other domains).

Fetch and Store take one round trip on a data connection of their own; see `wire.proto`. From
`TWO_FROM` bytes on a fetch runs over two connections, which is what loopback TCP needs for full
speed. A transfer that fails part-way delivers nothing: its chunks are not HIT.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from kvpool.client.extents import Destination, PartFormat, Selection, landing
from kvpool.client.link import raise_error
from kvpool.client.results import Match
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import KvpoolError, ProtocolError, UnreachableError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes
from kvpool.transfer.stream import Stream, dial

TWO_FROM = 2 << 20
IDLE_MAX = 4
"""Connections kept for reuse."""
DEADLINE_S = 60.0
"""For one whole transfer; a stalled peer is noticed after `STALL_S`."""
STALL_S = 5.0


class DataLink:
    """Data connections to one worker. Thread-safe: each transfer has connections of its own."""

    def __init__(self, address: str, hello: wire.Hello) -> None:
        self._address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._idle: list[_DataConnection] = []

    def fetch(
        self,
        namespace: int,
        match: Match,
        form: PartFormat,
        first: int,
        selections: Sequence[Selection],
        targets: Sequence[Destination],
        outcomes: Any,
        verify: bool,
    ) -> int:
        """Fills `targets` and `outcomes`; the number of chunks that nothing could verify."""
        total = sum(selection.nbytes for selection in selections)
        middle = len(selections) // 2 if total >= TWO_FROM else 0
        unverified = [0, 0]
        errors: list[BaseException] = []

        def part(slot: int, start: int, stop: int) -> None:
            try:
                request = wire.Fetch(
                    namespace=namespace,
                    lease=match.lease,
                    parts=1 << form.number,
                    first=first + start,
                    last=first + stop,
                )
                reader = _Reader(form, match, first + start, verify)
                unverified[slot] = self._transfer(
                    lambda connection: reader.read(
                        connection,
                        request,
                        selections[start:stop],
                        targets[start:stop],
                        outcomes[start:stop],
                    )
                )
            except BaseException as error:
                errors.append(error)

        helper = threading.Thread(target=part, args=(1, middle, len(selections)))
        if middle:
            helper.start()
            part(0, 0, middle)
            helper.join()
        else:
            part(0, 0, len(selections))
        for error in errors:
            raise error
        return sum(unverified)

    def store(self, request: wire.Store, pieces: Sequence[Bytes]) -> wire.Verdict:
        """Sends whole extents; the verdict has one outcome per key."""
        verdict: wire.Verdict = self._transfer(lambda c: c.call(request, pieces))
        return verdict

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def _transfer(self, function: Callable[[_DataConnection], Any]) -> Any:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is not None:
                try:
                    return function(connection)
                except UnreachableError:
                    if not connection.was_stale:
                        raise
                    connection.close()  # the worker was restarted meanwhile: once more, afresh
                    connection = None
            connection = _DataConnection(self._address, self._hello)
            return function(connection)
        except KvpoolError:
            if connection is not None and connection.stream.broken is None:
                connection.stream.close()
            raise
        finally:
            if connection is not None:
                self._put_back(connection)

    def _put_back(self, connection: _DataConnection) -> None:
        with self._lock:
            if connection.stream.broken is None and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()


class _DataConnection:
    """One stream to the worker, after Hello."""

    def __init__(self, address: str, hello: wire.Hello) -> None:
        self.stream: Stream = dial(address, STALL_S)
        self._session = protocol.ClientSession()
        self.answered = False
        try:
            self.call(hello)
        except BaseException:
            self.stream.close()
            raise
        self.answered = False

    @property
    def was_stale(self) -> bool:
        """The last request died before anything came back."""
        return not self.answered

    def call(self, body: Message, pieces: Sequence[Bytes] = ()) -> Any:
        """Sends `body` and raw bytes; the response. An Error is raised."""
        self.answered = False
        request_id = self._session.number(body)
        self.stream.send(protocol.request_body(request_id, body), pieces, deadline=DEADLINE_S)
        return self.answer(request_id)

    def answer(self, request_id: int = 0) -> Message:
        """The next response; `request_id` 0 takes any."""
        answer_id, message, _ = self._session.receive(self.stream.receive(deadline=STALL_S))
        self.answered = True
        if request_id and answer_id != request_id:
            raise ProtocolError(f"response {answer_id} came where {request_id} was due")
        return raise_error(message)

    def close(self) -> None:
        self.stream.close()


class _Reader:
    """One fetch: ranges asked, bytes landed, chunks verified."""

    def __init__(self, form: PartFormat, match: Match, first: int, verify: bool) -> None:
        self._form = form
        self._match = match
        self._first = first
        self._verify = verify

    def read(
        self,
        connection: _DataConnection,
        request: wire.Fetch,
        selections: Sequence[Selection],
        targets: Sequence[Destination],
        outcomes: Any,
    ) -> int:
        form = self._form
        # Every chunk of one fetch is cut alike except at the ends: groups share one ranges list.
        unverified = 0
        start = 0
        while start < len(selections):
            stop = start + 1
            while stop < len(selections) and selections[stop] == selections[start]:
                stop += 1
            request.first = self._first + start
            request.last = self._first + stop
            selection = selections[start]
            ranges = [(0, form.prologue)]
            ranges += [(form.prologue + offset, nbytes) for _, offset, nbytes in selection.pieces]
            request.ranges = np.array(_merged(ranges[1:], ranges[0]), "<u8").tobytes()
            heads = np.empty((stop - start, form.prologue), np.uint8)
            landings = []
            for i in range(start, stop):
                landings += [heads[i - start], *landing(selection, targets[i])]
            fetched = connection.call(request)
            if fetched.nbytes != sum(view.size for view in landings):
                connection.stream.close()
                outcomes[start:stop] = Outcome(fetched.miss_outcome or Outcome.MISS)
                start = stop
                continue
            connection.stream.receive_into(landings, deadline=DEADLINE_S)
            verdict = connection.answer()
            outcomes[start:stop] = list(verdict.outcomes)  # type: ignore[attr-defined]
            unverified += self._check(
                heads, start, selection, targets[start:stop], outcomes[start:stop]
            )
            start = stop
        return unverified

    def _check(
        self,
        heads: Any,
        start: int,
        selection: Selection,
        targets: Sequence[Destination],
        outcomes: Any,
    ) -> int:
        unverified = 0
        for i, target in enumerate(targets):
            if outcomes[i] != Outcome.HIT:
                continue
            if not self._verify:
                unverified += 1
                continue
            chunk = self._first + start + i
            key = self._match.keys[chunk * 32 : chunk * 32 + 32]
            outcome, verified = self._form.verify_landed(heads[i], key, selection, target)
            outcomes[i] = outcome
            unverified += not verified
        if time.monotonic() >= self._match.deadline:
            outcomes[outcomes == Outcome.HIT] = Outcome.EXPIRED
        return unverified


def _merged(pieces: list[tuple[int, int]], head: tuple[int, int]) -> list[tuple[int, int]]:
    """`head` and `pieces`, neighbours that touch merged into one range."""
    out = [head]
    for offset, nbytes in pieces:
        last_offset, last_nbytes = out[-1]
        if last_offset + last_nbytes == offset:
            out[-1] = (last_offset, last_nbytes + nbytes)
        else:
            out.append((offset, nbytes))
    return out
