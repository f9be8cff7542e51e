"""One engine of the demo, in a process of its own: commands on stdin, events on stdout.

Both are JSON objects, one a line. The first line is a `Setup`; the others name a method of `Worker`
in `do`, and its arguments. The end of stdin ends the process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.bench.engine import CHUNK_TOKENS, Engine, namespace_for
from kvpool.bench.llama import LlamaConfig
from kvpool.bench.model import Model, load_model, random_model
from kvpool.client import connect
from kvpool.proto.errors import KvpoolError

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know first."""

    address: str  # of the store
    name: str  # of this worker, shown by the store
    model: str  # path of a GGUF file; empty: random weights
    shape: dict[str, Any]  # of random weights: the fields of `LlamaConfig`

    def load(self) -> Model:
        if self.model:
            return load_model(Path(self.model), block_tokens=CHUNK_TOKENS)
        return random_model(config=LlamaConfig(**self.shape), block_tokens=CHUNK_TOKENS)


class Worker:
    """Answers prompts with and without the store, or fills the store for others."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.load()
        self._session = connect(setup.address, name=setup.name).open(namespace_for(self._model))
        self._alone = Engine(self._model)
        self._engine = Engine(self._model, self._session)
        self._alone.prefill(range(CHUNK_TOKENS))  # so that no measurement pays for first touches

    def ready(self) -> Iterator[Event]:
        yield {"model": self._model.name, "revision": self._model.revision}

    def encode(self, text: str) -> Iterator[Event]:
        yield {"tokens": self._model.tokenizer.encode(text)}

    def publish(self, tokens: Sequence[int]) -> Iterator[Event]:
        """Bring the full chunks of `tokens` into the store."""
        self._engine.publish(tokens)
        yield {"usage": asdict(self._engine.usage)}

    def answer(
        self, tokens: Sequence[int], limit: int, store: bool, will_continue: bool
    ) -> Iterator[Event]:
        """Prefill `tokens` and generate up to `limit`: the text so far for each, then the rest."""
        engine = self._engine if store else self._alone
        words = self._model.tokenizer
        logits = engine.prefill(tokens)
        answer: list[int] = []
        for token in engine.generate(logits, limit, {words.turn_end}):
            answer.append(token)
            yield {"text": words.decode([t for t in answer if t != words.turn_end])}
        engine.end_turn(will_continue=will_continue)
        yield {
            "answer": answer,
            "ended": answer[-1] == words.turn_end,
            "logits": hashlib.sha256(logits.tobytes()).hexdigest(),
            "usage": asdict(engine.usage),
            "tiers": self._tiers(tokens[: engine.usage.pulled]),
        }

    def _tiers(self, tokens: Sequence[int]) -> list[str]:
        """Where the chunks of `tokens` are."""
        return sorted({chunk.tier for chunk in self._session.explain(tokens)}) if tokens else []


def main() -> None:
    """Runs a worker until its stdin ends. An error of ours is an event with its code."""
    try:
        worker = Worker(Setup(**json.loads(sys.stdin.readline())))
        _emit(worker.ready())
        for line in sys.stdin:
            command = json.loads(line)
            _emit(getattr(worker, command.pop("do"))(**command))
    except KvpoolError as error:
        _emit(iter([{"error": error.code, "text": str(error)}]))


def _emit(events: Iterator[Event]) -> None:
    for event in events:
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
