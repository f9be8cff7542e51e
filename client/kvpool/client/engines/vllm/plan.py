"""What the scheduler's side tells the workers' side: which KV to load and which to save."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.client.engines.vllm.identity import Variant

Tables = tuple[tuple[int, ...], ...]
"""Block numbers, a tuple per KV cache group."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [first, last) of a request come from the store, under the scheduler's lease."""

    request: str
    variant: Variant
    lease: bytes
    keys: bytes
    """Of the chunks that the lease covers."""
    first: int
    last: int
    """Both end blocks of every group."""
    blocks: Tables
    """Of these tokens."""


@dataclass(frozen=True, slots=True)
class Save:
    """Chunks `first`, `first` + 1, … are complete after this step."""

    variant: Variant
    keys: bytes
    """Of all chunks up to the last one."""
    first: int
    blocks: Tables
    """Of these chunks."""


@dataclass(slots=True)
class Plan:
    """For one step of the engine."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
    """Nothing is computed in it: the engine waits for loads."""
