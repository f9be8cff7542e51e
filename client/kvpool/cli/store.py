"""What the commands that talk to a daemon share: where it is, and how a namespace is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvpool.proto import wire_pb2 as wire
from kvpool.proto.errors import InvalidError
from kvpool.proto.keys import KEY_BYTES
from kvpool.proto.namespace import Namespace

if TYPE_CHECKING:
    from kvpool.client import Client

ADDRESS = "KVPOOL_ADDRESS"
TOKEN = "KVPOOL_TOKEN"


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` --address, --token, --timeout and --json."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout."),
        click.option("--timeout", default=5.0, show_default=True, help="Seconds for each request."),
        click.option("--token", default="", envvar=TOKEN, help=f"Credential (or {TOKEN})."),
        click.option(
            "--address",
            default=None,
            envvar=ADDRESS,
            help=f"unix:PATH or tcp://HOST:PORT (or {ADDRESS}). Default: the daemon of this user.",
        ),
    ):
        command = option(command)
    return command


def reach(address: str | None, token: str, timeout: float) -> Client:
    """A client of the daemon that the options name."""
    from kvpool.client import connect
    from kvpool.store.config import default_socket

    where = address or f"unix:{default_socket()}"
    return connect(where, token=token, name="kvpool command line", deadline_s=timeout)


def show(as_json: bool, value: Any, text: Callable[[], Sequence[str]]) -> None:
    """`value` as one line of JSON, or the lines of `text`."""
    for line in [json.dumps(value)] if as_json else text():
        click.echo(line)


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` the ways to name a prompt in a namespace that the daemon knows."""
    for option in (
        click.option(
            "--model",
            default=None,
            metavar="PATH",
            help="GGUF whose tokenizer reads --text. Default: the model of `kvpool demo`.",
        ),
        click.option("--text", default=None, help="The prompt as text."),
        click.option(
            "--tokens", default=None, help="The prompt as token ids, e.g. 1,2,3 or @FILE."
        ),
        click.option(
            "--namespace",
            default=None,
            help="Digest (or its beginning) or number as `kvpool status` shows it. "
            "Needed if the daemon knows several.",
        ),
    ):
        command = option(command)
    return command


def known_namespace(client: Client, wanted: str | None) -> Namespace:
    """The one namespace that `wanted` names. Raises `InvalidError` with those that there are."""
    (domain,) = client.status()["domains"].values()
    known = domain["namespaces"]
    found = [
        entry
        for entry in known
        if wanted is None or entry["digest"].startswith(wanted) or str(entry["id"]) == wanted
    ]
    if len(found) != 1:
        listed = ", ".join(f"{e['id']}: {e['digest'][:16]} ({e['model']})" for e in known) or "none"
        asked = "no --namespace was given" if wanted is None else f"--namespace {wanted!r}"
        raise InvalidError(f"{asked} and {len(found)} fit; the daemon knows {listed}")
    record = wire.NamespaceRecord.FromString(bytes.fromhex(found[0]["record"]))
    return Namespace.from_record(record)


def prompt_tokens(tokens: str | None, text: str | None, model: str | None) -> list[int]:
    """The prompt that the options give. Raises `InvalidError`."""
    if (tokens is None) == (text is None):
        raise InvalidError("give the prompt either as --tokens or as --text")
    if text is not None:
        return _tokenize(text, model)
    assert tokens is not None
    if tokens.startswith("@"):
        with click.open_file(tokens[1:]) as file:
            tokens = file.read()
    words = tokens.replace(",", " ").split()
    bad = next((word for word in words if not word.isdecimal()), None)
    if bad is not None:
        raise InvalidError(f"{bad!r} is no token id; give integers, e.g. --tokens 1,2,3")
    return [int(word) for word in words]


def _tokenize(text: str, model: str | None) -> list[int]:
    from pathlib import Path

    from kvpool.bench.model import fetch_model, load_tokenizer

    return load_tokenizer(Path(model) if model else fetch_model()).encode(text)


def parse_keys(words: Sequence[str]) -> bytes:
    """Packed keys from hexadecimal ones. Raises `InvalidError`."""
    keys = []
    for word in words:
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise InvalidError(
                f"{word!r} is no key: 64 hexadecimal digits, as `kvpool keys` prints"
            )
        keys.append(key)
    return b"".join(keys)


def size(nbytes: float) -> str:
    """`nbytes` for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")
