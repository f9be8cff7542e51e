"""`kvpool demo` as a user runs it: once with the real model, otherwise with a tiny one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvpool.bench import demo
from kvpool.bench.children import ChildError
from kvpool.bench.demo import DemoError, Options, Report, Turn, run
from kvpool.bench.demo_view import View, summary
from kvpool.bench.llama import LlamaConfig
from kvpool.bench.model import ModelUnavailable, fetch_model

TINY = LlamaConfig(
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    hidden=32,
    ffn=48,
    vocab=262,
    rms_eps=1e-5,
    rope_base=1000.0,
)
REAL = "from kvpool.cli import main; main()"
SMALL = f"""
from functools import partial
from kvpool.bench import demo
from kvpool.bench.llama import LlamaConfig
demo.Options = partial(demo.Options, shape=LlamaConfig(**{asdict(TINY)}), answer_tokens=100)
{REAL}
"""
DEADLINE_S = 60.0
FAR_S = 580.0
"""For the real model, on a machine that has other things to do."""


class Demo:
    """A demo in a process of its own, with a temporary folder of its own."""

    def __init__(self, code: str, temporary: Path, *arguments: str) -> None:
        self._temporary = temporary
        self._mark = f"MARK_{uuid.uuid4().hex}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(temporary),
            self._mark: "1",
            "KVPOOL_UNHEARD_OF": "1",  # meant for a daemon of the user's; ours would refuse it
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, "demo", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout_s: float = DEADLINE_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; asserts that nothing is left."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert list(self._temporary.iterdir()) == [], "something is left on disk"
        assert self.processes() == {}, "something is left running"
        return self.process.returncode, out, err

    def processes(self) -> dict[int, str]:
        """Processes that descend from the demo, itself included: number → command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return {number: line for number, line in found.items() if line}

    def child(self, words: str) -> int:
        """The process whose command line has `words`, as soon as it is there."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            for number, line in self.processes().items():
                if words in line and number != self.process.pid:
                    return number
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        raise AssertionError(f"no process with {words!r}: {self.processes()}")

    def wait_for(self, words: str) -> None:
        """Read stdout up to the line with `words`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"{words!r} was not said")


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path: a Unix socket goes there, and its name must fit 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def running() -> Iterator[list[Demo]]:
    """Demos that are ended if a test fails."""
    demos: list[Demo] = []
    yield demos
    for started in demos:
        for number in started.processes():
            os.kill(number, signal.SIGKILL)
        started.process.communicate()


def start(running: list[Demo], temporary: Path, *arguments: str) -> Demo:
    running.append(Demo(SMALL, temporary, "--random-weights", *arguments))
    return running[0]


def shown(monkeypatch: pytest.MonkeyPatch, temporary: Path, options: Options, width: int) -> str:
    """What a demo in this process writes on a console of `width` columns."""
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    file = io.StringIO()
    run(options, View(Console(file=file, width=width, highlight=False)))
    assert list(temporary.iterdir()) == []
    return file.getvalue()


# --- The real model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the one real run reports."""
    fetch_model()
    started = Demo(REAL, tmp_path_factory.mktemp("t"), "--json")
    code, out, err = started.finish(FAR_S)
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def test_the_real_demo_grows_past_a_thousand_tokens(real: dict[str, Any]) -> None:
    assert not real["random_weights"]
    assert len(real["turns"]) >= 6
    assert real["turns"][-1]["prompt_tokens"] > 1000
    assert all(turn["answer_tokens"] <= 32 for turn in real["turns"])


def test_the_real_demo_says_the_same_with_and_without_the_store(real: dict[str, Any]) -> None:
    assert all(turn["tokens_identical"] and turn["bit_equal"] for turn in real["turns"])
    assert real["totals"]["tokens_identical"] and real["totals"]["bit_equal"]
    assert "Lindow" in real["turns"][0]["answer"]


def test_the_real_demo_reuses_more_with_every_turn(real: dict[str, Any]) -> None:
    turns = real["turns"]
    reused = [turn["reused_tokens"] for turn in turns]
    assert reused[0] == 0
    assert reused == sorted(reused)
    chunk = real["chunk_tokens"]
    for before, turn in pairwise(turns):
        assert turn["reused_tokens"] >= before["prompt_tokens"] // chunk * chunk
        assert turn["tier"] == "DRAM"
        assert turn["pulled_bytes"] > 0 and turn["pull_gb_s"] > 0


def test_the_real_demo_saves_time(real: dict[str, Any]) -> None:
    assert real["totals"]["ttft_with_s"] < real["totals"]["ttft_without_s"] / 2


# --- A tiny model ----------------------------------------------------------------------------


def test_random_weights_need_no_model(running: list[Demo], temporary: Path) -> None:
    code, out, err = start(running, temporary, "--turns", "3", "--json").finish()
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["random_weights"] and report["model"] == "random"
    assert [turn["number"] for turn in report["turns"]] == [1, 2, 3]
    assert report["turns"][2]["reused_tokens"] > report["turns"][1]["reused_tokens"] > 0
    assert report["totals"]["tokens_identical"] and report["totals"]["bit_equal"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_output_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, width: int
) -> None:
    options = Options(turns=2, random_weights=True, shape=TINY, answer_tokens=5)
    text = shown(monkeypatch, temporary, options, width)
    assert max(map(len, text.splitlines())) <= width
    assert "Turn 2 of 2" in text
    assert text.count("DRAM") == 2
    assert "All 10 generated tokens are identical both ways" in text
    assert "Nothing is left running" in text
    assert "…" not in text.partition("seed-0")[2], "the table is cut"


