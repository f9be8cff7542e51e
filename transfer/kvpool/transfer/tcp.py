"""Transfers between hosts: the owner's threads serve its regions over blocking sockets.

    connection = hello ‖ exchange …
    hello      = frame("KVTX" ‖ version u8 ‖ token[16]), answered by frame(verdict u8), 0 = welcome
    exchange   = frame(operation u8 ‖ seconds left f64 ‖ items) ‖ for a write: the items' bytes
    items      = n × (region u32 ‖ generation u64 ‖ offset u64 ‖ nbytes u64 ‖ skip u64 ‖ take u64)
    answer     = to a read:  frame(status u8[n]) ‖ bytes of the items with OK ‖ frame(status u8[n])
                 to a write: frame(status u8[n])

Of each item this connection carries the `take` bytes behind the first `skip`: a large item is cut
in two for two connections, but is always judged as a whole.

(Frame lengths are big-endian, all else little-endian.) The second frame of a read is the verdict:
the owner's validator looks at each item *after* its bytes were sent, so that memory that has been
given to somebody else meanwhile is never taken for the item. A batch costs one round trip.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.proto.errors import (
    DeadlineError,
    DeniedError,
    KvpoolError,
    ProtocolError,
    StaleError,
    UnreachableError,
)
from kvpool.transfer.base import (
    Buffer,
    Capabilities,
    Cost,
    EndpointState,
    Item,
    Locality,
    MemoryKind,
    Region,
    Status,
    Transfer,
    check_batch,
    decode_descriptor,
    encode_descriptor,
)
from kvpool.transfer.copying import Bytes, as_bytes
from kvpool.transfer.meter import Meter
from kvpool.transfer.regions import RegionTable
from kvpool.transfer.sockets import address_of, listen
from kvpool.transfer.stream import Stream, dial
from kvpool.transfer.transfers import Pending

Check = Callable[[Item], bool]
"""Whether an item is still what it was."""

MAX_BATCH = 1 << 16
CONNECTIONS = 4
"""Most connections of one endpoint, each with a thread; large batches occupy two."""

TWO_FROM = 2 << 20
"""Bytes of a batch from which two connections are faster than one."""

HELLO_DEADLINE_S = 5.0
IDLE_S = 60.0
"""Seconds after which an owner's thread looks around; an idle connection stays open."""

EXCHANGE_MAX_S = 60.0
"""Longest deadline of one exchange that an owner grants; it holds the regions meanwhile."""

SCRATCH = 1 << 20

_log = logging.getLogger(__name__)
_READ, _WRITE = 0, 1
_WELCOME, _DENIED = b"\0", b"\1"
_HELLO = struct.Struct("<4sB16s")
_MAGIC, _VERSION = b"KVTX", 1
_REQUEST = struct.Struct("<Bd")
_WIRE_ITEM = np.dtype(
    [
        ("region", "<u4"),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("skip", "<u8"),
        ("take", "<u8"),
    ]
)

_CAPABILITIES = Capabilities(
    kinds=frozenset({MemoryKind.DRAM}),
    localities=frozenset({Locality.SAME_PROCESS, Locality.SAME_HOST, Locality.REMOTE}),
    one_sided=False,
    writes=True,
    detects_peer_death=True,
    spins=False,
    alignment=1,
    max_batch=MAX_BATCH,
)


class TcpTransport:
    """Owner side: listens as soon as something is registered. Peer side: connects."""

    name = "tcp"

    def __init__(
        self, address: str = "tcp://127.0.0.1:0", check: Check = lambda item: True
    ) -> None:
        """An owner listens on `address` and asks `check` (from several threads) for verdicts.

        Whoever knows the descriptor may read and write: the bytes are neither encrypted nor
        authenticated, so an address beyond loopback needs a network that can be trusted.
        """
        self._pid = os.getpid()
        self._address = address
        self._check = check
        self._lock = threading.Lock()
        self._regions = RegionTable()
        self._server: _Server | None = None
        self._endpoints: list[TcpEndpoint] = []

    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def register(self, buffer: Buffer) -> Region:
        """Raises as `sockets.listen` too: the first region opens the listener."""
        self._serve()
        return self._regions.register(buffer)

    def deregister(self, region: Region) -> None:
        """Waits for exchanges that use it, at most `EXCHANGE_MAX_S` seconds."""
        self._regions.deregister(region)

    def descriptor(self) -> bytes:
        server = self._serve()
        return encode_descriptor(self.name, address=server.address, token=server.token.hex())

    def connect(self, descriptor: bytes) -> TcpEndpoint:
        """Raises `DeniedError` too, if the owner knows another token."""
        address, token = decode_descriptor(descriptor, self.name, "address", "token")
        try:
            endpoint = TcpEndpoint(address, bytes.fromhex(token))
        except ValueError as error:
            raise ProtocolError("the token of the descriptor is not hexadecimal") from error
        self._endpoints = [e for e in self._endpoints if e.state is not EndpointState.CLOSED]
        self._endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork child has nothing of it, and must not end what its parent serves
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _serve(self) -> _Server:
        with self._lock:
            if self._server is None:
                self._server = _Server(self._address, self._regions, self._check)
            return self._server


