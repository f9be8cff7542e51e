"""One data connection: Fetch and Store, whose bytes go straight from and to the pool.

    client: Hello            worker: Welcome, or an Error and the end
    client: Fetch            worker: Fetched ‖ items ‖ Verdict
    client: Store ‖ items    worker: Verdict

Items follow one another without gaps, chunk by chunk and part by part. A fetched item is the whole
extent, or with `ranges` its prologue and then the ranges; one that is not served (outcome MISS or
CORRUPT) is zeros, so that its place does not depend on the others. A stored item is the whole
extent. An Error instead of an answer leaves the connection usable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, ProtocolError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome
from kvpool.store.caller import Caller
from kvpool.store.poolmap import PartShape, PoolMap, Spaces
from kvpool.transfer.copying import Bytes
from kvpool.transfer.stream import Stream

HELLO_S = 10.0
IDLE_S = 3600.0
"""A client that asks nothing for so long has to dial again."""
STALL_S = 30.0
"""Longest time for one frame or batch; then the peer counts as gone."""
BATCH_BYTES = 4 << 20
"""Moved between two looks at the clock."""

_ZEROS = np.zeros(1 << 20, np.uint8)

Ranges = list[tuple[int, int]]
Item = tuple[Outcome, list[Bytes]]
"""What becomes of one (chunk, part), and the bytes that are sent for it."""


class DataConnection:
    """Serves `stream` in the calling thread. `secret` marks this worker at the daemon."""

    def __init__(
        self, stream: Stream, daemon: str, secret: bytes, pool: PoolMap, spaces: Spaces
    ) -> None:
        self._stream = stream
        self._daemon_address = daemon
        self._secret = secret
        self._pool = pool
        self._spaces = spaces
        self._daemon: Caller

    def serve(self) -> None:
        """Until the peer or the daemon goes; raises what ended it."""
        try:
            self._daemon = self._greet()
        except KvpoolError as error:
            if self._stream.broken is None:
                self._answer(0, protocol.error_body(error))
            raise
        # Closing this gives back what the client holds; no byte moves any more by then.
        with self._daemon:
            while True:
                body = self._stream.receive(deadline=STALL_S, idle=IDLE_S)
                if body:
                    self._handle(protocol.parse_request(body))
                else:
                    self._stream.send(b"", deadline=STALL_S)

    def _greet(self) -> Caller:
        hello = self._stream.receive(deadline=HELLO_S, limit=protocol.HELLO_MAX)
        request = protocol.parse_request(hello)
        if not request.HasField("hello"):
            raise ProtocolError("the first message must be Hello")
        request.hello.worker = self._secret
        daemon = Caller(self._daemon_address, request.hello)
        welcome = wire.Welcome.FromString(daemon.welcome.SerializeToString())
        welcome.mapped = False  # that is this worker's right, not the client's
        welcome.attach_address = ""
        self._answer(request.id, welcome)
        return daemon

    def _handle(self, request: wire.Request) -> None:
        try:
            if request.HasField("fetch"):
                self._fetch(request.id, request.fetch)
            elif request.HasField("store"):
                self._store(request.id, request.store)
            else:
                raise InvalidError("a data connection serves only Fetch and Store")
        except KvpoolError as error:
            if self._stream.broken is not None or self._daemon.stream.broken is not None:
                raise
            self._answer(request.id, protocol.error_body(error))

    def _answer(self, request_id: int, body: Message) -> None:
        self._stream.send(protocol.response_body(request_id, body), deadline=STALL_S)

    # ---- fetch

    def _fetch(self, request_id: int, fetch: wire.Fetch) -> None:
        parts = self._spaces.parts(self._daemon, fetch.namespace, fetch.parts)
        ranges = [_ranges(part, fetch.ranges) for part in parts]
        asked = time.monotonic()
        matched = self._match(fetch)
        try:
            last = min(fetch.last or matched.hits, matched.hits)
            first = min(fetch.first, last)
            extents = _columns(matched.extents, matched.hits, len(parts))[first:last, :, 0]
            keys = fetch.keys[first * KEY_BYTES : last * KEY_BYTES]
            # Found before the first word, because an Error could not be told amid raw bytes.
            items = self._items(parts, ranges, extents.tolist(), keys)
            fetched = wire.Fetched(
                hits=matched.hits,
                miss_outcome=matched.miss_outcome,
                miss_reason=matched.miss_reason,
                nbytes=sum(piece.size for _, pieces in items for piece in pieces),
            )
            self._answer(request_id, fetched)
            outcomes = self._send_items(items, asked + matched.lease_ms / 1000)
            self._answer(request_id, wire.Verdict(outcomes=outcomes))
        finally:
            if matched.lease and self._daemon.stream.broken is None:
                self._daemon.notify(wire.Release(leases=matched.lease))

    def _match(self, fetch: wire.Fetch) -> wire.Matched:
        if fetch.lease:
            answer = self._daemon.call(wire.Adopt(lease=fetch.lease, parts=fetch.parts))
        else:
            match = wire.Match(namespace=fetch.namespace, keys=fetch.keys, parts=fetch.parts)
            answer = self._daemon.call(match)
        assert isinstance(answer, wire.Matched)
        return answer

    def _items(
        self,
        parts: Sequence[PartShape],
        ranges: Sequence[Ranges],
        addresses: Sequence[Sequence[int]],
        keys: bytes,
    ) -> list[Item]:
        items = []
        for chunk, row in enumerate(addresses):
            key = keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES] or None
            for part, wanted, address in zip(parts, ranges, row, strict=True):
                items.append(self._item(part, wanted, address, key))
        return items

    def _item(self, part: PartShape, ranges: Ranges, address: int, key: bytes | None) -> Item:
        outcome = Outcome.MISS
        if address >= 0:
            extent = self._pool.view(address, part.extent_bytes)
            # A lease may be of another namespace than the client says: its extents end elsewhere.
            if part.is_header_of(extent, key):
                wanted = [extent[offset : offset + nbytes] for offset, nbytes in ranges]
                return Outcome.HIT, [piece for view in wanted for piece in _pieces(view)]
            outcome = Outcome.CORRUPT
        return outcome, [piece for _, nbytes in ranges for piece in _zeros(nbytes)]

    def _send_items(self, items: Sequence[Item], until: float) -> bytes:
        """Sends in batches; what left after `until` (monotonic clock) is EXPIRED."""
        outcomes = bytearray()
        batch: list[Bytes] = []
        waiting = judged = 0
        for outcome, pieces in items:
            for piece in pieces:
                batch.append(piece)
                waiting += piece.size
                if waiting >= BATCH_BYTES:
                    judged = self._send_batch(batch, outcomes, judged, until)
                    batch, waiting = [], 0
            outcomes.append(outcome)
        self._send_batch(batch, outcomes, judged, until)
        return bytes(outcomes)

    def _send_batch(
        self, batch: Sequence[Bytes], outcomes: bytearray, judged: int, until: float
    ) -> int:
        """Sends, and judges the outcomes from number `judged` on; returns how many are judged."""
        self._stream.send_buffers(batch, deadline=STALL_S)
        if time.monotonic() > until:
            late = outcomes[judged:].replace(bytes([Outcome.HIT]), bytes([Outcome.EXPIRED]))
            outcomes[judged:] = late
        return len(outcomes)

    # ---- store

    def _store(self, request_id: int, store: wire.Store) -> None:
        left = store.nbytes
        try:
            parts = self._spaces.parts(self._daemon, store.namespace, store.parts)
            chunks = len(store.keys) // KEY_BYTES
            expected = chunks * sum(part.extent_bytes for part in parts)
            if left != expected:
                raise InvalidError(f"{left} bytes were announced for items of {expected}")
            reserve = wire.Reserve(
                namespace=store.namespace, parent=store.parent, keys=store.keys, parts=store.parts
            )
            reserved = self._daemon.call(reserve)
        except KvpoolError:
            self._skip(left)
            raise
        assert isinstance(reserved, wire.Reserved)
        outcomes = bytearray(reserved.outcomes)
        try:
            good = self._receive_items(parts, store.keys, reserved, outcomes)
        except KvpoolError:
            self._stream.abort()  # nobody knows any more where the next frame begins
            raise
        self._commit(reserved.lease, outcomes, good)
        self._answer(request_id, wire.Verdict(outcomes=bytes(outcomes), text=reserved.text))

    def _receive_items(
        self,
        parts: Sequence[PartShape],
        keys: bytes,
        reserved: wire.Reserved,
        outcomes: bytearray,
    ) -> list[int]:
        """Fills the reserved extents; returns the items whose headers are right."""
        extents = _columns(reserved.extents, len(keys) // KEY_BYTES, len(parts)).reshape(-1, 2)
        good: list[int] = []
        renew_at = time.monotonic() + reserved.lease_ms / 2000
        for number, (address, generation) in enumerate(extents.tolist()):
            chunk, column = divmod(number, len(parts))
            part = parts[column]
            if outcomes[number] != Outcome.OK:
                self._skip(part.extent_bytes)
                continue
            extent = self._pool.view(address, part.extent_bytes)
            for piece in _pieces(extent):
                self._stream.receive_into([piece], deadline=STALL_S)
            if part.stamp(extent, keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES], generation):
                good.append(number)
            else:
                outcomes[number] = Outcome.INVALID
            if time.monotonic() > renew_at:  # a steady writer over a slow link is not overdue
                self._daemon.call(wire.Touch(lease=reserved.lease))
                renew_at = time.monotonic() + reserved.lease_ms / 2000
        return good

    def _commit(self, lease: bytes, outcomes: bytearray, good: Sequence[int]) -> None:
        try:
            if good:
                items = np.array(good, "<u4").tobytes()
                verdict = self._daemon.call(wire.Commit(lease=lease, items=items))
                assert isinstance(verdict, wire.Verdict)
                for number, outcome in zip(good, verdict.outcomes, strict=True):
                    outcomes[number] = outcome
        finally:
            # What was not committed goes back; the lease may have ended with its last item.
            if lease and self._daemon.stream.broken is None:
                self._daemon.notify(wire.Abort(lease=lease))

    def _skip(self, nbytes: int) -> None:
        """Receives bytes that nobody wants, so that the next frame is found."""
        scratch = np.empty(min(nbytes, _ZEROS.size), np.uint8)
        while nbytes:
            piece = scratch[:nbytes]
            self._stream.receive_into([piece], deadline=STALL_S)
            nbytes -= piece.size


def _columns(packed: bytes, chunks: int, parts: int) -> npt.NDArray[np.int64]:
    """Addresses and generations, (chunks, parts, 2). Raises `InvalidError`."""
    extents = np.frombuffer(packed, "<i8")
    if extents.size != 2 * chunks * parts:
        raise InvalidError(
            f"the lease has {extents.size // 2} items, not {chunks} of {parts} parts"
        )
    return extents.reshape(chunks, parts, 2)


def _ranges(part: PartShape, packed: bytes) -> Ranges:
    """(offset, nbytes) of what is sent of an extent of `part`. Raises `InvalidError`."""
    if not packed:
        return [(0, part.extent_bytes)]
    if len(packed) % 16:
        raise InvalidError(f"{len(packed)} bytes of ranges are no pairs of uint64")
    pairs = [(int(a), int(b)) for a, b in np.frombuffer(packed, "<u8").reshape(-1, 2)]
    for offset, nbytes in pairs:
        if offset + nbytes > part.extent_bytes:
            raise InvalidError(
                f"bytes {offset} to {offset + nbytes} leave an extent of {part.extent_bytes}"
            )
    return [(0, part.prologue_bytes), *pairs]


def _pieces(view: Bytes) -> list[Bytes]:
    """`view` in pieces that a slow but living peer can take in time."""
    return [view[at : at + BATCH_BYTES] for at in range(0, view.size, BATCH_BYTES)]


def _zeros(nbytes: int) -> list[Bytes]:
    whole, rest = divmod(nbytes, _ZEROS.size)
    return [_ZEROS] * whole + ([_ZEROS[:rest]] if rest else [])
