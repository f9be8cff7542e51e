"""vLLM's KV cache as bytes: pages in host memory, and pages that are staged as a device's are.

Runs where torch is installed; see `conftest.py`. There is no device: both are tested on tensors in
host memory, with the same calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.client.engines.vllm.memory import DeviceMemory, HostMemory, Memory, memory_of
from kvpool.proto.errors import ConfigError
from kvpool.transfer.paging import HUGE
from tests.transfer.pages import ALL, kernel_collapses, kilobytes, small_pages

PAGE = 256


def pages(kind: str) -> tuple[Memory, Any]:
    """The same pages of two layers, as host or as device memory; and the tensor of both."""
    cache = torch.arange(2 * 8 * PAGE, dtype=torch.int32).to(torch.uint8).view(2, 8, PAGE)
    if kind == "host":
        return HostMemory([cache[0].numpy(), cache[1].numpy()]), cache
    return DeviceMemory([cache[0], cache[1]]), cache


@pytest.mark.parametrize("kind", ["host", "device"])
def test_pages_are_copied_out_layer_by_layer(kind: str) -> None:
    memory, cache = pages(kind)
    into = np.zeros(4 * PAGE, np.uint8)
    memory.copy_out([5, 2], into)
    assert np.array_equal(into, cache[:, [5, 2]].numpy().reshape(-1))


@pytest.mark.parametrize("kind", ["host", "device"])
def test_pages_that_land_are_in_the_cache(kind: str) -> None:
    memory, cache = pages(kind)
    expected = cache.clone()
    landing = memory.landing([5, 2])
    for number, page in enumerate(landing):
        page[:] = number
    expected[0, 5], expected[0, 2], expected[1, 5], expected[1, 2] = 0, 1, 2, 3
    memory.landed([5, 2], landing)
    assert torch.equal(cache, expected)


def test_pages_of_a_cache_are_found_whatever_its_strides() -> None:
    flat = torch.arange(4 * 3 * 2 * 16 * 8, dtype=torch.float32)
    blocks_outside = flat.view(4, 3, 2, 16, 8)  # block, layer, head, token, dim
    for layer in range(3):
        cache = blocks_outside[:, layer]
        into = np.zeros(cache[0].numel() * 4, np.uint8)
        memory_of([cache], 4, into.size).copy_out([2], into)
        assert np.array_equal(into.view(np.float32), cache[2].reshape(-1).numpy())


def test_a_block_may_be_several_of_the_kernels() -> None:
    cache = torch.arange(8 * 2 * 16 * 8, dtype=torch.float32).view(8, 2, 16, 8)
    into = np.zeros(2 * cache[0].numel() * 4, np.uint8)
    memory_of([cache], 4, into.size).copy_out([3], into)
    assert np.array_equal(into.view(np.float32), cache[6:8].reshape(-1).numpy())


def test_pages_in_host_memory_become_huge_ones_with_their_content() -> None:
    memory = small_pages(2, ALL, np.arange(2 * HUGE) % 251)
    cache = torch.from_numpy(memory).view(2, 4, -1)
    assert kilobytes(memory, "AnonHugePages") == 0
    memory_of([cache[0], cache[1]], 4, HUGE // 4)
    assert kilobytes(memory, "AnonHugePages") == (2 * HUGE // 1024 if kernel_collapses() else 0)
    assert np.array_equal(memory, np.arange(memory.size) % 251)


def test_a_cache_whose_blocks_are_not_dense_is_refused() -> None:
    cache = torch.zeros(2, 4, 16, 8).transpose(0, 1)  # heads outside of blocks
    with pytest.raises(ConfigError, match="not dense"):
        memory_of([cache], 4, 2 * 16 * 8 * 4)


def test_pages_have_landed_on_a_device_when_its_stream_has_done_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = torch.empty(2, 8, PAGE, dtype=torch.uint8, device="meta")
    memory, waited = DeviceMemory([cache[0], cache[1]]), []

    def stream(device: Any) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    memory.landed([5, 2], memory.landing([5, 2]))
    assert waited == [cache.device]
