"""Imports what our tests use of SGLang, where there is no torchvision and warnings are errors."""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Anything(ModuleType):
    """A module in which everything exists and is empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")


def import_sglang() -> None:
    """Makes later imports of SGLang's cache modules work, and silent."""
    _stand_in_for_torchvision()
    with warnings.catch_warnings():  # the libraries that SGLang pulls in use deprecated things
        warnings.simplefilter("ignore")
        for module in ("memory_pool", "pool_host.mha", "pool_host.mla", "storage.backend_factory"):
            import_module(f"sglang.srt.mem_cache.{module}")
    # Host pools leave 10 GiB of the machine free; ours have some KiB.
    pools: Any = import_module("sglang.srt.mem_cache.pool_host.base")
    pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _stand_in_for_torchvision() -> None:
    """SGLang imports it for images alone."""
    if find_spec("torchvision") is not None:
        return
    # transformers looks once whether it is there, and must not take ours for it.
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()
    for name in ("", ".transforms", ".transforms.functional", ".io"):
        sys.modules[f"torchvision{name}"] = _Anything(f"torchvision{name}")
