"""Traces of requests: which chunks each one needs, in which order, and when.

Two formats, one request per line:

- Mooncake's JSONL (FAST'25): ``{"timestamp": ms, "input_length": tokens, "hash_ids": [...]}``, the
  ids chained over blocks of 512 tokens, a last partial block included. Only full blocks are read:
  ``input_length // 512``. `stop_reason`, if there, is what ended the answer.
- plain: ``timestamp, key, key, ...`` with seconds, and any words for keys.

A block is its key *below the blocks before it*, so that keys need not be chained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.proto.errors import InvalidError

BLOCK_TOKENS = 512
NEVER = 1 << 40
"""No next use: beyond the references of any trace."""

Blocks = NDArray[np.intp]


class Request(NamedTuple):
    """One prompt's full blocks, root first, numbered by first use."""

    time_s: float
    blocks: Blocks
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: list[Request]
    unique: int
    """Distinct blocks."""

    @property
    def references(self) -> int:
        return sum(len(request.blocks) for request in self.requests)

    def capacity(self, share: float) -> int:
        """Blocks in this share of the unique ones, at least one."""
        return max(1, round(share * self.unique))

    def next_uses(self) -> list[NDArray[np.int64]]:
        """By request, for each block: the number of the reference that uses it next, or NEVER."""
        upcoming = np.full(self.unique, NEVER)
        out: list[NDArray[np.int64]] = []
        at = self.references
        for request in reversed(self.requests):
            at -= len(request.blocks)
            out.append(upcoming[request.blocks])
            upcoming[request.blocks] = np.arange(at, at + len(request.blocks))
        return out[::-1]

    def depths(self) -> NDArray[np.int64]:
        """By block: the number of blocks above it."""
        depths = np.zeros(self.unique, np.int64)
        for request in self.requests:
            depths[request.blocks] = np.arange(len(request.blocks))
        return depths


class _Chains:
    """Numbers blocks by (block before, key)."""

    def __init__(self) -> None:
        self._number: dict[tuple[int, object], int] = {}

    def __len__(self) -> int:
        return len(self._number)

    def blocks(self, keys: Iterable[object]) -> Blocks:
        out: list[int] = []
        above = -1
        for key in keys:
            above = self._number.setdefault((above, key), len(self._number))
            out.append(above)
        return np.array(out, np.intp)


def read_trace(path: Path) -> Trace:
    """`InvalidError`, naming the line, for what is neither format."""
    chains = _Chains()
    with path.open() as lines:
        requests = list(_requests(path, lines, chains))
    if not chains:
        raise InvalidError(f"{path} has no full block; is it a trace?")
    return Trace(path.stem, requests, len(chains))


def make_trace(name: str, requests: Iterable[tuple[float, Iterable[object]]]) -> Trace:
    """A trace of (seconds, keys) pairs."""
    chains = _Chains()
    made = [Request(time_s, chains.blocks(keys)) for time_s, keys in requests]
    return Trace(name, made, len(chains))


def _requests(path: Path, lines: Iterable[str], chains: _Chains) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            yield _mooncake(text, chains) if text.startswith("{") else _plain(text, chains)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidError(f"{path}, line {number} is no request: {error!r}") from error


def _mooncake(text: str, chains: _Chains) -> Request:
    record = json.loads(text)
    full = record["input_length"] // BLOCK_TOKENS
    blocks = chains.blocks(record["hash_ids"][:full])
    return Request(float(record["timestamp"]) / 1000, blocks, record.get("stop_reason"))


def _plain(text: str, chains: _Chains) -> Request:
    time_s, _, keys = text.partition(",")
    return Request(float(time_s), chains.blocks(keys.replace(",", " ").split()))
