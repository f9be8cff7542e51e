"""The commands that look into a running daemon, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvpool.bench.processes import running_daemon
from kvpool.cli import cli, main
from kvpool.client import Namespace, Session, connect, portable

CHUNK = 16
PROMPT = list(range(100, 100 + 5 * CHUNK + 3))  # five full chunks and a tail


def namespace(model: str = "made-up") -> Namespace:
    return Namespace(
        model=model,
        revision="1",
        kv_dtype="float32",
        kv_scales="none",
        layout="portable",
        chunk_tokens=CHUNK,
        parts=(
            portable("all", layers=["0", "1"], kv_heads=1, head_dim=8, itemsize=4, tokens=CHUNK),
        ),
        key_scheme="tokens",
        adapter="none",
        rope="default",
        salt="none",
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_daemon("--capacity", "64MiB") as daemon:
        yield daemon.address


@pytest.fixture
def session(address: str) -> Iterator[Session]:
    """Three of the prompt's five chunks are stored."""
    with connect(address) as client:
        session = client.open(namespace())
        payloads = list(np.ones((3, session.namespace.parts[0].nbytes), np.uint8))
        assert session.publish(PROMPT, payloads).stored
        yield session
        client.clear()


def run(*words: str, address: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--address", address], catch_exceptions=False)


def answer(*words: str, address: str) -> Any:
    result = run(*words, "--json", address=address)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


TOKENS = ",".join(map(str, PROMPT))


def test_ping_measures_round_trips(address: str) -> None:
    told = answer("ping", "--count", "3", address=address)
    assert told["round_trips"] == 3 and 0 < told["p50_us"] <= told["max_us"]


def test_status_counts_what_was_published(address: str, session: Session) -> None:
    (domain,) = answer("status", address=address)["domains"].values()
    assert domain["chunks"] == 3
    assert domain["namespaces"][0]["model"] == "made-up"
    assert "3 chunks" in run("status", address=address).output


def test_keys_lists_every_key_once_whatever_the_page(address: str, session: Session) -> None:
    stored = session.keys(PROMPT)[: 3 * 32]
    expected = {stored[i : i + 32].hex() for i in range(0, len(stored), 32)}
    for page in ("1", "2", "1000"):
        listed = run("keys", "--page", page, address=address).output.split()
        assert len(listed) == 3 and set(listed) == expected
    assert len(answer("keys", "--limit", "2", address=address)["keys"]) == 2


def test_explain_shows_tiers_up_to_the_first_miss_and_why(address: str, session: Session) -> None:
    chunks = answer("explain", "--tokens", TOKENS, address=address)["chunks"]
    assert [chunk["outcome"] for chunk in chunks] == ["HIT"] * 3 + ["MISS"] * 2
    assert [chunk["tier"] for chunk in chunks] == ["DRAM"] * 3 + ["none"] * 2
    assert chunks[3]["reason"] == "NEVER_STORED"
    assert chunks[0]["parts"] == ["all"] and chunks[0]["nbytes"] > 2048
    text = run("explain", "--tokens", TOKENS, address=address).output
    assert "MISS: never stored" in text
    assert "1 more chunks are behind this gap" in text
    assert "partial tail, not stored" in text


def test_explain_says_deleted_for_what_was_deleted(address: str, session: Session) -> None:
    session.delete(session.keys(PROMPT)[2 * 32 : 3 * 32])
    chunks = answer("explain", "--tokens", TOKENS, address=address)["chunks"]
    assert chunks[2]["reason"] == "DELETED"


def test_rm_deletes_by_prompt_and_by_key(address: str, session: Session) -> None:
    key = session.keys(PROMPT)[2 * 32 : 3 * 32].hex()
    assert answer("rm", key, address=address) == {"deleted": 1, "absent": 0}
    assert answer("rm", "--tokens", TOKENS, address=address) == {"deleted": 2, "absent": 3}
    assert session.match(PROMPT).chunks == 0


def test_clear_asks_and_then_deletes_everything(address: str, session: Session) -> None:
    refused = CliRunner().invoke(cli, ["clear", "--address", address], input="n\n")
    assert refused.exit_code != 0
    assert session.match(PROMPT, peek=True).chunks == 3
    assert answer("clear", "--yes", address=address) == {"deleted": 3}
    assert session.match(PROMPT, peek=True).chunks == 0


def test_several_namespaces_must_be_told_apart(
    address: str, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(address) as client:
        other = client.open(namespace("another"))
        with pytest.raises(SystemExit) as stopped:
            main(["explain", "--tokens", "1", "--address", address])
        assert stopped.value.code == 2
        assert "another" in capsys.readouterr().err
        digest = other.namespace.digest("default").hex()
        told = answer("explain", "--tokens", TOKENS, "--namespace", digest[:12], address=address)
        assert [chunk["outcome"] for chunk in told["chunks"]] == ["MISS"] * 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "--tokens", "1,x"], "'x' is no token id"),
        (["explain"], "either as --tokens or as --text"),
        (["rm"], "say what to delete"),
        (["rm", "abc"], "'abc' is no key"),
        (["ping", "--address", "http://x"], "http://x"),
    ],
)
def test_wrong_values_are_named_and_exit_with_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--json"])
    assert stopped.value.code == 2
    told = json.loads(capsys.readouterr().err)
    assert said in told["text"] and told["fault"] == "yours"


def test_an_absent_daemon_exits_with_1_and_names_the_address(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["status", "--address", f"unix:{tmp_path}/none.sock"])
    assert stopped.value.code == 1
    assert "none.sock" in capsys.readouterr().err


def test_writers_and_readers_that_never_meet_are_warned_about(address: str) -> None:
    with connect(address) as client:
        writer, reader = (client.open(namespace(model)) for model in ("written", "read"))
        prompt = list(range(20 * CHUNK))
        payloads = list(np.ones((20, writer.namespace.parts[0].nbytes), np.uint8))
        assert writer.publish(prompt, payloads).stored
        for _ in range(20):
            assert reader.match(prompt).chunks == 0
        told = run("status", address=address).output
        assert "writers and readers use different namespaces" in told
        for session in (writer, reader):
            assert session.namespace.digest("default").hex()[:16] in told
        client.clear()
