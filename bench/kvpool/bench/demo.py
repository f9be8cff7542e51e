"""`kvpool demo`: a conversation with and without the store, in real processes.

A daemon, a prefill process and a decode process run side by side. For each turn the decode process
first answers alone, prefilling everything. Then both answer with the store: the prefill process
takes the chunks of earlier turns from it and publishes the new ones, the decode process pulls all
of them and generates. Only one of the two works at a time, so that neither disturbs the other's
figures.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvpool.bench import conversation
from kvpool.bench.children import Child, Children
from kvpool.bench.demo_view import View
from kvpool.bench.demo_worker import Setup
from kvpool.bench.engine import CHUNK_TOKENS
from kvpool.bench.llama import LlamaConfig
from kvpool.bench.model import (
    ASSISTANT_PROMPT,
    SMOLLM2_135M,
    TURN_END,
    ModelUnavailable,
    fetch_model,
    render_turn,
)
from kvpool.proto.errors import InvalidError, KvpoolError

TURNS_MAX = len(conversation.USER_TURNS)
_SERVE = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: even if we are killed, it ends
from kvpool.cli import main
main()
"""


class DemoError(KvpoolError):
    """The demo's promise is broken: the store changed an answer. The text says where."""

    fault = "theirs"


@dataclass(frozen=True, slots=True)
class Options:
    """What the demo is told."""

    turns: int = 0  # 0: as many as fit into three minutes
    model: Path | None = None  # a GGUF file of one's own
    random_weights: bool = False
    shape: LlamaConfig = SMOLLM2_135M  # of random weights
    answer_tokens: int = 32  # at most, per turn
    timeout_s: float = 600.0  # for everything after the download
    capacity: str = "256MiB"  # of the store

    def __post_init__(self) -> None:
        if not 0 <= self.turns <= TURNS_MAX:
            raise InvalidError(f"{self.turns} turns; the conversation has 1 to {TURNS_MAX}")


