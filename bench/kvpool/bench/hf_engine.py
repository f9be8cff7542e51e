"""A transformers engine in a process of its own; see `commanded`.

Runs with an interpreter that has torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvpool.bench.commanded import Event, obey
from kvpool.client import connect
from kvpool.client.engines import hf


class Engine:
    """One model behind two engines: with the store at `address`, and without any."""

    def __init__(self, model: str, address: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # threads that share cores with others spin
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        identity: dict[str, Any] = {"name": "SmolLM2-135M", "revision": "bench"}
        self._engines = {
            True: hf.Engine(self._model, connect(address), **identity),
            False: hf.Engine(self._model, None, **identity),
        }
        self._cache: Any = None

    def prefill(self, prompt: Sequence[int], *, store: bool) -> Event:
        """Milliseconds to the first token, and what the store did."""
        import torch

        engine, ids = self._engines[store], torch.tensor([prompt])
        started = time.perf_counter()
        logits, self._cache = engine.prefill(ids)
        token = int(logits.argmax())
        seconds = time.perf_counter() - started
        usage = engine.usage
        return {
            "ttft_ms": seconds * 1000,
            "token": token,
            "pulled": usage.pulled,
            "published": usage.published,
            "trouble": usage.trouble,
        }

    def reuse(self, prompt: Sequence[int]) -> Event:
        """The prompt of the last prefill once more, with its whole chunks kept in this process."""
        import torch
        from transformers import DynamicCache

        size = self._engines[True].namespace.chunk_tokens
        kept, ids = (len(prompt) - 1) // size * size, torch.tensor([prompt])
        # A cache never changes its tensors in place, so the kept ones are good for many prompts.
        prefix = [
            (layer.keys[..., :kept, :].clone(), layer.values[..., :kept, :].clone())
            for layer in self._cache.layers
        ]
        started = time.perf_counter()
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, values) in zip(cache.layers, prefix, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        with torch.no_grad():
            rest = ids[:, kept:]
            logits = self._model(rest, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        token = int(logits.argmax())
        return {"ttft_ms": (time.perf_counter() - started) * 1000, "token": token}


if __name__ == "__main__":
    obey(Engine)
