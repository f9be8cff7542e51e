"""`kvpool bench engine`: time to the first token of real engines, with and without the store.

Every figure is of pairs: what is compared was measured right after one another, on prompts of the
same length that share nothing with any other prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool.bench.report import percentile
from kvpool.proto.errors import ConfigError

T = TypeVar("T")
LENGTHS = (512, 1024, 1536)
"""Tokens of a prompt. Of one more, vLLM computes a single token after a hit: the noise of a forward
pass goes, and what is left of the difference is the cost of the hit."""
YARDSTICKS = {"miss": "no store", "hit": "local hit"}
"""What a case is compared with: the samples of both come in pairs, in the same order."""
HITS = 5
"""How often each prompt is a hit. A hit takes a fifth of a miss, and its cost is smaller."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One time to the first token."""

    prompt_tokens: int
    case: str
    ttft_ms: float


def run(
    engine: str, python: str, lengths: Sequence[int], pairs: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row per length and case. `python` is the interpreter that has the engine's library."""
    if engine == "vllm":
        from kvpool.bench.vllm_bench import samples
    elif engine == "hf":
        from kvpool.bench.hf_bench import samples
    else:
        raise ConfigError(f"no engine {engine!r}; there are: hf, vllm")
    return rows(engine, samples(python, lengths, pairs, progress))


def in_turns(number: int, first: T, second: T) -> tuple[T, T]:
    """The two of pair `number` in the order in which they are measured: neither profits from being
    the second one."""
    return (second, first) if number % 2 else (first, second)


def rows(engine: str, samples: Iterator[Sample]) -> list[dict[str, Any]]:
    """Medians and their spread, in the order of the first sample of each kind. `above_ms` is the
    median difference of the pairs, which depends less on what else the machine does."""
    kinds: dict[tuple[int, str], list[float]] = {}
    for sample in samples:
        kinds.setdefault((sample.prompt_tokens, sample.case), []).append(sample.ttft_ms)
    out: list[dict[str, Any]] = []
    for (prompt_tokens, case), times in sorted(kinds.items(), key=lambda item: item[0][0]):
        yardstick = kinds.get((prompt_tokens, YARDSTICKS.get(case, "")), [])
        above = sorted(a - b for a, b in zip(times, yardstick, strict=False))
        out.append(
            {
                "engine": engine,
                "prompt_tokens": prompt_tokens,
                "case": case,
                "ttft_ms_p50": round(percentile(times, 0.5), 2),
                "ttft_ms_p10": round(percentile(times, 0.1), 2),
                "ttft_ms_p90": round(percentile(times, 0.9), 2),
                "pairs": len(times),
                "above_ms": round(percentile(above, 0.5), 2) if above else None,
                "above_ms_95": _interval(above) if above else None,
            }
        )
    return out


def _interval(ordered: Sequence[float]) -> str:
    """Where the median of all differences lies, with 95 %: of n, between the one of rank
    n/2 - 0.98 √n from below and from above (normal approximation of the binomial distribution)."""
    rank = max(1, math.floor(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return f"{ordered[rank - 1]:.0f} to {ordered[-rank]:.0f}"
