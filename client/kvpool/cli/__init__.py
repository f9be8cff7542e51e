"""The command line. A command is one file here and one line in `COMMANDS`, imported when used."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from kvpool.proto.errors import InvalidError, KvpoolError

COMMANDS = {
    "bench": "kvpool.cli.bench:bench",
    "clear": "kvpool.cli.clear:clear",
    "config": "kvpool.cli.config:config",
    "demo": "kvpool.cli.demo:demo",
    "explain": "kvpool.cli.explain:explain",
    "fsck": "kvpool.cli.fsck:fsck",
    "keys": "kvpool.cli.keys:keys",
    "ping": "kvpool.cli.ping:ping",
    "rm": "kvpool.cli.rm:rm",
    "serve": "kvpool.cli.serve:serve",
    "status": "kvpool.cli.status:status",
    "warm": "kvpool.cli.warm:warm",
}

EXIT_THEIRS = 1
EXIT_YOURS = 2
"""The caller can avoid the error by calling differently; bad usage exits so as well."""


class LazyGroup(click.Group):
    """Knows its commands by name and imports one only when it is run or shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib import metadata  # takes longer to import than the rest of this

        click.echo(f"kvpool {metadata.version('kvpool')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """A centralised KV-cache store for LLM inference."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, 1 (the other side failed) or 2 (call it differently).

    Errors are one line on stderr, or one JSON object if `--json` was among the arguments.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(cli.main(words, prog_name="kvpool", standalone_mode=False))
    except KvpoolError as error:
        _fail(error, "--json" in words)
    except click.UsageError as error:
        if "--json" in words:
            _fail(InvalidError(error.format_message()), True)
        error.show()
        sys.exit(EXIT_YOURS)
    except click.ClickException as error:
        _fail(InvalidError(error.format_message()), "--json" in words)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)  # as shells report an interrupt


def _fail(error: KvpoolError, as_json: bool) -> None:
    if as_json:
        kind = type(error).__name__
        click.echo(json.dumps({"error": kind, "fault": error.fault, "text": str(error)}), err=True)
    else:
        click.echo(f"error: {error}", err=True)
    sys.exit(EXIT_YOURS if error.fault == "yours" else EXIT_THEIRS)
