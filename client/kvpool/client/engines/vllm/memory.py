"""vLLM's KV cache as bytes: a page per layer and block.

Pages in host memory are read and written where they are. Those of a device are staged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.proto.errors import ConfigError
from kvpool.transfer.copying import Bytes
from kvpool.transfer.paging import make_huge


class Memory(Protocol):
    """The pages of some layers."""

    def landing(self, blocks: Sequence[int]) -> list[Bytes]:
        """Where the pages of `blocks` are to be written: layer by layer, block by block."""

    def landed(self, blocks: Sequence[int], pages: Sequence[Bytes]) -> None:
        """They were written; `pages` is what `landing` gave. Afterwards the engine may use them."""

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        """Copies the pages of `blocks`, in the order of `landing`."""


def memory_of(layers: Sequence[Any], blocks: int, page_bytes: int) -> Memory:
    """The pages of `layers`, tensors of `blocks` blocks each. In host memory they become huge ones:
    loads are a sixth faster then. Raises `ConfigError`."""
    pages = [_pages(layer, blocks) for layer in layers]
    for page in pages:
        if page.shape[1] != page_bytes:
            raise ConfigError(f"a page has {page.shape[1]} bytes where {page_bytes} are expected")
    if all(page.device.type == "cpu" for page in pages):
        host = [page.numpy() for page in pages]
        for memory in host:
            make_huge(memory)
        return HostMemory(host)
    return DeviceMemory(pages)


class HostMemory:
    """Pages that the client may write to directly."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        """`layers`: (blocks, page bytes) each."""
        self._layers = layers

    def landing(self, blocks: Sequence[int]) -> list[Bytes]:
        return [layer[block] for layer in self._layers for block in blocks]

    def landed(self, blocks: Sequence[int], pages: Sequence[Bytes]) -> None:
        pass

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        at = 0
        for layer in self._layers:
            for block in blocks:
                page = layer[block]
                np.copyto(into[at : at + page.size], page)
                at += page.size


class DeviceMemory:
    """Pages of a device, as tensors (blocks, page bytes) of bytes."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def landing(self, blocks: Sequence[int]) -> list[Bytes]:
        count = len(self._layers) * len(blocks)
        return list(np.empty((count, self._layers[0].shape[1]), np.uint8))

    def landed(self, blocks: Sequence[int], pages: Sequence[Bytes]) -> None:
        import torch

        staged = torch.from_numpy(np.stack(pages)).view(len(self._layers), len(blocks), -1)
        index = torch.tensor(blocks, device=self._layers[0].device)
        for layer, rows in zip(self._layers, staged, strict=True):
            layer.index_copy_(0, index, rows.to(layer.device))
        if index.device.type != "cpu":  # the engine computes on another stream than this thread's
            torch.accelerator.current_stream(index.device).synchronize()

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        import torch

        index = torch.tensor(blocks, device=self._layers[0].device)
        rows = torch.stack([layer.index_select(0, index) for layer in self._layers])
        np.copyto(into, rows.cpu().numpy().reshape(-1))


def _pages(layer: Any, blocks: int) -> Any:
    """(blocks, page bytes), uint8: the tensor's own memory. Raises `ConfigError`.

    A block may be split into several of the attention kernel's; its page must be dense all the
    same. Between pages there may be other layers' pages, or padding.
    """
    import torch

    kernel_blocks = layer.shape[0] // blocks
    inside = sorted(zip(layer.stride()[1:], layer.shape[1:], strict=True))
    expected = 1
    for stride, size in inside:
        if size != 1 and stride != expected:
            raise ConfigError(
                f"the blocks of a KV cache of shape {tuple(layer.shape)} and strides "
                f"{layer.stride()} are not dense, which the connector needs"
            )
        expected *= size
    itemsize = layer.element_size()
    page = math.prod(layer.shape[1:]) * itemsize * kernel_blocks
    step = layer.stride(0) * itemsize * kernel_blocks
    if kernel_blocks > 1 and step != page:
        raise ConfigError("the kernel's blocks of a KV cache do not follow one another")
    first = layer.storage_offset() * itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=layer.device)
    return whole.set_(layer.untyped_storage(), first, (blocks, page), (step, 1))
