"""`kvpool serve`: runs a daemon. Its options are the fields of `ServeConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` one option per field of `ServeConfig`, and `--config PATH`.

    An option that was not given is None, so that the environment and the file can have their say.
    """
    from kvpool.store.config import flag_of, settings

    for setting in reversed(settings()):
        names = [setting.name, flag_of(setting.name)]
        flag = isinstance(setting.default, bool)
        if flag:
            names[1] += f"/--no-{setting.name.replace('_', '-')}"
        shown = "" if setting.default in ("", 0) or flag else f" Default: {setting.default}."
        text = setting.metadata["help"] + shown
        kind = None if flag else click.STRING
        option = click.option(*names, default=None, type=kind, metavar=_metavar(flag), help=text)
        command = option(command)
    path = click.option("--config", "path", metavar="PATH", help="TOML file with the same keys.")
    return path(command)


def _metavar(flag: bool) -> str | None:
    return None if flag else "VALUE"


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were on the command line."""
    return {name: value for name, value in options.items() if value is not None}


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Say that it is ready as a JSON object.")
def serve(path: str | None, as_json: bool, **options: Any) -> None:
    """Run a daemon until SIGTERM or Ctrl-C."""
    from kvpool.store.config import load
    from kvpool.store.daemon import serve as run

    run(load(given(options), path=path).config, announce_json=as_json)
