"""Bytes over a stream, for sessions that do not map the store's memory (remote, other domains).

Fetch and Store take one round trip on a data connection of their own; see `wire.proto`. A fetch of
`TWO_FROM` bytes or more runs over two connections, which is what loopback TCP needs for full speed.
It is cut into batches, so that what has arrived before a failure is delivered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvpool.client.pacing import left, raise_error
from kvpool.client.selection import Selection, landing
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import DeadlineError, ProtocolError, UnreachableError
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes
from kvpool.transfer.stream import Stream, dial

if TYPE_CHECKING:
    from kvpool.client.pulling import Pulling

T = TypeVar("T")

TWO_FROM = 2 << 20
BATCH_BYTES = 64 << 20
"""Of one Fetch, unless a single chunk is larger."""
IDLE_MAX = 4
"""Connections kept for reuse."""


class DataLink:
    """Data connections to one worker. Thread-safe: each transfer has connections of its own."""

    def __init__(self, address: str, hello: wire.Hello) -> None:
        self._address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._idle: list[_DataConnection] = []
        self._closed = False
        self.lost = False
        """Nobody listens there any more: only a new Welcome tells where to go."""

    def fetch(self, request: wire.Fetch, job: Pulling, end: float) -> None:
        """Fills the targets and outcomes of `job`; `request` names namespace, lease and part.

        Raises `UnreachableError`; chunks that have their outcome by then are delivered.
        """
        total = sum(selection.nbytes for selection in job.selections)
        batches = _batches(job.selections, min(BATCH_BYTES, max(total // 2, TWO_FROM)))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    with lock:
                        batch = next(batches, None)
                    if batch is None:
                        return
                    self._transfer(partial(_fetch, request, job, *batch, end), end)
            except BaseException as error:
                errors.append(error)

        if total >= TWO_FROM and len(job.selections) > 1:
            helper = threading.Thread(target=work, name="kvpool-fetch")
            helper.start()
            work()
            helper.join()
        else:
            work()
        if errors:
            raise errors[0]

    def store(self, request: wire.Store, pieces: Sequence[Bytes], end: float) -> wire.Verdict:
        """Sends whole extents; the verdict has one outcome per key."""
        verdict = self._transfer(lambda c: c.call(request, end, pieces), end)
        if not isinstance(verdict, wire.Verdict):
            raise ProtocolError("Store was not answered by a Verdict")
        return verdict

    def close(self) -> None:
        """Closes what is idle now, and what is in use when it is done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.stream.close()

    def _transfer(self, function: Callable[[_DataConnection], T], end: float) -> T:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._use(connection, function)
            except DeadlineError:
                raise
            except UnreachableError:
                if connection.heard:
                    raise
                # The worker was started anew since: once more, on a fresh connection.
        try:
            connection = _DataConnection(self._address, self._hello, end)
        except UnreachableError as error:
            self.lost = not isinstance(error, DeadlineError)
            raise
        return self._use(connection, function)

    def _use(self, connection: _DataConnection, function: Callable[[_DataConnection], T]) -> T:
        whole = False
        try:
            result = function(connection)
            whole = True
            return result
        finally:
            with self._lock:
                keep = whole and not self._closed and len(self._idle) < IDLE_MAX
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.stream.close()


class _DataConnection:
    """One stream to the worker, after Hello."""

    def __init__(self, address: str, hello: wire.Hello, end: float) -> None:
        self.stream: Stream = dial(address, left(end))
        self.heard = False
        """Something has come back since the last request was sent."""
        self._session = protocol.ClientSession()
        try:
            self.call(hello, end)
        except BaseException:
            self.stream.close()
            raise

    def call(self, body: Message, end: float, pieces: Sequence[Bytes] = ()) -> Message:
        """Sends `body` and raw bytes; the response. An Error is raised."""
        self.heard = False
        request_id = self._session.number(body)
        self.stream.send(protocol.request_body(request_id, body), pieces, deadline=left(end))
        return self.answer(request_id, end)

    def answer(self, request_id: int, end: float) -> Message:
        """The next response, which must be to `request_id` (0: to any)."""
        answer_id, message, _ = self._session.receive(self.stream.receive(deadline=left(end)))
        self.heard = True
        if request_id and answer_id != request_id:
            raise ProtocolError(f"response {answer_id} came where {request_id} was due")
        response = raise_error(message)
        assert response is not None
        return response


def _batches(selections: Sequence[Selection], nbytes: int) -> Iterator[tuple[int, int]]:
    """Runs of chunks that are cut alike, each of at most `nbytes` (or one chunk)."""
    start = 0
    while start < len(selections):
        most = max(1, nbytes // selections[start].nbytes)
        stop = start + 1
        while (
            stop < len(selections) and stop - start < most and selections[stop] == selections[start]
        ):
            stop += 1
        yield start, stop
        start = stop


def _fetch(
    query: wire.Fetch, job: Pulling, start: int, stop: int, end: float, connection: _DataConnection
) -> None:
    """Chunks [start, stop) of `job`, which are all cut alike."""
    form, selection = job.form, job.selections[start]
    request = wire.Fetch()
    request.CopyFrom(query)
    request.first, request.last = job.first + start, job.first + stop
    ranges = [(form.prologue + offset, nbytes) for _, offset, nbytes in selection.pieces]
    request.ranges = np.array(_merged(ranges), "<u8").tobytes()
    heads = np.empty((stop - start, form.prologue), np.uint8)
    landings: list[Bytes] = []
    for i in range(start, stop):
        target = job.targets[i]
        # In one buffer the pieces lie packed, as they come.
        landings += [
            heads[i - start],
            *(target if len(target) == 1 else landing(selection, target)),
        ]
    fetched = connection.call(request, end)
    if not isinstance(fetched, wire.Fetched):
        raise ProtocolError("Fetch was not answered by Fetched")
    if not fetched.nbytes:
        connection.answer(0, end)
        job.outcomes[start:stop] = Outcome(fetched.miss_outcome) or Outcome.MISS
        return
    if fetched.nbytes != sum(view.size for view in landings):
        raise ProtocolError(f"{fetched.nbytes} bytes are sent for {stop - start} chunks")
    connection.stream.receive_into(landings, deadline=left(end))
    verdict = connection.answer(0, end)
    if not isinstance(verdict, wire.Verdict) or len(verdict.outcomes) != stop - start:
        raise ProtocolError("the bytes were not followed by a Verdict on each chunk")
    for i, outcome in enumerate(verdict.outcomes, start):
        job.landed(i, heads[i - start], outcome)


def _merged(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours that touch, in one range."""
    out: list[tuple[int, int]] = []
    for offset, nbytes in pieces:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((offset, nbytes))
    return out