class _Server:
    """The owner's listener and one thread per connection."""

    def __init__(self, address: str, regions: RegionTable, check: Check) -> None:
        self._regions = regions
        self._check = check
        self._listener = listen(address)
        self.address = address_of(self._listener)
        self.token = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._connections: dict[Stream, threading.Thread] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kvpool-tcp", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        # On Linux this ends the `accept` of the thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for stream, thread in connections.items():
            stream.abort()
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            stream = Stream(sock)
            thread = threading.Thread(
                target=self._serve, args=(stream,), name="kvpool-tcp-peer", daemon=True
            )
            with self._lock:
                if self._closed:
                    stream.close()
                    return
                self._connections[stream] = thread
                thread.start()

    def _serve(self, stream: Stream) -> None:
        try:
            # Whatever a peer does wrong ends its own connection only; it sees the end.
            with stream, contextlib.suppress(KvpoolError):
                self._welcome(stream)
                while True:
                    request = self._next_request(stream)
                    _Exchange(stream, request, self._regions, self._check).run()
        finally:
            with self._lock:
                self._connections.pop(stream, None)

    def _next_request(self, stream: Stream) -> bytes:
        while True:
            try:
                return stream.receive(deadline=HELLO_DEADLINE_S, idle=IDLE_S)
            except DeadlineError:
                if stream.broken:
                    raise

    def _welcome(self, stream: Stream) -> None:
        hello = stream.receive(deadline=HELLO_DEADLINE_S)
        if len(hello) != _HELLO.size:
            raise ProtocolError("not a hello")
        magic, version, token = _HELLO.unpack(hello)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError("not a hello of this version")
        known = hmac.compare_digest(token, self.token)
        stream.send(_WELCOME if known else _DENIED, deadline=HELLO_DEADLINE_S)
        if not known:
            raise DeniedError("unknown token")


class _Exchange:
    """One request on the owner's side. Its regions are held until the last byte and verdict."""

    def __init__(self, stream: Stream, request: bytes, regions: RegionTable, check: Check) -> None:
        """Raises `ProtocolError`."""
        if (len(request) - _REQUEST.size) % _WIRE_ITEM.itemsize or len(request) < _REQUEST.size:
            raise ProtocolError("a request of a wrong length")
        self._operation, seconds = _REQUEST.unpack_from(request)
        if self._operation not in (_READ, _WRITE) or not seconds >= 0:
            raise ProtocolError("an unknown operation or a wrong deadline")
        self._end: float = time.monotonic() + min(seconds, EXCHANGE_MAX_S)
        rows = np.frombuffer(request, _WIRE_ITEM, offset=_REQUEST.size).tolist()
        self._items = [Item(*row[:4]) for row in rows]
        self._cuts = [slice(skip, skip + take) for *_, skip, take in rows]
        if any(cut.stop > item.nbytes for item, cut in zip(self._items, self._cuts, strict=True)):
            raise ProtocolError("a piece that leaves its item")
        self._stream = stream
        self._regions = regions
        self._check = check

    def run(self) -> None:
        """Raises whatever the stream raises."""
        with contextlib.ExitStack() as held:
            writes = self._operation == _WRITE
            verdicts = [
                held.enter_context(self._regions.using(item, item.nbytes, writes))
                for item in self._items
            ]
            statuses = [status for status, _ in verdicts]
            memory = [view[cut] for (_, view), cut in zip(verdicts, self._cuts, strict=True)]
            if writes:
                self._write(statuses, memory)
            else:
                self._read(statuses, memory)

    def _read(self, statuses: list[Status], memory: list[Bytes]) -> None:
        self._stream.send(bytes(statuses), memory, deadline=self._left())
        self._stream.send(bytes(self._judged(statuses)), deadline=self._left())

    def _write(self, statuses: list[Status], memory: list[Bytes]) -> None:
        statuses = self._judged(statuses)
        scratch = np.empty(SCRATCH, np.uint8)
        for cut, status, view in zip(self._cuts, statuses, memory, strict=True):
            if status is Status.OK:
                self._stream.receive_into([view], deadline=self._left())
                continue
            for at in range(cut.start, cut.stop, SCRATCH):
                piece = scratch[: min(SCRATCH, cut.stop - at)]
                self._stream.receive_into([piece], deadline=self._left())
        self._stream.send(bytes(statuses), deadline=self._left())

    def _judged(self, statuses: list[Status]) -> list[Status]:
        return [
            Status.REJECTED if status is Status.OK and not self._check(item) else status
            for item, status in zip(self._items, statuses, strict=True)
        ]

    def _left(self) -> float:
        return self._end - time.monotonic()


