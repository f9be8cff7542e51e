"""Which versions of an engine an adapter was tested with; anything else is refused in words."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from kvpool.proto.errors import ConfigError


def require(engine: str, packages: Sequence[str], tested: Sequence[str]) -> str:
    """The installed version of `engine`, which one of `packages` provides.

    `tested` are versions or their beginnings (``0.32`` is every 0.32.x). Raises `ConfigError` if it
    is missing or none of them.
    """
    known = f"the tested versions are {', '.join(tested)}"
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = version.partition("+")[0]
        if not any(f"{numbers}.".startswith(f"{one}.") for one in tested):
            raise ConfigError(f"{engine} {version} is installed, with which nobody tested: {known}")
        return version
    raise ConfigError(f"{engine} is not installed: {known}")
