"""Processes of ours: what they say arrives, why they fail is told, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.bench import children as module
from kvpool.bench.children import Child, ChildError, Children
from kvpool.proto.errors import InvalidError

ECHO = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
"""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Children]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Children() as children:
        children.deadline = time.monotonic() + 30
        yield children
    assert list(tmp_path.iterdir()) == []


def start(children: Children, code: str, name: str = "test") -> Child:
    return children.start(name, ["-c", code])


def test_messages_of_any_size_arrive_in_order(children: Children) -> None:
    echo = start(children, ECHO)
    for size in (0, 1, 1000):
        echo.send(number=size, text="é\n" * size)
    for size in (0, 1, 1000):
        assert children.receive(echo) == {"number": size, "text": "é\n" * size}


def test_a_child_gets_one_blas_thread_and_no_settings_of_a_daemon(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_TCP", "0.0.0.0:1")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = children.receive(start(children, code))
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    assert not any(name.startswith("KVPOOL_") for name in environment)


def test_the_last_words_of_a_child_that_fails_are_told(children: Children) -> None:
    child = start(children, "import sys; print('a\\nb', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ChildError, match=r"the test process ended with code 3: b$"):
        children.receive(child)


def test_of_an_error_in_json_the_text_is_told(children: Children) -> None:
    child = start(children, """import sys; sys.exit('{"error": "X", "text": "no room"}')""")
    with pytest.raises(ChildError, match=r"ended with code 1: no room$"):
        children.receive(child)


def test_an_error_that_a_child_reports_is_raised_here(children: Children) -> None:
    code = (
        """import time; print('{"error": 1, "text": "never right"}', flush=True); time.sleep(60)"""
    )
    with pytest.raises(InvalidError, match="never right"):
        children.receive(start(children, code))


def test_the_end_of_another_child_is_noticed_with_what_it_reported(children: Children) -> None:
    waiting = start(children, ECHO, "waiting")
    start(children, """print('{"error": 1, "text": "never right"}')""", "other")
    with pytest.raises(InvalidError, match="never right"):
        children.receive(waiting)


def test_the_end_of_another_child_is_noticed_while_this_one_talks_on(children: Children) -> None:
    """A demo whose daemon was killed went on to its summary, because its engines kept answering."""
    talking = start(children, """while True: print('{"more": 1}', flush=True)""", "talking")
    assert children.receive(talking) == {"more": 1}
    start(children, "", "other").reap(10)
    with pytest.raises(ChildError, match="other"):
        for _ in range(3):
            children.receive(talking)


def test_a_message_to_a_child_that_has_ended_is_an_error(children: Children) -> None:
    child = start(children, "")
    with pytest.raises(ChildError, match="ended with code 0"):
        for _ in range(1000):
            child.send(text="x" * 1000)
            time.sleep(0.01)


def test_patience_ends_with_the_deadline(children: Children) -> None:
    slow = start(children, "import sys; print('still at it', file=sys.stderr)" + ECHO, "slow")
    slow.send(text="ready?")
    children.receive(slow)
    children.deadline = time.monotonic() + 0.1
    with pytest.raises(ChildError, match="the slow process took too long: still at it"):
        children.receive(slow)


def test_a_child_that_will_not_end_is_killed(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += """print('{"pid": %d}' % os.getpid(), flush=True); time.sleep(60)"""
    with Children() as others:
        number = others.receive(start(others, code))["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_signals_are_noted_raised_where_we_wait_and_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Children() as children:
        child = start(children, ECHO)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        children.receive(child)
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt), Children():
        os.kill(os.getpid(), signal.SIGTERM)  # nobody waits any more: raised at the end
