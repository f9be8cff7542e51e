"""A vLLM engine in a process of its own, made by a `Setup`; see `commanded`.

Runs with the interpreter that has vLLM, which is seldom ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.bench.commanded import Event, obey


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine: vLLM's own options, and those of the store's connector (None: no store)."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] | None = None
    """Of `KVTransferConfig`, whole."""


class Engine:
    """Runs prompts of token ids with greedy decoding."""

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**setup.transfer) if setup.transfer else None
        self._llm = LLM(
            model=setup.model,
            kv_transfer_config=transfer,
            enforce_eager=True,
            disable_log_stats=False,
            **setup.options,
        )
        self._engine: Any = self._llm.llm_engine
        self._count = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        salts: Sequence[str | None] | None = None,
        params: dict[str, Any] | None = None,
        abort_after: int | None = None,
    ) -> Event:
        """All prompts at once: their tokens, and milliseconds to the first one of each.

        `params` are `kv_transfer_params`; with `abort_after` everything is aborted after so many
        steps of the engine.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        started = time.perf_counter()
        names = []
        for number, prompt in enumerate(prompts):
            self._count += 1
            names.append(str(self._count))
            request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
            if salts and salts[number]:
                request["cache_salt"] = salts[number]
            self._engine.add_request(names[-1], request, sampling)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        cached: dict[str, int] = {}
        first: dict[str, float] = {}
        steps = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                name = output.request_id
                tokens[name] = list(output.outputs[0].token_ids)
                cached[name] = output.num_cached_tokens or 0
                if tokens[name] and name not in first:
                    first[name] = (time.perf_counter() - started) * 1000
            steps += 1
            if steps == abort_after:
                self._engine.abort_request(names)
        return {
            "tokens": [tokens[name] for name in names],
            "cached": [cached.get(name) for name in names],
            "ttft_ms": [first.get(name) for name in names],
        }

    def forget(self) -> Event:
        """Empties vLLM's own prefix cache."""
        return {"forgotten": self._llm.reset_prefix_cache()}

    def clear(self) -> Event:
        """Empties vLLM's own prefix cache and has the connector empty the store's."""
        return {"cleared": self._llm.reset_prefix_cache(reset_connector=True)}

    def metrics(self) -> Event:
        """vLLM's counters by name."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found


if __name__ == "__main__":
    obey(lambda **setup: Engine(Setup(**setup)))
