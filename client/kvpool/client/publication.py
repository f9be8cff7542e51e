"""A publication in progress: chunks that are reserved, being filled, and then committed.

A chunk's extent lies in the pool, or is staged here for a store whose memory is not mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from google.protobuf.message import Message

from kvpool.client.connection import M
from kvpool.client.effects import Steps
from kvpool.client.extents import PartFormat
from kvpool.client.fields import milliseconds, outcomes_of
from kvpool.client.pacing import left
from kvpool.client.results import Outcomes, outcome_of
from kvpool.client.selection import buffers_for
from kvpool.client.session import Membership, Prompt
from kvpool.client.slots import OPEN, Slot, Slots
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError, KvpoolError, ProtocolError, StaleError
from kvpool.proto.keys import KEY_BYTES, Extra
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes

# Requests are of a few dozen chunks, and each copy empties the caches: plain Python does with less
# code than NumPy here.
_OK = int(Outcome.OK)
_GRANTED, _OPEN = bytes([_OK]), bytes([OPEN])


@dataclass(frozen=True, slots=True)
class Scope:
    """What is published: chunks [first, first + count) of `prompt` (None: all from `first` on),
    one part of each; see `Session.publication`."""

    prompt: Prompt
    first: int = 0
    count: int | None = None
    extras: Sequence[Extra] | None = None
    part: str | None = None
    checksum: bool = True
    lease_s: float = 0.0


class Publishing:
    """One part of chunks [first, first + n) of a prompt, in the membership that it began in.

    Thread-safe: chunks may be written side by side, and `abort` may come at any time.
    """

    def __init__(self, membership: Membership, scope: Scope) -> None:
        self.membership = membership
        self.number = _part_number(membership.identity.namespace, scope.part)
        self.first = scope.first
        self.checksum = scope.checksum
        self.lease_ms = milliseconds(scope.lease_s)
        self.keys = membership.identity.keys(scope.prompt, scope.extras)
        have = len(self.keys) // KEY_BYTES
        count = max(0, have - scope.first) if scope.count is None else scope.count
        if scope.first < 0 or count < 0 or scope.first + count > have:
            raise InvalidError(
                f"chunks [{scope.first}, {scope.first + count}) are not inside the {have} full "
                "chunks of the prompt"
            )
        self.slots = Slots(count, self._give_back)
        self.text = ""
        """What the store said about its lack of room."""
        self.nbytes = 0
        """Payload bytes that were committed."""
        self._tickets: set[int] = set()

    @property
    def outcomes(self) -> Outcomes:
        """One per chunk, `OPEN` while it has none."""
        return self.slots.outcomes

    @property
    def form(self) -> PartFormat:
        return self.membership.identity.formats[self.number]

    @property
    def batch(self) -> int:
        """Chunks that the store takes at a time."""
        return int(self.membership.connection.welcome.reserve_max)

    def key(self, chunk: int) -> bytes:
        """Of chunk `chunk` of this publication; empty before the root."""
        at = self.first + chunk
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] if at >= 0 else b""

    # ---- reserve

    def reserve(self, start: int, stop: int) -> Steps[None]:
        """Room for chunks [start, stop); those without get their outcome."""
        if not self.membership.connection.mapped:
            yield from self._stage(start, stop)
            return
        yield from (yield from self.reserving(start, stop))

    def reserving(self, start: int, stop: int) -> Steps[Steps[None]]:
        """Asks for room, in the pool, for chunks [start, stop); the steps that wait for it."""
        request = wire.Reserve(
            namespace=self.membership.number,
            parent=self.key(start - 1),
            keys=self.keys[(self.first + start) * KEY_BYTES : (self.first + stop) * KEY_BYTES],
            parts=1 << self.number,
            lease_ms=self.lease_ms,
        )
        ticket = yield from self._post(request)
        return self._reserved(start, stop, ticket)

    def _reserved(self, start: int, stop: int, ticket: int) -> Steps[None]:
        reserved = yield from self._answer(ticket, wire.Reserved)
        try:
            yield from self._take(start, stop, reserved)
        except BaseException:
            if reserved.lease:
                self.membership.connection.notify(wire.Abort(lease=reserved.lease))
            raise

    def _post(self, request: Message) -> Steps[int]:
        ticket = yield from self.membership.connection.post(request)
        self._tickets.add(ticket)
        return ticket

    def _answer(self, ticket: int, kind: type[M]) -> Steps[M]:
        self._tickets.discard(ticket)
        return self.membership.connection.answer(ticket, kind)

    def _take(self, start: int, stop: int, reserved: wire.Reserved) -> Steps[None]:
        """Opens a slot for each chunk that was granted."""
        outcomes, extents = reserved.outcomes, reserved.extents
        if len(outcomes) != stop - start or len(extents) != 16 * len(outcomes):
            raise ProtocolError(f"{len(outcomes)} outcomes for {stop - start} chunks to reserve")
        self.text = reserved.text or self.text
        words = struct.unpack(f"<{2 * len(outcomes)}q", extents)
        granted = [item for item, outcome in enumerate(outcomes) if outcome == _OK]
        slots = {}
        if granted:
            highest = max(words[2 * item] for item in granted)
            regions = yield from self.membership.connection.regions(highest, writable=True)
            lease, nbytes = reserved.lease, self.form.extent_bytes
            for item in granted:
                address, generation = words[2 * item : 2 * item + 2]
                slots[start + item] = Slot(lease, item, generation, regions.view(address, nbytes))
        self.outcomes[start:stop] = np.frombuffer(outcomes.replace(_GRANTED, _OPEN), np.uint8)
        self.slots.open(slots)

    def _stage(self, start: int, stop: int) -> Steps[None]:
        """Slots for those of chunks [start, stop) that are not stored yet."""
        yield from self.look(start, stop)
        open_now = [c for c in range(start, stop) if self.outcomes[c] == OPEN]
        self.slots.open({chunk: Slot(b"", chunk, 0, None) for chunk in open_now})

    def look(self, start: int, stop: int) -> Steps[None]:
        """Marks the chunks of [start, stop) that are stored: their bytes need not travel."""
        keys = self.keys[(self.first + start) * KEY_BYTES : (self.first + stop) * KEY_BYTES]
        request = wire.Explain(namespace=self.membership.number, keys=keys)
        told = yield from self.membership.ask(request, wire.Explained)
        parts = np.frombuffer(told.parts, np.uint64)
        if parts.size != stop - start:
            raise ProtocolError(f"{parts.size} of {stop - start} chunks were explained")
        stored = parts >> np.uint64(self.number) & np.uint64(1) != 0
        self.outcomes[start:stop][stored] = Outcome.EXISTS

    # ---- fill

    def wants(self, chunk: int) -> bool:
        """False if the chunk needs no bytes: it exists, or has no room."""
        return chunk in self.slots

    def write(self, chunk: int, payload: object) -> Steps[None]:
        """A whole chunk: one buffer, or one per plane. Raises `InvalidError`, `StaleError`."""
        sources = self.form.sources(payload)
        yield from self._bulk(lambda end: self.fill({chunk: sources}), self.form.payload_bytes)

    def write_layer(self, chunk: int, layer: str, buffer: object) -> Steps[None]:
        """One plane of a chunk. Raises as `write`."""
        plane = self.form.part.plane_index(layer)
        nbytes = self.form.part.planes[plane].nbytes
        (source,) = buffers_for(buffer, [nbytes], writable=False)
        yield from self._bulk(lambda end: self._fill_plane(chunk, plane, source), nbytes)

    def _bulk(self, function: Callable[[float], None], nbytes: int) -> Steps[None]:
        """Runs a copy; if the connection was lost, so are all chunks that are still open."""
        try:
            yield from self.membership.connection.bulk(function, nbytes)
        except StaleError:
            self.slots.give_up(Outcome.STALE_EPOCH)

    def fill(self, sources: Mapping[int, list[Bytes]], end: float = float("inf")) -> None:
        """Writes those of these chunks that have a slot. Blocks, and stops with `DeadlineError`
        at `end`. REQUIRES: inside `Connection.bulk`."""
        form = self.form
        with self.slots.writing(sources) as slots:
            chunks = [
                (slot, self._extent(slot), self.key(chunk), sources[chunk])
                for chunk, slot in slots.items()
            ]
            sums = []
            # As little as possible beside the copies: each of them empties the caches.
            for _, extent, key, payload in chunks:
                left(end)
                sums.append(form.write_payload(extent, key, payload, self.checksum))
            for (slot, extent, key, _), of_planes in zip(chunks, sums, strict=True):
                form.write_head(extent, key, slot.generation, of_planes)
                slot.whole = True

    def _fill_plane(self, chunk: int, plane: int, source: Bytes) -> None:
        with self.slots.writing([chunk]) as slots:
            if not slots:
                return
            slot = slots[chunk]
            form, extent = self.form, self._extent(slot)
            slot.sums[plane] = form.write_plane(
                extent, self.key(chunk), plane, source, self.checksum
            )
            if len(slot.sums) == form.planes:
                sums = [slot.sums[i] for i in range(form.planes)] if self.checksum else None
                form.write_head(extent, self.key(chunk), slot.generation, sums)
                slot.whole = True

    def _extent(self, slot: Slot) -> Bytes:
        if slot.extent is None:
            slot.extent = np.empty(self.form.extent_bytes, np.uint8)
        return slot.extent

    # ---- commit

    def commit(self) -> Steps[Outcomes]:
        """Makes all complete chunks visible, in chain order; the outcomes of all so far."""
        if self.membership.connection.mapped:
            yield from (yield from self.committing())
            return self.outcomes
        ready = self.slots.whole()
        extents = {chunk: [self._extent(slot)] for chunk, slot in ready.items()}
        try:
            yield from self.stream(list(ready), extents)
        except KvpoolError as error:
            self._lose(ready, error)
        return self.outcomes

    def committing(self) -> Steps[Steps[None]]:
        """Asks that all complete chunks, in the pool, become visible, in chain order; the steps
        that wait for the verdicts."""
        ready = self.slots.whole()
        asked: list[tuple[int, dict[int, Slot]]] = []
        for lease in dict.fromkeys(slot.lease for slot in ready.values()):
            slots = {c: s for c, s in ready.items() if s.lease == lease}
            items = _packed(slots.values())
            try:
                if not self.membership.connection.alive:
                    raise StaleError("the connection was lost")
                ticket = yield from self._post(wire.Commit(lease=lease, items=items))
            except KvpoolError as error:
                self._lose(slots, error)
            else:
                asked.append((ticket, slots))
        return self._committed(asked)

    def _committed(self, asked: Sequence[tuple[int, dict[int, Slot]]]) -> Steps[None]:
        for ticket, slots in asked:
            try:
                verdict = yield from self._answer(ticket, wire.Verdict)
                outcomes = outcomes_of(verdict, len(slots))
            except KvpoolError as error:
                self._lose(slots, error)
                continue
            self._settle(list(slots), outcomes)
            if Outcome.EXPIRED in outcomes:  # still ours until we say that nothing writes there
                self._give_back(list(slots.values()))

    def _lose(self, slots: Mapping[int, Slot], error: KvpoolError) -> None:
        """Whether these were committed is not known."""
        self.text = str(error)
        open_still = [c for c in slots if c in self.slots]
        self._settle(open_still, [outcome_of(error)] * len(open_still))
        self._give_back(list(slots.values()))

    def _settle(self, chunks: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        self.nbytes += self.form.payload_bytes * self.slots.settle(chunks, outcomes)

    def stream(self, chunks: Sequence[int], extents: Mapping[int, Sequence[Bytes]]) -> Steps[None]:
        """Sends whole extents (each in pieces) to the data worker, in runs of neighbours."""
        data = self.membership.connection.stream()
        for run in _runs(chunks, self.batch):
            request = wire.Store(
                namespace=self.membership.number,
                parent=self.key(run[0] - 1),
                keys=b"".join(self.key(c) for c in run),
                parts=1 << self.number,
                nbytes=self.form.extent_bytes * len(run),
            )
            pieces = [piece for chunk in run for piece in extents[chunk]]
            store = partial(data.store, request, pieces)
            verdict = yield from self.membership.connection.bulk(store, request.nbytes)
            self.text = verdict.text or self.text
            self._settle(run, outcomes_of(verdict, len(run)))

    # ---- the end

    def abort(self) -> None:
        """Gives back what was reserved and not committed, one-way; what is being written to goes
        back with its last writer."""
        while self._tickets:
            self.membership.connection.channel.drop(self._tickets.pop())
        self.slots.give_up(Outcome.MISS)

    def _give_back(self, slots: Sequence[Slot]) -> None:
        for lease in {slot.lease for slot in slots if slot.lease}:
            items = _packed(slot for slot in slots if slot.lease == lease)
            self.membership.connection.notify(wire.Abort(lease=lease, items=items))


def _packed(slots: Iterable[Slot]) -> bytes:
    """Which items of their lease these are, as a column."""
    return b"".join(slot.item.to_bytes(4, "little") for slot in slots)


def _part_number(namespace: Namespace, part: str | None) -> int:
    if part is None and len(namespace.parts) > 1:
        names = ", ".join(p.name for p in namespace.parts)
        raise InvalidError(f"the namespace has parts {names}: say part=…")
    return namespace.part_mask((part,)).bit_length() - 1 if part is not None else 0


def _runs(chunks: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours together, at most `most` of them."""
    run: list[int] = []
    for chunk in chunks:
        if run and (chunk != run[-1] + 1 or len(run) == most):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run