class _Piece(NamedTuple):
    """What one connection carries of the batch's item `number`."""

    number: int
    item: Item
    skip: int
    """Bytes of the item before the piece."""
    local: Bytes


class TcpEndpoint:
    """A few connections to one owner. Transfers run on the endpoint's own threads."""

    def __init__(self, address: str, token: bytes) -> None:
        """Raises `UnreachableError`, `DeadlineError` and `DeniedError`."""
        self._address = address
        self._token = token
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._state = EndpointState.OPEN
        self._idle = [self._dial(HELLO_DEADLINE_S)]
        self._batches: set[_Batch] = set()
        self._meter = Meter(latency_s=100e-6, bytes_per_s=3e9, cpu_s_per_byte=4e-10)
        self._threads = concurrent.futures.ThreadPoolExecutor(CONNECTIONS, "kvpool-tcp")

    def read(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._start(items, buffers, deadline, _READ)

    def write(self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float) -> Transfer:
        return self._start(items, buffers, deadline, _WRITE)

    def estimate(self, nbytes: int) -> Cost:
        return self._meter.estimate(nbytes)

    @property
    def state(self) -> EndpointState:
        return self._state

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._state = EndpointState.CLOSED
            batches = list(self._batches)
            idle, self._idle = self._idle, []
        for batch in batches:
            batch.pending.cancel()
        self._threads.shutdown()
        for stream in idle:
            stream.close()

    def borrow_stream(self, seconds: float) -> Stream:
        """A connection, dialled if none is idle. Raises as the constructor."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            if stream is None:
                return self._dial(seconds)
            if _is_quiet(stream):
                return stream
            stream.close()

    def give_back(self, stream: Stream, whole: bool) -> None:
        """Keep a connection whose exchange was `whole`, close any other."""
        with self._lock:
            keep = whole and self._state is not EndpointState.CLOSED
            if self._state is not EndpointState.CLOSED:
                self._state = EndpointState.OPEN if whole else EndpointState.BROKEN
            if keep:
                self._idle.append(stream)
        if not keep:
            stream.close()

    def finished(self, batch: _Batch, seconds: float | None) -> None:
        """Called once per batch; `seconds` if all of it went well."""
        if seconds is not None:
            self._meter.observe(batch.nbytes, seconds)
        with self._lock:
            self._batches.discard(batch)

    def _start(
        self, items: Sequence[Item], buffers: Sequence[Buffer], deadline: float, operation: int
    ) -> Transfer:
        if os.getpid() != self._pid:
            raise StaleError("the endpoint was opened before fork(); connect again in this process")
        check_batch(items, buffers, MAX_BATCH)
        views = [as_bytes(buffer, writable=operation == _READ) for buffer in buffers]
        batch = _Batch(self, operation, items, views, deadline)
        with self._lock:
            if self._state is EndpointState.CLOSED:
                raise UnreachableError("the endpoint is closed")
            self._batches.add(batch)
            for pieces in batch.parts:
                self._threads.submit(batch.run, pieces)
        return batch.pending

    def _dial(self, seconds: float) -> Stream:
        end = time.monotonic() + seconds
        stream = dial(self._address, seconds)
        try:
            stream.send(_HELLO.pack(_MAGIC, _VERSION, self._token), deadline=end - time.monotonic())
            if stream.receive(deadline=end - time.monotonic()) != _WELCOME:
                raise DeniedError(f"{self._address} does not know the descriptor's token")
        except KvpoolError:
            stream.close()
            raise
        return stream


class _Batch:
    """One `read` or `write`, carried by one or two connections."""

    def __init__(
        self,
        endpoint: TcpEndpoint,
        operation: int,
        items: Sequence[Item],
        views: Sequence[Bytes],
        deadline: float,
    ) -> None:
        self.pending = Pending(self._abort)
        self.nbytes = sum(view.size for view in views)
        self._endpoint = endpoint
        self._operation = operation
        self._started = time.monotonic()
        self._end = self._started + deadline
        self._statuses = [
            _local_verdict(item, view) for item, view in zip(items, views, strict=True)
        ]
        pieces = [
            _Piece(index, items[index], 0, views[index])
            for index, status in enumerate(self._statuses)
            if status is Status.OK
        ]
        self.parts = _halves(pieces) if self.nbytes >= TWO_FROM else [pieces]
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._running = len(self.parts)

    def run(self, pieces: list[_Piece]) -> None:
        """Carry one part, on a thread of the endpoint."""
        verdicts = [Status.FAILED] * len(pieces)
        try:
            if pieces:
                verdicts = self._carry(pieces)
        except Exception:
            _log.exception("a transfer failed in a way that nobody expected")
        self._settle(pieces, verdicts)

    def _settle(self, pieces: list[_Piece], verdicts: list[Status]) -> None:
        with self._lock:
            for piece, verdict in zip(pieces, verdicts, strict=True):
                if self._statuses[piece.number] is Status.OK:
                    self._statuses[piece.number] = verdict
            self._running -= 1
            last = not self._running
        if last:
            well = all(status is Status.OK for status in self._statuses)
            self._endpoint.finished(self, time.monotonic() - self._started if well else None)
            self.pending.finish(self._statuses)

    def _carry(self, pieces: list[_Piece]) -> list[Status]:
        """A verdict per piece; never raises for what a peer or the network does."""
        try:
            stream = self._endpoint.borrow_stream(self._left())
        except KvpoolError as error:
            return [self._failure(error)] * len(pieces)
        with self._lock:
            self._streams.add(stream)
        whole = False
        try:
            # Looked at after the stream can be found by `_abort`: one of the two sees the other.
            if self.pending.cancelled:
                raise UnreachableError("cancelled")
            verdicts = self._exchange(stream, pieces)
            whole = True
            return verdicts
        except KvpoolError as error:
            return [self._failure(error)] * len(pieces)
        finally:
            with self._lock:
                self._streams.discard(stream)
            self._endpoint.give_back(stream, whole)

    def _exchange(self, stream: Stream, pieces: list[_Piece]) -> list[Status]:
        rows = np.array([(*p.item, p.skip, p.local.size) for p in pieces], _WIRE_ITEM)
        request = _REQUEST.pack(self._operation, self._left()) + rows.tobytes()
        if self._operation == _WRITE:
            stream.send(request, [piece.local for piece in pieces], deadline=self._left())
            return _statuses(stream.receive(deadline=self._left()), len(pieces))
        stream.send(request, deadline=self._left())
        offered = _statuses(stream.receive(deadline=self._left()), len(pieces))
        coming = [p.local for p, status in zip(pieces, offered, strict=True) if status is Status.OK]
        stream.receive_into(coming, deadline=self._left())
        judged = _statuses(stream.receive(deadline=self._left()), len(pieces))
        return [
            verdict if offer is Status.OK else offer
            for offer, verdict in zip(offered, judged, strict=True)
        ]

    def _failure(self, error: KvpoolError) -> Status:
        if self.pending.cancelled:
            return Status.CANCELLED
        return Status.DEADLINE if isinstance(error, DeadlineError) else Status.UNREACHABLE

    def _abort(self) -> None:
        with self._lock:
            for stream in self._streams:
                stream.abort()

    def _left(self) -> float:
        return self._end - time.monotonic()


def _local_verdict(item: Item, local: Bytes) -> Status:
    """What can be said without asking, about items that do not fit into a request above all."""
    if item.nbytes != local.size:
        return Status.LENGTH
    if not 0 <= item.region < 1 << 32:
        return Status.UNKNOWN_REGION
    if not 0 <= item.generation < 1 << 64:
        return Status.STALE
    return Status.OK if 0 <= item.offset < 1 << 64 else Status.OUT_OF_RANGE


def _halves(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Two lists of about as many bytes; the item in the middle is cut."""
    left, right = [], []
    room = sum(piece.local.size for piece in pieces) // 2
    for piece in pieces:
        nbytes = piece.local.size
        if nbytes <= room:
            left.append(piece)
        elif room <= 0:
            right.append(piece)
        else:
            left.append(piece._replace(local=piece.local[:room]))
            right.append(piece._replace(skip=room, local=piece.local[room:]))
        room -= nbytes
    return [left, right]


def _statuses(body: bytes, count: int) -> list[Status]:
    """Raises `ProtocolError`."""
    if len(body) != count:
        raise ProtocolError(f"{len(body)} statuses for {count} items")
    try:
        return [Status(number) for number in body]
    except ValueError as error:
        raise ProtocolError(f"an unknown status: {error}") from error


def _is_quiet(stream: Stream) -> bool:
    """Whether an idle connection is still open and nothing unasked for has come."""
    try:
        stream.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
