"""The client's operations, written once: generators of effects (`kvpool.client.effects`).

Data verbs (match, pull, publish) never raise because of the store: an unreachable or full store
is an outcome, so that an engine simply goes on without it. Errors of the caller are raised.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvpool.client.chains import ChainMemo
from kvpool.client.effects import Call, Dial, Exclusive, Steps, Work
from kvpool.client.extents import (
    Destination,
    PartFormat,
    Selection,
    destinations,
    key_at,
    select,
)
from kvpool.client.link import Link
from kvpool.client.regions import Regions, receive_regions
from kvpool.client.results import TIERS, Borrow, Explanation, Match, Pull
from kvpool.client.streaming import DataLink
from kvpool.proto import session as protocol
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import BusyError, InvalidError, StaleError, UnreachableError
from kvpool.proto.keys import KEY_BYTES, Extra, Tokens, foreign_keys
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome, Reason

DEADLINE_S = 5.0

Prompt = Tokens | bytes
"""Token ids, or packed keys (n x 32 bytes)."""


class ClientCore:
    """One client's connection state, shared by its sessions."""

    def __init__(self, link: Link, *, token: str, name: str, local_regions: Any = None) -> None:
        self.link = link
        self.token = token
        self.name = name
        self.serial = 0
        """Number of the connection; leases of an earlier one are stale."""
        self.welcome: wire.Welcome | None = None
        self.regions: Regions | None = None
        self.data: DataLink | None = None
        self.sessions: weakref.WeakSet[SessionCore] = weakref.WeakSet()
        self.copies = 0
        """Bulk copies in flight: the connection must not be closed by us before they end."""
        self._local_regions = local_regions

    @property
    def ready(self) -> bool:
        return self.welcome is not None and self.link.alive

    def ensure(self) -> Steps[None]:
        """Connects, or connects anew, if need be. Raises `UnreachableError`."""
        if not self.ready:
            yield Exclusive(self._connect)

    def _connect(self) -> Steps[None]:
        if self.ready:  # somebody else has connected while we waited
            return
        self.welcome = None
        yield Dial()
        hello = wire.Hello(
            version_min=protocol.VERSION_MIN,
            version_max=protocol.VERSION_MAX,
            features=sorted(protocol.FEATURES),
            token=self.token,
            client=self.name,
            pid=os.getpid(),
        )
        welcome: wire.Welcome = yield Call(hello)
        self.serial += 1
        self.regions = None
        self.data = DataLink(welcome.data_address, hello) if welcome.data_address else None
        for session in list(self.sessions):
            yield from session.reopen(welcome)
        self.welcome = welcome

    def call(self, body: Any) -> Steps[Any]:
        """One request on a connection that is made if need be."""
        yield from self.ensure()
        return (yield Call(body))

    def attach(self, address: int, *, writable: bool) -> Steps[Regions]:
        """Regions that cover `address`, mapped if they are not yet. Raises `DeniedError`."""
        regions = self.regions
        if regions is None or not regions.covers(address) or (writable and not regions.writable):
            yield Exclusive(partial(self._attach, address, writable))
        assert self.regions is not None
        return self.regions

    def _attach(self, address: int, writable: bool) -> Steps[None]:
        regions = self.regions
        if regions and regions.covers(address) and (regions.writable or not writable):
            return
        attached: wire.Attached = yield Call(wire.Attach(writable=writable))
        if self._local_regions is not None:
            arrays = self._local_regions(attached.token)
            self.regions = Regions(attached.region_bytes, arrays, writable=True)
            return
        assert self.welcome is not None
        receive = partial(
            receive_regions,
            self.welcome.attach_address,
            attached.token,
            attached.region_bytes,
            writable,
            DEADLINE_S,
        )
        self.regions = yield Work(receive, 0)

    def bulk(self, function: Any, nbytes: int) -> Steps[Any]:
        """A copy that the connection outlives."""
        self.copies += 1
        try:
            return (yield Work(function, nbytes))
        finally:
            self.copies -= 1

    def check_idle(self) -> None:
        """Raises `BusyError` while copies run: closing now would give their extents away."""
        if self.copies:
            raise BusyError(f"{self.copies} copies are still running; close when they have ended")

    def release(self, serial: int, lease: bytes) -> None:
        """One-way; a lease of an earlier connection has ended with it."""
        if serial == self.serial:
            self.link.notify(wire.Release(leases=lease))

    def status(self) -> Steps[dict[str, Any]]:
        report: wire.StatusReport = yield from self.call(wire.Status())
        answer: dict[str, Any] = json.loads(report.json)
        return answer

    def keys(self, namespace: int, limit: int, cursor: int) -> Steps[tuple[list[bytes], int]]:
        page: wire.KeyPage = yield from self.call(
            wire.Keys(namespace=namespace, cursor=cursor, limit=limit)
        )
        keys = [page.keys[i : i + KEY_BYTES] for i in range(0, len(page.keys), KEY_BYTES)]
        return keys, page.cursor

    def clear(self, namespace: int) -> Steps[int]:
        count: wire.Count = yield from self.call(wire.Clear(namespace=namespace))
        return count.count