def test_without_network_the_demo_says_so_and_takes_random_weights(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    def offline(progress: object) -> Path:
        raise ModelUnavailable("could not fetch it: no network")

    monkeypatch.setattr(demo, "fetch_model", offline)
    text = shown(monkeypatch, temporary, Options(turns=1, shape=TINY, answer_tokens=2), 100)
    assert "could not fetch it: no network" in text
    assert "Going on with seeded random weights" in text
    assert "random (seed-0), chunks of 64 tokens" in text


def test_without_the_packages_of_the_demo_it_takes_random_weights_too(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = shown(monkeypatch, temporary, Options(turns=1, shape=TINY, answer_tokens=2), 100)
    assert "pip install 'kvpool[demo]'" in text
    with pytest.raises(ModelUnavailable):
        run(Options(model=Path("my.gguf")), View(Console(quiet=True)))


def test_a_changed_answer_is_an_error() -> None:
    turn = example_turn(1)
    demo._insist(turn)
    with pytest.raises(DemoError, match=r"turn 1: .* not equal to the bit, .* are identical"):
        demo._insist(replace(turn, bit_equal=False))
    with pytest.raises(DemoError, match=r"turn 1: .* not identical"):
        demo._insist(replace(turn, tokens_identical=False))


def test_the_summary_adds_up() -> None:
    report = Report("m", "r", False, 64, [example_turn(1), example_turn(2)], 12.0)
    text = " ".join(summary(report))
    assert "took 8.0 s without the store and 1.0 s with it: 7.0 s of prefill saved" in text
    assert "1,000 of 2,000 prompt tokens (50%)" in text
    assert "100 MB were pulled and verified at 2.0 GB/s" in text
    assert "All 20 generated tokens" in text


def example_turn(number: int) -> Turn:
    return Turn(
        number=number,
        question="?",
        answer="!",
        prompt_tokens=1000,
        reused_tokens=500,
        answer_tokens=10,
        ttft_without_s=4.0,
        ttft_with_s=0.5,
        tokens_identical=True,
        bit_equal=True,
        pulled_bytes=50_000_000,
        pull_s=0.025,
        tier="DRAM",
    )


# --- Trouble ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"), [("daemon", " serve "), ("prefill", "worker prefill"), ("decode", "decode")]
)
def test_a_crashed_process_ends_the_demo_with_a_clear_error(
    running: list[Demo], temporary: Path, name: str, words: str
) -> None:
    started = start(running, temporary)
    started.wait_for("Turn 1 of")
    os.kill(started.child(words), signal.SIGKILL)
    code, _, err = started.finish()
    assert (code, err) == (1, f"error: the {name} process was ended by SIGKILL\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_demo_can_be_stopped_in_the_middle(
    running: list[Demo], temporary: Path, number: signal.Signals
) -> None:
    started = start(running, temporary)
    started.wait_for("Turn 1 of")
    started.process.send_signal(number)
    code, _, err = started.finish()
    assert (code, err.strip()) == (130, "stopped")


def test_the_demo_can_be_stopped_while_its_processes_start(
    running: list[Demo], temporary: Path
) -> None:
    started = start(running, temporary)
    started.child("demo_worker")
    for _ in range(3):  # impatiently
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    # A signal that comes after all has been tidied up ends Python itself.
    assert started.finish()[0] in (130, -signal.SIGINT)


def test_no_process_outlives_a_demo_that_is_killed(running: list[Demo], temporary: Path) -> None:
    started = start(running, temporary)
    started.wait_for("Turn 1 of")
    started.process.kill()
    end = time.monotonic() + DEADLINE_S
    while (left := started.processes()) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == {}


def test_the_demo_ends_when_its_time_is_over(running: list[Demo], temporary: Path) -> None:
    code, _, err = start(running, temporary, "--timeout", "0").finish()
    assert code == 1
    assert "took too long; see --timeout" in err


def test_a_daemon_that_cannot_start_says_why(temporary: Path) -> None:
    options = Options(random_weights=True, shape=TINY, capacity="1KiB")
    with pytest.raises(ChildError, match=r"the daemon process ended with code 2: .*capacity 1024"):
        run(options, View(Console(quiet=True)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--turns", "99"], "99 turns; the conversation has 1 to 8"),
        (["--model", "nowhere.gguf"], "there is no file nowhere.gguf"),
        (["--model", __file__], "is no readable GGUF file"),
    ],
)
def test_what_the_user_can_correct_exits_with_2(
    running: list[Demo], temporary: Path, arguments: list[str], text: str
) -> None:
    running.append(Demo(SMALL, temporary, *arguments))
    code, out, err = running[0].finish()
    assert (code, out) == (2, "")
    assert text in err