@dataclass(frozen=True, slots=True)
class Turn:
    """One row of the table."""

    number: int
    question: str
    answer: str
    prompt_tokens: int
    reused_tokens: int  # in the store when the turn began: nobody computed them
    answer_tokens: int
    ttft_without_s: float  # time to the first token
    ttft_with_s: float
    tokens_identical: bool
    bit_equal: bool  # logits of the first token, with and without the store
    pulled_bytes: int  # by both processes
    pull_s: float
    tier: str

    @property
    def pull_gb_s(self) -> float:
        """10⁹ bytes per second; 0 if nothing was pulled."""
        return self.pulled_bytes / self.pull_s / 1e9 if self.pull_s else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What the demo has seen."""

    model: str
    revision: str
    random_weights: bool
    chunk_tokens: int
    turns: list[Turn]
    seconds: float  # after the download

    def as_json(self) -> dict[str, Any]:
        turns = [{**asdict(turn), "pull_gb_s": turn.pull_gb_s} for turn in self.turns]
        return {**asdict(self), "turns": turns, "totals": asdict(self.totals)}

    @property
    def totals(self) -> Totals:
        turns = self.turns
        return Totals(
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            reused_tokens=sum(turn.reused_tokens for turn in turns),
            answer_tokens=sum(turn.answer_tokens for turn in turns),
            ttft_without_s=sum(turn.ttft_without_s for turn in turns),
            ttft_with_s=sum(turn.ttft_with_s for turn in turns),
            tokens_identical=all(turn.tokens_identical for turn in turns),
            bit_equal=all(turn.bit_equal for turn in turns),
            pulled_bytes=sum(turn.pulled_bytes for turn in turns),
            pull_s=sum(turn.pull_s for turn in turns),
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """All turns together."""

    prompt_tokens: int
    reused_tokens: int
    answer_tokens: int
    ttft_without_s: float
    ttft_with_s: float
    tokens_identical: bool
    bit_equal: bool
    pulled_bytes: int
    pull_s: float


def run(options: Options, view: View) -> Report:
    """Run the demo. Nothing of it is left afterwards, whatever happens.

    REQUIRES: the main thread. Raises `InvalidError` for options, `ModelUnavailable` for a model
    of one's own, `ChildError` if a process fails, `DemoError` if the store changes an answer, and
    `KeyboardInterrupt` if it is told to stop.
    """
    with Children("see --timeout") as children:
        setup = _choose_model(options, view, children)
        texts = _texts(options, bool(setup.model))
        begun = time.monotonic()
        children.deadline = begun + options.timeout_s
        with view.working("starting", "a daemon, a prefill process, a decode process"):
            engines = _start(children, options, setup)
        turns = []
        for number, text in enumerate(texts, 1):
            turns.append(engines.turn(number, len(texts), text, options.answer_tokens, view))
            view.turn_done(turns[-1])
            _insist(turns[-1])
        report = Report(
            engines.model,
            engines.revision,
            not setup.model,
            CHUNK_TOKENS,
            turns,
            time.monotonic() - begun,
        )
    view.done(report)
    return report


# --- The model -------------------------------------------------------------------------------


def _choose_model(options: Options, view: View, children: Children) -> Setup:
    """Which weights the processes load; fetches them if need be."""
    path = "" if options.random_weights else _model_path(options, view, children)
    address = f"unix:{children.folder / 'demo.sock'}"
    return Setup(address, name="", model=path, shape=asdict(options.shape))


def _model_path(options: Options, view: View, children: Children) -> str:
    """Path of a GGUF file; empty if there is none to be had."""
    try:
        for package in ("gguf", "tokenizers"):
            if importlib.util.find_spec(package) is None:
                raise ModelUnavailable(
                    f"the package {package} is not installed; pip install 'kvpool[demo]' brings it"
                )
        if options.model is not None:
            if not options.model.is_file():
                raise InvalidError(f"there is no file {options.model}")
            return str(options.model)
        return str(_fetch(view, children))
    except ModelUnavailable as error:
        if options.model is not None:
            raise
        view.fell_back(str(error))
        return ""


def _fetch(view: View, children: Children) -> Path:
    with view.fetching() as advance:

        def progress(done: int, total: int) -> None:
            children.check()
            advance(done, total)

        return fetch_model(progress)


def _texts(options: Options, real: bool) -> tuple[str, ...]:
    """What the user will say. Random weights read bytes, of which a text has five times as many
    as it has tokens: they get less of it."""
    article = conversation.ARTICLE if real else conversation.SHORT_ARTICLE
    turns = options.turns or (TURNS_MAX if real else 6)
    return conversation.user_turns(article)[:turns]


# --- The processes ---------------------------------------------------------------------------


def _start(children: Children, options: Options, setup: Setup) -> Engines:
    """A daemon and two engines, ready."""
    serve = ["-c", _SERVE, "serve", "--json", "--log-level", "warning"]
    serve += ["--socket", setup.address.removeprefix("unix:"), "--capacity", options.capacity]
    daemon = children.start("daemon", serve)
    prefill, decode = (_start_worker(children, setup, name) for name in ("prefill", "decode"))
    for child in (daemon, prefill):
        children.receive(child)
    ready = children.receive(decode)
    return Engines(children, prefill, decode, ready["model"], ready["revision"])


def _start_worker(children: Children, setup: Setup, name: str) -> Child:
    worker = children.start(name, ["-m", "kvpool.bench.demo_worker", name])
    worker.send(**asdict(replace(setup, name=f"demo {name}")))
    return worker


class Engines:
    """The two engine processes and the conversation that they are in."""

    def __init__(
        self, children: Children, prefill: Child, decode: Child, model: str, revision: str
    ) -> None:
        self.model = model
        self.revision = revision
        self._children = children
        self._prefill = prefill
        self._decode = decode
        self._history = self._encode(render_turn("system", conversation.SYSTEM))

    def turn(self, number: int, turns: int, text: str, limit: int, view: View) -> Turn:
        """Both ways to answer `text`; the conversation goes on with the answer."""
        prompt = self._history + self._encode(render_turn("user", text) + ASSISTANT_PROMPT)
        *pasted, question = text.splitlines()
        question = f"[…] {question}" if pasted else question
        view.turn_begins(number, turns, question, len(prompt))
        command = {"tokens": prompt, "limit": limit, "will_continue": number < turns}
        with view.working("without the store", f"prefilling {len(prompt):,} tokens") as show:
            alone = self._answer({**command, "store": False}, time.monotonic(), show)
        with view.working("with the store", "prefilling what is new") as show:
            begun = time.monotonic()
            self._prefill.send(do="publish", tokens=prompt)
            published = self._children.receive(self._prefill)["usage"]
            shared = self._answer({**command, "store": True}, begun, show)
        end = [] if shared.ended else self._encode(TURN_END)
        self._history = prompt + shared.tokens + end + self._encode("\n")
        return Turn(
            number=number,
            question=question,
            answer=shared.text,
            prompt_tokens=len(prompt),
            reused_tokens=published["matched"],
            answer_tokens=len(shared.tokens),
            ttft_without_s=alone.ttft_s,
            ttft_with_s=shared.ttft_s,
            tokens_identical=shared.tokens == alone.tokens,
            bit_equal=shared.logits == alone.logits,
            pulled_bytes=published["pulled_bytes"] + shared.usage["pulled_bytes"],
            pull_s=published["pull_s"] + shared.usage["pull_s"],
            tier=shared.tier,
        )

    def _answer(self, command: dict[str, Any], begun: float, show: Any) -> Answer:
        """Let the decode process answer; the turn began at `begun`."""
        self._decode.send(do="answer", **command)
        ttft_s, text = 0.0, ""
        for event in self._events():
            ttft_s = ttft_s or time.monotonic() - begun
            if "text" not in event:
                return Answer(
                    text,
                    event["answer"],
                    event["ended"],
                    event["logits"],
                    ttft_s,
                    event["usage"],
                    " + ".join(event["tiers"]),
                )
            text = event["text"]
            show(text)
        raise AssertionError("events end with an answer or an error")

    def _events(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self._children.receive(self._decode)

    def _encode(self, text: str) -> list[int]:
        self._decode.send(do="encode", text=text)
        tokens: list[int] = self._children.receive(self._decode)["tokens"]
        return tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """What the decode process said, one way."""

    text: str
    tokens: list[int]
    ended: bool  # the last token is the end of a turn
    logits: str  # sha256 of those of the first token
    ttft_s: float
    usage: dict[str, Any]  # `engine.Usage`
    tier: str


def _insist(turn: Turn) -> None:
    """Raises `DemoError` unless the store saved nothing but time."""
    if not (turn.tokens_identical and turn.bit_equal):
        raise DemoError(
            f"turn {turn.number}: with the store the first token's logits are "
            f"{'' if turn.bit_equal else 'not '}equal to the bit, and the tokens are "
            f"{'' if turn.tokens_identical else 'not '}identical"
        )