class SessionCore:
    """A client's work in one namespace."""

    def __init__(self, client: ClientCore, namespace: Namespace) -> None:
        self.client = client
        self.namespace = namespace
        self.id = 0
        self.digest = b""
        self.warning = ""
        """Said by the daemon if writers and readers of this model can never meet."""
        self.memo = ChainMemo(b"", namespace.chunk_tokens)
        self.formats: list[PartFormat] = []
        self.unverified_chunks = 0
        self.corrupt_chunks = 0

    # ---- opening

    def join(self) -> Steps[None]:
        """Opens the namespace, now or (if the store is away) whenever the client connects."""
        self.client.sessions.add(self)
        try:
            yield from self.client.ensure()
            if not self.id:
                assert self.client.welcome is not None
                yield from self.reopen(self.client.welcome)
        except UnreachableError:
            return
        except BaseException:
            self.client.sessions.discard(self)
            raise

    def reopen(self, welcome: wire.Welcome) -> Steps[None]:
        digest = self.namespace.digest(welcome.tenant)
        opened: wire.Opened = yield Call(
            wire.Open(namespace=self.namespace.to_record(), digest=digest)
        )
        self.id, self.warning = opened.namespace, opened.warning
        if digest != self.digest:
            self.digest = digest
            self.memo = ChainMemo(digest, self.namespace.chunk_tokens)
            self.formats = [
                PartFormat.of(self.namespace, digest, i) for i in range(len(self.namespace.parts))
            ]

    def keys(self, prompt: Prompt, extras: Sequence[Extra] | None = None) -> bytes:
        """Packed keys of the full chunks of `prompt`; packed keys are returned as they are."""
        if isinstance(prompt, bytes | bytearray | memoryview):
            keys = bytes(prompt)
            if len(keys) % KEY_BYTES:
                raise InvalidError(f"{len(keys)} bytes are no multiple of {KEY_BYTES}-byte keys")
            return keys
        if self.namespace.key_scheme != "tokens":
            raise InvalidError(
                f"key scheme {self.namespace.key_scheme!r} takes page hashes: use foreign_keys()"
            )
        return self.memo.keys(prompt, extras)

    def foreign_keys(self, pages: Sequence[bytes]) -> bytes:
        """Packed keys of pages that the engine has hashed itself (key scheme foreign:…)."""
        return foreign_keys(self.digest, pages)

    # ---- reading

    def match(
        self,
        prompt: Prompt,
        extras: Sequence[Extra] | None,
        parts: tuple[str, ...] | None,
        lease_s: float,
        peek: bool,
    ) -> Steps[Match]:
        mask = self.namespace.part_mask(parts)
        keys = b""
        try:
            yield from self.client.ensure()
            keys = self.keys(prompt, extras)
            if not keys:
                return Match(self, keys)
            assert self.client.welcome is not None
            asked = keys[: self.client.welcome.keys_max * KEY_BYTES]
            matched: wire.Matched = yield Call(
                wire.Match(
                    namespace=self.id,
                    keys=asked,
                    parts=mask,
                    lease_ms=int(lease_s * 1000),
                    peek=peek,
                )
            )
        except (UnreachableError, StaleError) as error:
            return Match(self, keys, outcome=Outcome.UNREACHABLE, error=str(error))
        except BusyError as error:
            return Match(self, keys, outcome=Outcome.BUSY, error=str(error))
        return self._matched(keys, matched, mask)

    def adopt(self, lease: bytes, keys: bytes, parts: tuple[str, ...] | None) -> Steps[Match]:
        """Joins the holders of a lease that another session handed over, with its keys."""
        mask = self.namespace.part_mask(parts)
        try:
            matched: wire.Matched = yield from self.client.call(wire.Adopt(lease=lease, parts=mask))
        except (UnreachableError, StaleError) as error:
            return Match(self, keys, outcome=Outcome.UNREACHABLE, error=str(error))
        except BusyError as error:
            return Match(self, keys, outcome=Outcome.BUSY, error=str(error))
        return self._matched(keys, matched, mask)

    def _matched(self, keys: bytes, matched: wire.Matched, mask: int) -> Match:
        return Match(
            self,
            keys,
            chunks=matched.hits,
            outcome=Outcome(matched.miss_outcome),
            reason=Reason(matched.miss_reason),
            lease=matched.lease,
            lease_s=matched.lease_ms / 1000,
            extents=matched.extents,
            parts=self.namespace.part_indices(mask),
            serial=self.client.serial,
            release=partial(self.client.release, self.client.serial),
        )

    def renew(self, match: Match, lease_s: float) -> Steps[Outcome]:
        """Extends the lease and counts its chunks as used."""
        if match.serial != self.client.serial or not self.client.ready:
            return Outcome.STALE_EPOCH
        start = time.monotonic()
        try:
            verdict: wire.Verdict = yield Call(
                wire.Touch(lease=match.lease, lease_ms=int(lease_s * 1000))
            )
        except UnreachableError:
            return Outcome.UNREACHABLE
        if verdict.outcomes[0] == Outcome.OK:
            match.deadline = start + verdict.lease_ms / 1000
        return Outcome(verdict.outcomes[0])

    def pull(
        self,
        match: Match,
        into: object,
        *,
        part: str | None,
        layers: Sequence[str] | None,
        tokens: tuple[int, int] | None,
        verify: bool,
    ) -> Steps[Pull]:
        started = time.monotonic()
        number, column = self._part_of(match, part)
        first, selections = self._selections(match, number, layers, tokens)
        targets = destinations(into, selections)
        outcomes = np.full(len(selections), Outcome.STALE_EPOCH, np.uint8)
        unverified = 0
        if selections and match.serial == self.client.serial and self.client.ready:
            try:
                unverified = yield from self._deliver(
                    match, number, column, first, selections, targets, outcomes, verify
                )
            except UnreachableError:
                outcomes[outcomes == Outcome.STALE_EPOCH] = Outcome.UNREACHABLE
            self._quarantine(match, first, outcomes)
        self.unverified_chunks += unverified
        hit = outcomes == Outcome.HIT
        nbytes = sum(s.nbytes for s, good in zip(selections, hit.tolist(), strict=True) if good)
        seconds = time.monotonic() - started
        return Pull(outcomes, self.namespace.chunk_tokens, nbytes, seconds, unverified)

    def _deliver(
        self,
        match: Match,
        number: int,
        column: int,
        first: int,
        selections: Sequence[Selection],
        targets: Sequence[Destination],
        outcomes: Any,
        verify: bool,
    ) -> Steps[int]:
        """Fills `outcomes`; the number of chunks that nothing could verify."""
        nbytes = sum(selection.nbytes for selection in selections)
        assert self.client.welcome is not None and match.extents is not None
        if not self.client.welcome.mapped:
            if self.client.data is None:
                raise UnreachableError("the daemon offers no data connection; start it with --tcp")
            fetch = partial(
                self.client.data.fetch,
                self.id,
                match,
                self.formats[number],
                first,
                selections,
                targets,
                outcomes,
                verify,
            )
            fetched: int = yield from self.client.bulk(fetch, nbytes)
            return fetched
        extents = match.extents[first : first + len(selections), column].tolist()
        regions = yield from self.client.attach(max(a for a, _ in extents), writable=False)
        copy = partial(
            self._copy_out, regions, match, number, first, extents, selections, targets, outcomes
        )
        copied: int = yield from self.client.bulk(partial(copy, verify), nbytes)
        return copied

    def _copy_out(
        self,
        regions: Regions,
        match: Match,
        number: int,
        first: int,
        extents: Sequence[tuple[int, int]],
        selections: Sequence[Selection],
        targets: Sequence[Destination],
        outcomes: Any,
        verify: bool,
    ) -> int:
        form = self.formats[number]
        unverified = 0
        for i, ((address, generation), selection) in enumerate(
            zip(extents, selections, strict=True)
        ):
            if time.monotonic() >= match.deadline:
                outcomes[i:] = Outcome.EXPIRED
                break
            if address < 0:
                outcomes[i] = Outcome.MISS
                continue
            extent = regions.view(address, form.extent_bytes)
            key = key_at(match.keys, first + i)
            outcome, verified = form.deliver(extent, key, generation, selection, targets[i], verify)
            # A copy that ended after its lease is refused, although nobody has reused the extent.
            late = time.monotonic() >= match.deadline
            outcomes[i] = Outcome.EXPIRED if late else outcome
            unverified += not verified
        return unverified

    def borrow(self, match: Match, part: str | None) -> Steps[Borrow]:
        """Views of whole payloads; empty if the match is stale or the memory is not mapped."""
        number, column = self._part_of(match, part)
        form = self.formats[number] if self.formats else None
        stale = match.serial != self.client.serial or not self.client.ready
        if match.extents is None or form is None or stale:
            outcome = Outcome.STALE_EPOCH if stale else Outcome.MISS
            return Borrow([], np.full(match.chunks, outcome, np.uint8))
        if time.monotonic() >= match.deadline:
            return Borrow([], np.full(match.chunks, Outcome.EXPIRED, np.uint8))
        extents = match.extents[:, column].tolist()
        regions = yield from self.client.attach(max(a for a, _ in extents), writable=False)
        views = []
        for address, _ in extents:
            view = regions.view(address, form.extent_bytes)[form.prologue :]
            view.flags.writeable = False
            views.append(view)
        return Borrow(views, np.full(match.chunks, Outcome.HIT, np.uint8))

    def _part_of(self, match: Match, part: str | None) -> tuple[int, int]:
        """(part number, its column in the match's extents)."""
        if part is None:
            if len(match.parts) > 1:
                names = ", ".join(self.namespace.parts[i].name for i in match.parts)
                raise InvalidError(f"the match has parts {names}: say part=…")
            return (match.parts[0], 0) if match.parts else (0, 0)
        number = self.namespace.part_mask((part,)).bit_length() - 1
        if match.parts and number not in match.parts:
            raise InvalidError(f"part {part!r} was not asked for in this match")
        return number, match.parts.index(number) if match.parts else 0

    def _selections(
        self,
        match: Match,
        number: int,
        layers: Sequence[str] | None,
        tokens: tuple[int, int] | None,
    ) -> tuple[int, list[Selection]]:
        """First chunk, and the selection of each chunk that the range touches."""
        part, size = self.namespace.parts[number], self.namespace.chunk_tokens
        planes = tuple(range(len(part.planes)))
        if layers is not None:
            planes = tuple(part.plane_index(name) for name in layers)
        start, end = tokens if tokens is not None else (0, match.tokens)
        if not 0 <= start <= end <= match.tokens:
            raise InvalidError(
                f"token range [{start}, {end}) is not inside the {match.tokens} matched tokens"
            )
        chunks = range(start // size, -(-end // size)) if end > start else range(0)
        return start // size, [
            select(part, planes, size, max(start - c * size, 0), min(end - c * size, size))
            for c in chunks
        ]

    def _quarantine(self, match: Match, first: int, outcomes: Any) -> None:
        bad = np.flatnonzero(outcomes == Outcome.CORRUPT).tolist()
        if bad:
            self.corrupt_chunks += len(bad)
            keys = b"".join(key_at(match.keys, first + i) for i in bad)
            self.client.link.notify(wire.Delete(namespace=self.id, keys=keys, quarantine=True))

    # ---- the rest

    def hint(self, prompt: Prompt, extras: Sequence[Extra] | None, fields: Any) -> Steps[bool]:
        """Best effort; False if the store is unreachable."""
        try:
            yield from self.client.ensure()
            keys = self.keys(prompt, extras)
            if keys:
                self.client.link.notify(wire.Hint(namespace=self.id, keys=keys, **fields))
        except UnreachableError:
            return False
        return True

    def pin(
        self, prompt: Prompt, extras: Sequence[Extra] | None, ttl_s: float, unpin: bool
    ) -> Steps[list[Outcome]]:
        yield from self.client.ensure()
        keys = self.keys(prompt, extras)
        if not keys:
            raise InvalidError("the prompt has no full chunk to pin")
        verdict: wire.Verdict = yield Call(
            wire.Pin(namespace=self.id, keys=keys, ttl_ms=int(ttl_s * 1000), unpin=unpin)
        )
        return [Outcome(o) for o in verdict.outcomes]

    def delete(self, prompt: Prompt, extras: Sequence[Extra] | None) -> Steps[list[Outcome]]:
        yield from self.client.ensure()
        keys = self.keys(prompt, extras)
        if not keys:
            return []
        verdict: wire.Verdict = yield Call(wire.Delete(namespace=self.id, keys=keys))
        return [Outcome(o) for o in verdict.outcomes]

    def explain(self, prompt: Prompt, extras: Sequence[Extra] | None) -> Steps[list[Explanation]]:
        yield from self.client.ensure()
        keys = self.keys(prompt, extras)
        if not keys:
            return []
        told: wire.Explained = yield Call(wire.Explain(namespace=self.id, keys=keys))
        nbytes, masks = np.frombuffer(told.nbytes, "<u8"), np.frombuffer(told.parts, "<u8")
        leases, pins = np.frombuffer(told.leases, "<u4"), np.frombuffer(told.pins, "<u4")
        ages, children = np.frombuffer(told.age_ms, "<u8"), np.frombuffer(told.children, "<u4")
        names = [part.name for part in self.namespace.parts]
        return [
            Explanation(
                key=key_at(keys, i),
                outcome=Outcome(told.outcomes[i]),
                reason=Reason(told.reasons[i]),
                tier=TIERS[told.tiers[i]] if told.tiers[i] < len(TIERS) else "unknown",
                nbytes=int(nbytes[i]),
                parts=tuple(n for j, n in enumerate(names) if int(masks[i]) >> j & 1),
                leases=int(leases[i]),
                pins=int(pins[i]),
                age_s=int(ages[i]) / 1000,
                children=int(children[i]),
            )
            for i in range(len(told.outcomes))
        ]
