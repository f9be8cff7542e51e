"""Publishing: reserve, fill, commit. Whole batches, or chunk by chunk and layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvpool.client.core import Prompt, SessionCore
from kvpool.client.effects import Call, Steps
from kvpool.client.extents import PartFormat, buffers_for, key_at
from kvpool.client.regions import Regions
from kvpool.client.results import Outcomes, Publish
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, InvalidError, StaleError, UnreachableError
from kvpool.proto.keys import KEY_BYTES, Extra
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes, copy

ABSENT = 255
"""No outcome yet: reserved, not committed."""


@dataclass(slots=True)
class _Slot:
    """One chunk being written: its extent (in the pool, or staged here) and what is there."""

    lease: bytes
    item: int
    generation: int
    extent: Bytes
    written: set[int] = field(default_factory=set)


class Publishing:
    """A publication in progress; the API classes drive it. One part, chunks [first, first + n)."""

    def __init__(
        self,
        session: SessionCore,
        keys: bytes,
        first: int,
        count: int,
        part: str | None,
        check: bool,
    ) -> None:
        namespace = session.namespace
        if part is None and len(namespace.parts) > 1:
            names = ", ".join(p.name for p in namespace.parts)
            raise InvalidError(f"the namespace has parts {names}: say part=…")
        self.number = namespace.part_mask((part,)).bit_length() - 1 if part else 0
        have = len(keys) // KEY_BYTES
        if first < 0 or count < 0 or first + count > have:
            raise InvalidError(
                f"chunks [{first}, {first + count}) are not inside the {have} full chunks of the "
                "prompt"
            )
        self.session = session
        self.keys = keys
        self.first = first
        self.checksum = check
        self.outcomes: Outcomes = np.full(count, ABSENT, np.uint8)
        self.text = ""
        self.nbytes = 0
        self.serial = session.client.serial
        self._slots: dict[int, _Slot] = {}

    @property
    def form(self) -> PartFormat:
        return self.session.formats[self.number]

    @property
    def remote(self) -> bool:
        welcome = self.session.client.welcome
        return welcome is not None and not welcome.mapped

    def parent(self, chunk: int) -> bytes:
        """Key of the chunk before `chunk` of this publication; empty at the root."""
        at = self.first + chunk
        return key_at(self.keys, at - 1) if at else b""

    def key(self, chunk: int) -> bytes:
        return key_at(self.keys, self.first + chunk)

    # ---- reserve

    def reserve(self, start: int, stop: int, lease_s: float) -> Steps[None]:
        """Room for chunks [start, stop); those without get their outcome."""
        if self.remote:
            for chunk in range(start, stop):
                staged = np.empty(self.form.extent_bytes, np.uint8)
                self._slots[chunk] = _Slot(b"", chunk, 0, staged)
            return
        keys = self.keys[(self.first + start) * KEY_BYTES : (self.first + stop) * KEY_BYTES]
        reserved: wire.Reserved = yield Call(
            wire.Reserve(
                namespace=self.session.id,
                parent=self.parent(start),
                keys=keys,
                parts=1 << self.number,
                lease_ms=int(lease_s * 1000),
            )
        )
        self.text = reserved.text or self.text
        outcomes = np.frombuffer(reserved.outcomes, np.uint8)
        extents = np.frombuffer(reserved.extents, np.int64).reshape(-1, 2).tolist()
        granted = [i for i in range(stop - start) if outcomes[i] == Outcome.OK]
        self.outcomes[start:stop] = np.where(outcomes == Outcome.OK, ABSENT, outcomes)
        if not granted:
            return
        try:
            regions: Regions = yield from self.session.client.attach(
                max(extents[i][0] for i in granted), writable=True
            )
        except BaseException:
            self.session.client.link.notify(wire.Abort(lease=reserved.lease))
            raise
        for i in granted:
            address, generation = extents[i]
            view = regions.view(address, self.form.extent_bytes)
            self._slots[start + i] = _Slot(reserved.lease, i, generation, view)

    # ---- fill

    def wants(self, chunk: int) -> bool:
        """False if the chunk needs no bytes: it exists, or has no room."""
        return chunk in self._slots

    def fill(self, chunk: int, payload: object) -> None:
        """Writes a whole chunk: one buffer, or one per plane. Blocks for the copy."""
        slot = self._slots.get(chunk)
        planes = self.form.sources(payload)
        if slot is not None:
            key = self.key(chunk)
            self.form.fill(slot.extent, key, slot.generation, planes, self.checksum)
            slot.written = set(range(len(self.form.part.planes)))

    def bulk(self, function: Callable[[], None]) -> Steps[None]:
        """Runs one of the fills as a copy that the connection outlives."""
        yield from self.session.client.bulk(function, 0)

    def fill_layer(self, chunk: int, layer: str, buffer: object) -> None:
        """Writes one plane of a chunk."""
        form = self.form
        plane = form.part.plane_index(layer)
        (source,) = buffers_for(buffer, [form.part.planes[plane].nbytes], writable=False)
        slot = self._slots.get(chunk)
        if slot is not None:
            start = form.prologue + form.starts[plane]
            copy(slot.extent[start : start + source.size], source)
            slot.written.add(plane)
            if len(slot.written) == len(form.part.planes):
                form.seal(slot.extent, self.key(chunk), slot.generation, self.checksum)

    # ---- commit

    def commit(self) -> Steps[Outcomes]:
        """Makes all complete chunks visible, in chain order; the outcomes of all so far."""
        whole = len(self.form.part.planes)
        ready = [c for c, slot in sorted(self._slots.items()) if len(slot.written) == whole]
        if self.remote:
            yield from self._store_staged(ready)
        else:
            for lease in dict.fromkeys(self._slots[c].lease for c in ready):
                chunks = [c for c in ready if self._slots[c].lease == lease]
                yield from self._commit_lease(lease, chunks)
        for chunk in ready:
            del self._slots[chunk]
        return self.outcomes

    def _commit_lease(self, lease: bytes, chunks: Sequence[int]) -> Steps[None]:
        if self.serial != self.session.client.serial:
            self.outcomes[list(chunks)] = Outcome.STALE_EPOCH
            return
        items = np.array([self._slots[c].item for c in chunks], "<u4").tobytes()
        verdict: wire.Verdict = yield Call(wire.Commit(lease=lease, items=items))
        outcomes = list(verdict.outcomes)
        if len(outcomes) != len(chunks):
            outcomes = [outcomes[0]] * len(chunks)
        self.outcomes[list(chunks)] = outcomes
        self.nbytes += self.form.starts[-1] * outcomes.count(Outcome.OK)
        if Outcome.EXPIRED in outcomes:  # nothing of ours writes there any more
            self.session.client.link.notify(wire.Abort(lease=lease))

    def _store_staged(self, chunks: Sequence[int]) -> Steps[None]:
        buffers = [[self._slots[c].extent] for c in chunks]
        yield from self.stream(chunks, buffers)

    def stream(self, chunks: Sequence[int], buffers: Sequence[Sequence[Bytes]]) -> Steps[None]:
        """Sends whole extents (each in pieces) to the data worker, in runs of neighbours."""
        data = self.session.client.data
        if data is None:
            raise UnreachableError("the daemon offers no data connection; start it with --tcp")
        limit = self.session.client.welcome.reserve_max if self.session.client.welcome else 1
        at = 0
        while at < len(chunks):
            end = at + 1
            while end < len(chunks) and chunks[end] == chunks[end - 1] + 1 and end - at < limit:
                end += 1
            run = chunks[at:end]
            store = wire.Store(
                namespace=self.session.id,
                parent=self.parent(run[0]),
                keys=b"".join(self.key(c) for c in run),
                parts=1 << self.number,
                nbytes=self.form.extent_bytes * len(run),
            )
            pieces = [piece for extent in buffers[at:end] for piece in extent]
            send: Any = partial(data.store, store, pieces)
            verdict = yield from self.session.client.bulk(send, store.nbytes)
            outcomes = list(verdict.outcomes)
            self.outcomes[list(run)] = outcomes
            self.text = verdict.text or self.text
            self.nbytes += self.form.starts[-1] * outcomes.count(Outcome.OK)
            at = end

    def abort(self) -> None:
        """Gives back what was reserved and not committed, one-way."""
        client = self.session.client
        leases = {slot.lease for slot in self._slots.values() if slot.lease}
        self._slots.clear()
        self.outcomes[self.outcomes == ABSENT] = Outcome.MISS
        if self.serial == client.serial:
            for lease in leases:
                client.link.notify(wire.Abort(lease=lease))


def publish(
    session: SessionCore,
    prompt: Prompt,
    payloads: Sequence[object],
    *,
    first: int,
    extras: Sequence[Extra] | None,
    part: str | None,
    checksum: bool,
) -> Steps[Publish]:
    """Stores `payloads` as chunks [first, first + n) of `prompt`, batch by batch."""
    started = time.monotonic()
    state: Publishing | None = None
    try:
        yield from session.client.ensure()
        keys = session.keys(prompt, extras)
        state = Publishing(session, keys, first, len(payloads), part, checksum)
        assert session.client.welcome is not None
        batch = session.client.welcome.reserve_max
        for start in range(0, len(payloads), batch):
            chunks = payloads[start : start + batch]
            if not (yield from _publish_batch(state, start, chunks)):
                break
    except (UnreachableError, StaleError, BusyError) as error:
        outcomes = state.outcomes if state else np.full(len(payloads), ABSENT, np.uint8)
        busy = isinstance(error, BusyError)
        outcomes[outcomes == ABSENT] = Outcome.BUSY if busy else Outcome.UNREACHABLE
        nbytes = state.nbytes if state else 0
        return Publish(outcomes, nbytes, time.monotonic() - started, str(error))
    finally:
        if state is not None:
            state.abort()
    return Publish(state.outcomes, state.nbytes, time.monotonic() - started, state.text)


def _publish_batch(state: Publishing, start: int, payloads: Sequence[object]) -> Steps[bool]:
    """False if the chain is cut, so that later chunks cannot be stored either."""
    chunks = range(start, start + len(payloads))
    nbytes = state.form.starts[-1] * len(payloads)
    if state.remote:
        yield from state.stream(
            chunks, [_extent_pieces(state, c, p) for c, p in zip(chunks, payloads, strict=True)]
        )
    else:
        yield from state.reserve(start, start + len(payloads), 0.0)

        def fill() -> None:
            for chunk, payload in zip(chunks, payloads, strict=True):
                state.fill(chunk, payload)

        yield from state.session.client.bulk(fill, nbytes)
        yield from state.commit()
    cut = state.outcomes[chunks[-1]]
    if cut not in (Outcome.OK, Outcome.EXISTS, Outcome.WRITING):
        state.outcomes[start + len(payloads) :] = cut
        return False
    return True


def _extent_pieces(state: Publishing, chunk: int, payload: object) -> list[Bytes]:
    form = state.form
    planes = form.sources(payload)
    head = np.zeros(form.prologue, np.uint8)
    key = state.key(chunk)
    form.head(head, key, 0, form.sums_of(planes, key) if state.checksum else None)
    return [head, *planes]


def open_publication(
    session: SessionCore,
    prompt: Prompt,
    first: int,
    count: int | None,
    extras: Sequence[Extra] | None,
    part: str | None,
    checksum: bool,
    lease_s: float,
) -> Steps[Publishing]:
    """Reserves all chunks of a publication, in batches."""
    yield from session.client.ensure()
    keys = session.keys(prompt, extras)
    if count is None:
        count = max(0, len(keys) // KEY_BYTES - first)
    state = Publishing(session, keys, first, count, part, checksum)
    assert session.client.welcome is not None
    batch = session.client.welcome.reserve_max
    for start in range(0, count, batch):
        yield from state.reserve(start, min(start + batch, count), lease_s)
    return state
