"""How the words of a configuration become values: sizes, durations, addresses.

Each raises `ConfigError` with the value and the accepted forms. Values come as text (environment,
flags) or as TOML's own types.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvpool.proto.errors import ConfigError, InvalidError
from kvpool.transfer.sockets import TcpAddress, parse

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}


def parse_size(value: str | float) -> int:
    """Bytes: 1073741824, 1e9, 512MiB, 1.5 GiB, 10GB. Raises `ConfigError`."""
    text = str(value).strip()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    try:
        unit = _UNITS[text[len(number) :].strip().lower()]
        exact = int(number) * unit if number.strip().isdigit() else int(float(number) * unit)
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{value!r} is no size; write 10GiB, 512MiB, 1e9 or bytes") from None
    if exact < 0:
        raise ConfigError(f"{value!r} is no size: it is negative")
    return exact


def parse_count(value: Any) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ConfigError(f"{value!r} is no number; write 0, 1, 2, …")
    return number


def parse_seconds(value: Any) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or isinstance(value, bool):
        raise ConfigError(f"{value!r} is no duration; write seconds, e.g. 30 or 0.5")
    return seconds


def parse_share(value: Any) -> float:
    try:
        share = float(str(value))
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1 or isinstance(value, bool):
        raise ConfigError(f"{value!r} is no share; write a number from 0 to 1")
    return share


def parse_truth(value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{value!r} is neither true nor false")
    return words[str(value).lower()]


def parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is no text")
    return value


def parse_host_port(value: Any) -> str:
    text = parse_text(value)
    if text:
        host_port(text)
    return text


def host_port(text: str) -> TcpAddress:
    """The parts of HOST:PORT. Raises `ConfigError`."""
    try:
        address = parse(f"tcp://{text}")
    except InvalidError:
        raise ConfigError(
            f"{text!r} is no address; write HOST:PORT, e.g. 127.0.0.1:7070 or [::1]:7070"
        ) from None
    assert isinstance(address, TcpAddress)
    return address


def parse_one_of(accepted: Iterable[str]) -> Callable[[Any], str]:
    def parse_word(value: Any) -> str:
        if value not in accepted:
            raise ConfigError(f"{value!r} is none of {', '.join(accepted)}")
        return str(value)

    return parse_word


def read_toml(path: str) -> dict[str, Any]:
    """The tables of the file at `path`."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def suggestion(key: str, names: Iterable[str], prefix: str = "") -> str:
    """What may have been meant by `key`, or all that is accepted."""
    names = list(names)
    close = difflib.get_close_matches(key, names, n=1)
    shown = [f"{prefix}{name}".upper() if prefix else name for name in close or names]
    return f"did you mean {shown[0]!r}?" if close else f"accepted are {', '.join(shown)}"
