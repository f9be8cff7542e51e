"""What the verbs answer: a match with its lease, a pull, a publish, an explanation."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.client.prefix import usable_prefix
from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import (
    BusyError,
    DeniedError,
    InvalidError,
    KvpoolError,
    NamespaceError,
    StaleError,
    TooLargeError,
)
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome, Reason

if TYPE_CHECKING:
    from kvpool.client.session import Membership

TIERS = ("none", "GPU", "DRAM", "SSD")

EXTENT_BYTES = 16
"""Of one item in the column of extents."""

Outcomes = npt.NDArray[np.uint8]

HIT, MISS, UNKNOWN = Outcome.HIT, Outcome.MISS, Reason.UNKNOWN
"""Looked up once: until Python 3.12 a look at a member costs microseconds."""

_OUTCOMES: dict[type[KvpoolError], Outcome] = {
    BusyError: Outcome.BUSY,
    DeniedError: Outcome.DENIED,
    InvalidError: Outcome.INVALID,
    NamespaceError: Outcome.INVALID,
    StaleError: Outcome.STALE_EPOCH,
    TooLargeError: Outcome.TOO_LARGE,
}


def outcome_of(error: KvpoolError) -> Outcome:
    """What a data verb answers when the store, or the way to it, failed with `error`."""
    return _OUTCOMES.get(type(error), Outcome.UNREACHABLE)


@dataclass(slots=True)
class Grant:
    """The lease behind a match: where it holds, until when, and the extents that it names."""

    membership: Membership
    lease: bytes
    deadline: float
    packed: bytes
    """Of each chunk in memory and part asked for: address (-1: not there) and generation, int64
    each."""
    mask: int
    """Bitmap of the parts asked for."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of the parts asked for."""
        return self.membership.identity.namespace.part_indices(self.mask)

    @property
    def chunks(self) -> int:
        """Leading chunks of the match that are in the store's memory, as far as is known here."""
        return len(self.packed) // (EXTENT_BYTES * self.mask.bit_count())

    @property
    def extents(self) -> npt.NDArray[np.int64]:
        """(chunks in memory, parts asked for, 2)."""
        column = np.frombuffer(self.packed, np.int64) if self.packed else np.empty(0, np.int64)
        return column.reshape(-1, self.mask.bit_count(), 2)


class Match:
    """The stored prefix of one prompt, held by a lease until `release` (or the end of `with`).

    A match never fails because of the store: if the store cannot answer, nothing is matched, and
    `outcome` (UNREACHABLE, BUSY, …) and `error` say why. A match that is dropped without `release`
    releases itself; hand `lease` over to others only while you hold the match.
    """

    outcome: Outcome = MISS
    """Of the first chunk that is not matched; HIT if all are."""
    reason: Reason = UNKNOWN
    error = ""
    """Why the store could not answer, in words; empty if it did."""
    ssd_chunks = 0
    """The last so many of the matched chunks were on the store's SSD: pull loads them."""
    load_s = 0.0
    """How long that is expected to take, in seconds."""
    skipped = 0
    """Chunks that are stored, but would take longer to load than to compute."""
    _borrowed = False

    def __init__(
        self, keys: bytes, chunk_tokens: int, chunks: int = 0, *, grant: Grant | None = None
    ) -> None:
        self.keys = keys
        """Packed keys of all full chunks of the prompt."""
        self.chunks = chunks
        """Leading chunks that are stored and servable."""
        self.chunk_tokens = chunk_tokens
        self.grant = grant
        """The lease and what it covers; None once it is released, or if nothing matched."""

    @property
    def lease(self) -> bytes:
        """Capability that another session of the tenant may adopt; b"" if there is none."""
        return self.grant.lease if self.grant is not None else b""

    @property
    def seconds_left(self) -> float:
        """Until the lease ends (it can be renewed); 0 if there is none or it has ended."""
        return max(0.0, self.grant.deadline - time.monotonic()) if self.grant is not None else 0.0

    @property
    def tokens(self) -> int:
        """Matched tokens: a multiple of the chunk size."""
        return self.chunks * self.chunk_tokens

    @property
    def outcomes(self) -> Outcomes:
        """One per full chunk of the prompt: HITs, then why the first miss, then MISS."""
        count = len(self.keys) // KEY_BYTES
        out = np.full(count, Outcome.MISS, np.uint8)
        out[: self.chunks] = Outcome.HIT
        if self.chunks < count:
            out[self.chunks] = self.outcome
        return out

    def key(self, chunk: int) -> bytes:
        """The key of one chunk, 32 bytes."""
        return self.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def usable_prefix(self, prompt_tokens: int, block_tokens: int = 1) -> int:
        """See `kvpool.client.usable_prefix`."""
        return usable_prefix(self.tokens, prompt_tokens, block_tokens)

    def keep_connection(self) -> None:
        """The connection outlives this match from now on. Raises `StaleError` if it is lost."""
        if not self._borrowed and self.grant is not None:
            self.grant.membership.connection.borrow()
            self._borrowed = True

    def release(self) -> None:
        """Ends this holding of the lease, one-way. Borrowed views are dead from now on."""
        grant, self.grant = self.grant, None
        if grant is None:
            return
        connection = grant.membership.connection
        connection.notify(wire.Release(leases=grant.lease))
        if self._borrowed:
            self._borrowed = False
            connection.give_back()

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    def __repr__(self) -> str:
        of = len(self.keys) // KEY_BYTES
        return f"<Match {self.chunks}/{of} chunks, {self.tokens} tokens, {self.outcome.name}>"


@dataclass(frozen=True, slots=True)
class Pull:
    """What a pull delivered: one outcome per chunk asked for."""

    outcomes: Outcomes
    chunk_tokens: int
    nbytes: int
    """Payload bytes that were delivered."""
    seconds: float
    unverified: int
    """Chunks that were delivered without a checksum comparison."""
    error: str = ""
    """Why the store failed, in words; empty if it did not."""

    @property
    def ok(self) -> bool:
        """All chunks were delivered."""
        return bool((self.outcomes == Outcome.HIT).all())

    @property
    def chunks(self) -> int:
        """Leading chunks that were delivered; what comes after the first failure does not count."""
        good = self.outcomes == Outcome.HIT
        return len(good) if good.all() else int(good.argmin())


@dataclass(frozen=True, slots=True)
class Publish:
    """What a publish stored: one outcome per chunk given (OK, EXISTS, WRITING, BUSY, …)."""

    outcomes: Outcomes
    nbytes: int
    """Payload bytes that were written; chunks that exist cost none."""
    seconds: float
    text: str = ""
    """Figures of the store if it was BUSY, or why it was unreachable."""

    @property
    def stored(self) -> bool:
        """Every chunk is in the store now, by this publish or an earlier one."""
        return bool(np.isin(self.outcomes, (Outcome.OK, Outcome.EXISTS)).all())


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where one chunk is and what holds it, or why it is not there."""

    key: bytes
    outcome: Outcome
    reason: Reason
    tier: str
    nbytes: int
    parts: tuple[str, ...]
    leases: int
    pins: int
    age_s: float
    children: int
    durable: bool = False
    """All of it is on the SSD: it would survive the daemon."""
