"""What the verbs answer: a match with its lease, a pull, a publish, an explanation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.client.prefix import usable_prefix
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.outcomes import Outcome, Reason
from kvpool.transfer.copying import Bytes

if TYPE_CHECKING:
    from kvpool.client.core import SessionCore

TIERS = ("none", "GPU", "DRAM", "SSD")

Outcomes = npt.NDArray[np.uint8]


class Match:
    """The stored prefix of one prompt, held by a lease until `release` (or the end of `with`).

    A match never fails because of the store: if the store cannot answer, nothing is matched and
    `outcome` is UNREACHABLE or BUSY with `error` saying why.
    """

    __slots__ = (
        "_release",
        "chunk_tokens",
        "chunks",
        "deadline",
        "error",
        "extents",
        "keys",
        "lease",
        "outcome",
        "parts",
        "reason",
        "serial",
        "session",
    )

    def __init__(
        self,
        session: SessionCore,
        keys: bytes,
        *,
        chunks: int = 0,
        outcome: Outcome = Outcome.MISS,
        reason: Reason = Reason.UNKNOWN,
        error: str = "",
        lease: bytes = b"",
        lease_s: float = 0.0,
        extents: bytes = b"",
        parts: tuple[int, ...] = (),
        serial: int = 0,
        release: Callable[[bytes], None] | None = None,
    ) -> None:
        self.session = session
        self.keys = keys
        """Packed keys of all full chunks of the prompt."""
        self.chunks = chunks
        """Leading chunks that are stored and servable."""
        self.chunk_tokens = session.namespace.chunk_tokens
        self.outcome = outcome
        """Of the first chunk that is not matched; HIT if all are."""
        self.reason = reason
        self.error = error
        self.lease = lease
        """Capability that another session of the tenant may adopt; b"" if nothing matched."""
        self.deadline = time.monotonic() + lease_s
        self.extents = np.frombuffer(extents, np.int64).reshape(chunks, -1, 2) if extents else None
        self.parts = parts
        self.serial = serial
        self._release = release

    @property
    def tokens(self) -> int:
        """Matched tokens: a multiple of the chunk size."""
        return self.chunks * self.chunk_tokens

    @property
    def outcomes(self) -> Outcomes:
        """One per chunk of the prompt: HITs, then why the first miss, then MISS."""
        count = len(self.keys) // KEY_BYTES
        out = np.full(count, Outcome.MISS, np.uint8)
        out[: self.chunks] = Outcome.HIT
        if self.chunks < count:
            out[self.chunks] = self.outcome
        return out

    def usable_prefix(self, prompt_tokens: int, block_tokens: int = 1) -> int:
        """See `kvpool.client.usable_prefix`."""
        return usable_prefix(self.tokens, prompt_tokens, block_tokens)

    def release(self) -> None:
        """Ends this holding of the lease, one-way; borrowed views are dead from now on."""
        release, self._release = self._release, None
        if release is not None and self.lease:
            release(self.lease)

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
class Borrow:
    """Read-only views of payloads in the store's own memory, valid until the match is released."""

    views: list[Bytes]
    outcomes: Outcomes


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
