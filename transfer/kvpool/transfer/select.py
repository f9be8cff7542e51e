"""Choosing the cheapest transport that can reach a peer, and saying why.

Capabilities say what should work; whether it does is found out by moving checksummed bytes (peers
in other containers, missing rights and misrouted networks all look fine until then).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.proto.errors import ConfigError, InvalidError, KvpoolError, UnreachableError
from kvpool.transfer.base import (
    Buffer,
    Endpoint,
    Item,
    Locality,
    MemoryKind,
    Region,
    Status,
    Transfer,
    Transport,
)
from kvpool.transfer.copying import Bytes, as_bytes

PROBE_BLOCK = 4096
"""Bytes of a probe pattern that carry their own number and checksum."""

PROBE_NBYTES = 1 << 20
PROBE_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A transport that may reach the peer.

    `probe` is a region of the peer, at least as long as the probe, which the peer has filled by
    `fill_probe`. REQUIRES: nobody else probes it at the same time.
    """

    transport: Transport
    descriptor: bytes
    probe: Region


@dataclass(frozen=True, slots=True)
class Needs:
    """What the transfers to come ask of a transport."""

    locality: Locality
    """Where the peer is."""
    kind: MemoryKind = MemoryKind.DRAM
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which transport was chosen, and a sentence about each candidate, in their order."""

    chosen: str | None
    reasons: dict[str, str]


class Selector:
    """Holds the endpoints of all candidates that work; `endpoint` is the cheapest."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        needs: Needs,
        override: str | None = None,
        probe_nbytes: int = PROBE_NBYTES,
        probe_deadline: float = PROBE_DEADLINE_S,
    ) -> None:
        """Connects and probes, `probe_deadline` seconds per candidate and direction.

        With `override` only the transport of that name is considered. Raises `ConfigError` if it is
        no candidate or cannot do what is needed, `UnreachableError` if no candidate works, both
        with the reason of each; `InvalidError` for a probe that is no multiple of `PROBE_BLOCK`.
        """
        if probe_nbytes <= 0 or probe_nbytes % PROBE_BLOCK:
            raise InvalidError(f"a probe has a multiple of {PROBE_BLOCK} bytes: {probe_nbytes}")
        self._candidates = {candidate.transport.name: candidate for candidate in candidates}
        if len(self._candidates) < len(candidates):
            raise InvalidError("two candidates have the same name")
        self._needs = needs
        self._override = override
        self._probe_nbytes = probe_nbytes
        self._probe_deadline = probe_deadline
        self._seed = 0
        self._endpoints: dict[str, Endpoint] = {}
        self._reasons: dict[str, str] = {}
        self._chosen: str | None = None
        self._choose()

    @property
    def endpoint(self) -> Endpoint:
        """The chosen endpoint. Raises `UnreachableError` after `close`."""
        if self._chosen is None:
            raise UnreachableError("the selector is closed")
        return self._endpoints[self._chosen]

    def explain(self) -> Explanation:
        return Explanation(self._chosen, dict(self._reasons))

    def refresh(self) -> None:
        """Probe again what worked, connect again what did not, and rank anew.

        The endpoints' own estimates average over time. Raises `UnreachableError` if nothing works
        any more.
        """
        self._choose()

    def close(self) -> None:
        """Closes all endpoints. Idempotent."""
        self._chosen = None
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()

    def _choose(self) -> None:
        if self._override is not None and self._override not in self._candidates:
            raise ConfigError(
                f"transport {self._override!r} was asked for but is not available here; "
                f"there are: {', '.join(self._candidates) or 'none'}"
            )
        self._reasons = {name: self._try(name) for name in self._candidates}
        costs = {
            name: endpoint.estimate(self._probe_nbytes).seconds
            for name, endpoint in self._endpoints.items()
        }
        # Of equals the first in the order of the candidates.
        ranked = sorted((name for name in self._candidates if name in costs), key=costs.__getitem__)
        self._chosen = ranked[0] if ranked else None
        if self._chosen is None:
            raise self._nothing_works()
        for name in ranked:
            self._reasons[name] = _compare(name, self._chosen, costs)

    def _nothing_works(self) -> KvpoolError:
        listed = "; ".join(f"{name}: {reason}" for name, reason in self._reasons.items())
        if self._override is None:
            return UnreachableError(f"no transport reaches the peer ({listed or 'no candidates'})")
        reason = self._reasons[self._override]
        kind = ConfigError if self._unfit(self._candidates[self._override]) else UnreachableError
        return kind(f"transport {self._override!r} was asked for but: {reason}")

    def _try(self, name: str) -> str:
        """Leaves a working endpoint in `_endpoints` or returns why there is none."""
        candidate = self._candidates[name]
        if self._override not in (None, name):
            return f"not asked for: {self._override!r} is set explicitly"
        unfit = self._unfit(candidate)
        if unfit:
            return unfit
        try:
            if name not in self._endpoints:
                self._endpoints[name] = candidate.transport.connect(candidate.descriptor)
            self._probe(self._endpoints[name], candidate.probe)
        except KvpoolError as error:
            failed = self._endpoints.pop(name, None)
            if failed is not None:
                failed.close()
            return str(error)
        return ""

    def _unfit(self, candidate: Candidate) -> str:
        able, needs = candidate.transport.capabilities(), self._needs
        if needs.kind not in able.kinds:
            return f"does not move {needs.kind.value} memory"
        if needs.locality not in able.localities:
            return f"does not reach a peer in {needs.locality.name.lower()}"
        return "cannot write" if needs.writes and not able.writes else ""

    def _probe(self, endpoint: Endpoint, probe: Region) -> None:
        """Raises `UnreachableError` with what went wrong."""
        item = Item(probe.id, probe.generation, 0, self._probe_nbytes)
        if probe.nbytes < self._probe_nbytes:
            raise UnreachableError(f"the peer's probe region has only {probe.nbytes} bytes")
        received = np.zeros(self._probe_nbytes, np.uint8)
        if self._needs.writes:
            self._seed += 1
            sent = np.zeros_like(received)
            fill_probe(sent, self._seed)
            self._finish("write", endpoint.write([item], [sent], self._probe_deadline))
        self._finish("read", endpoint.read([item], [received], self._probe_deadline))
        if not probe_is_whole(received) or (self._needs.writes and (received != sent).any()):
            raise UnreachableError("the probe arrived with wrong bytes")

    def _finish(self, what: str, transfer: Transfer) -> None:
        if not transfer.wait(self._probe_deadline):
            transfer.cancel()
        status = transfer.statuses[0]
        if status is not Status.OK:
            raise UnreachableError(f"the probe's {what} failed: {status.name}")


def fill_probe(buffer: Buffer, seed: int = 0) -> None:
    """Fill `buffer` with blocks that carry their number and a checksum.

    Raises `InvalidError` if its length is no multiple of `PROBE_BLOCK` bytes.
    """
    blocks = _blocks(as_bytes(buffer, writable=True))
    words = blocks.view(np.uint32)
    words[:] = np.arange(words.size, dtype=np.uint32).reshape(words.shape) * 2654435761 + seed
    words[:, 0] = np.arange(len(blocks))
    words[:, -1] = _checksums(blocks)


def probe_is_whole(buffer: Buffer) -> bool:
    """Whether `buffer` begins with the blocks that `fill_probe` made, each in its place."""
    blocks = _blocks(as_bytes(buffer))
    words = blocks.view(np.uint32)
    numbered = (words[:, 0] == np.arange(len(blocks))).all()
    return bool(numbered and (words[:, -1] == _checksums(blocks)).all())


def _blocks(view: Bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    if view.size % PROBE_BLOCK:
        raise InvalidError(f"a probe has a multiple of {PROBE_BLOCK} bytes, not {view.size}")
    return view.reshape(-1, PROBE_BLOCK)


def _checksums(blocks: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> list[int]:
    return [zlib.crc32(block[:-4]) for block in blocks]


def _compare(name: str, chosen: str, costs: dict[str, float]) -> str:
    took = f"{costs[name] * 1e3:.3g} ms"
    if name == chosen:
        return f"cheapest: {took}"
    return f"works, but takes {took} where {chosen} takes {costs[chosen] * 1e3:.3g} ms"
