"""SGLang's HiCache on the store, through SGLang's own factory and host pools."""

import dataclasses
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str

from kvpool.client.engines.sglang import KV, KvpoolHiCache, Settings, covered, namespace_for
from kvpool.proto.errors import ConfigError
from tests.store.daemons import RunningDaemon, eventually, running

PAGE, TOKENS = 16, 256
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")

_fresh = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    flags = ("--no-populate", "--headroom", "0")
    with running(tmp_path_factory.mktemp("d"), *flags) as started:
        yield started


def mha_pool(layout: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A host pool of `TOKENS` tokens, filled with random numbers."""
    device = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=dtype,
        head_num=2,
        head_dim=32,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    return _filled(MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, PAGE, layout, **_HOST))


def mla_pool(layout: str) -> Any:
    device = MLATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device._mla_buffer_info()
    return _filled(MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, target_layer_num=3, **_HOST))


_HOST: dict[str, Any] = {
    "device_capacity_tokens": TOKENS,
    "start_layer": 0,
    "end_layer": 3,
    "pin_memory": False,
    "device": "cpu",
}


def _filled(pool: Any) -> Any:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def config(address: str, **fields: Any) -> HiCacheStorageConfig:
    """Of a model that no other test uses, on one rank."""
    extra = {
        "backend_name": "kvpool",
        "module_path": "kvpool.client.engines.sglang",
        "class_name": "KvpoolHiCache",
        "interface_v1": 1,
        "address": address,
        "revision": "1",
        "deadline_s": 20.0,
        **fields.pop("extra", {}),
    }
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": f"tiny-{next(_fresh)}",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**values | fields)


def attach(settings: HiCacheStorageConfig, pool: Any) -> Any:
    """As SGLang's cache controller attaches a storage backend."""
    backend = StorageBackendFactory.create_backend("dynamic", settings, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def page_keys(pages: int, seed: int = 0) -> list[str]:
    keys: list[str] = get_hash_str(list(range(seed, seed + pages * PAGE)), None, PAGE)
    return keys


def indices(first_page: int, pages: int) -> torch.Tensor:
    return torch.arange(first_page * PAGE, (first_page + pages) * PAGE)


def page(pool: Any, number: int) -> torch.Tensor:
    data: torch.Tensor = pool.get_data_page(number * PAGE)
    return data.clone()


def holds(pool: Any, first_page: int, pages: list[torch.Tensor]) -> bool:
    return all(torch.equal(page(pool, first_page + i), want) for i, want in enumerate(pages))


# ---- pages come back


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_in_place_in_every_layout(daemon: RunningDaemon, layout: str) -> None:
    settings, pool, keys = config(daemon.address), mha_pool(layout), page_keys(4)
    written = [page(pool, number) for number in range(4)]
    backend = attach(settings, pool)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, indices(0, 4)) == [True] * 4
    backend.close()
    again = attach(settings, pool)  # a process started anew
    assert again.batch_exists([*keys, "00" * 32]) == 4
    assert again.batch_get_v1(keys, indices(8, 4)) == [True] * 4
    assert holds(pool, 8, written)
    again.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_through_tensors_in_every_layout(
    daemon: RunningDaemon, layout: str
) -> None:
    settings = config(daemon.address, extra={"interface_v1": 0})
    pool, keys = mha_pool(layout), page_keys(3)
    written = [page(pool, number) for number in range(3)]
    backend = attach(settings, pool)
    assert backend.batch_set(keys, [pool.get_data_page(n * PAGE) for n in range(3)])
    assert backend.exists(keys[2]) and not backend.exists("00" * 32)
    assert backend.batch_exists([*keys, "00" * 32]) == 3
    into = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = backend.batch_get([*keys, "00" * 32], into)
    assert got[3] is None
    for number, data in enumerate(got[:3]):
        pool.set_from_flat_data_page((8 + number) * PAGE, data)
    assert holds(pool, 8, written)
    assert torch.equal(backend.get(keys[1]), written[1])
    assert backend.set(keys[1], written[1])
    backend.close()


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_ranks_of_an_mla_model_share_their_pages(daemon: RunningDaemon, layout: str) -> None:
    pool, keys = mla_pool(layout), page_keys(2)
    settings = config(daemon.address, is_mla_model=True, tp_size=2)
    written = [page(pool, number) for number in range(2)]
    first = attach(settings, pool)
    assert first.batch_set_v1(keys, indices(0, 2)) == [True] * 2
    second = attach(dataclasses.replace(settings, tp_rank=1), pool)
    assert second.batch_get_v1(keys, indices(8, 2)) == [True] * 2
    assert holds(pool, 8, written)
    first.close()
    second.close()


def test_a_page_that_is_missing_ends_the_hits(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(3)
    backend = attach(config(daemon.address), pool)
    backend.batch_set_v1(keys, indices(0, 3))
    asked = [keys[0], "00" * 32, keys[2]]
    assert backend.batch_exists(asked) == 1
    assert backend.batch_get_v1(asked, indices(8, 3)) == [True, False, False]
    backend.close()


def test_what_is_stored_already_is_a_success(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(2)
    backend = attach(config(daemon.address), pool)
    for _ in range(2):
        assert backend.batch_set_v1(keys, indices(0, 2)) == [True, True]
    backend.close()


def test_clear_deletes_the_pages(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(2)
    backend = attach(config(daemon.address), pool)
    backend.batch_set_v1(keys, indices(0, 2))
    assert backend.clear()
    assert backend.batch_exists(keys) == 0
    backend.close()


# ---- chains


def test_pages_hang_below_the_prefix_that_sglang_passes(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(4)
    backend = attach(config(daemon.address), pool)
    backend.batch_set_v1(keys[:2], indices(0, 2), HiCacheStorageExtraInfo(prefix_keys=[]))
    rest = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    assert backend.batch_set_v1(keys[2:], indices(2, 2), rest) == [True, True]
    told = backend._pages[KV]._session.explain([key.encode() for key in keys])
    assert [chunk.children for chunk in told] == [1, 1, 1, 0]
    assert backend.batch_exists(keys[2:], rest) == 2  # asked for without its prefix
    backend.close()


def test_pages_whose_prefix_is_gone_are_stored_all_the_same(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(4)
    backend = attach(config(daemon.address), pool)
    rest = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    assert backend.batch_set_v1(keys[2:], indices(2, 2), rest) == [True, True]
    assert backend.batch_get_v1(keys[2:], indices(8, 2), rest) == [True, True]
    backend.close()


# ---- several pools


def test_a_pool_of_trailing_pages_says_where_a_prefix_can_end(daemon: RunningDaemon) -> None:
    kv, state = mha_pool("page_first"), mha_pool("page_first_direct")
    backend = attach(config(daemon.address), kv)
    backend.register_mem_host_pool_v2(state, PoolName.SWA)
    keys = page_keys(6)

    def tail(pages: slice, first_page: int = 0) -> PoolTransfer:
        wanted = keys[pages]
        return PoolTransfer(
            name=PoolName.SWA,
            host_indices=indices(first_page, len(wanted)),
            keys=wanted,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    # As SGLang does: the states first, at two ends of prefixes, then the KV.
    for end in (3, 6):
        prefix = HiCacheStorageExtraInfo(prefix_keys=keys[: end - 2])
        stored = backend.batch_set_v2([tail(slice(end - 2, end), end - 2)], prefix)
        assert stored == {PoolName.SWA: [True, True]}
    backend.batch_set_v1(keys, indices(0, 6), HiCacheStorageExtraInfo(prefix_keys=[]))

    found = backend.batch_exists_v2(keys, [tail(slice(0, 2))])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [3, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 6}
    shorter = backend.batch_exists_v2(keys[:5], [tail(slice(0, 2))])
    assert (shorter.kv_hit_pages, shorter.restorable_prefix_pages) == (3, [3])

    want = [page(state, number) for number in (4, 5)]
    assert backend.batch_get_v2([tail(slice(4, 6), 8)]) == {PoolName.SWA: [True, True]}
    assert holds(state, 8, want)
    assert backend.batch_get_v2([tail(slice(2, 4), 10)]) == {PoolName.SWA: [True, False]}
    short = dataclasses.replace(tail(slice(4, 6)), host_indices=indices(8, 1))
    assert backend.batch_get_v2([short]) == {PoolName.SWA: [False, False]}
    backend.close()


def test_a_pool_of_all_pages_ends_the_hits_where_it_ends(daemon: RunningDaemon) -> None:
    backend = attach(config(daemon.address), mha_pool("page_first"))
    backend.register_mem_host_pool_v2(mha_pool("page_first"), PoolName.INDEXER)
    keys = page_keys(4)
    backend.batch_set_v1(keys, indices(0, 4))
    whole = PoolTransfer(name=PoolName.INDEXER, host_indices=indices(0, 3), keys=keys[:3])
    backend.batch_set_v2([whole], HiCacheStorageExtraInfo(prefix_keys=[]))
    found = backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.INDEXER)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.INDEXER: 3}
    backend.close()


@pytest.mark.parametrize(
    ("stored", "window", "ends"),
    [
        ([], 1, set()),
        ([True, True, False, True], 1, {1, 2, 4}),
        ([True, True, False, True, True], 2, {1, 2, 5}),
        ([False, True, True], 3, set()),
        ([True, True, True], 3, {1, 2, 3}),
    ],
)
def test_prefixes_end_where_a_window_of_pages_is_stored(
    stored: list[bool], window: int, ends: set[int]
) -> None:
    assert covered(stored, window) == ends


# ---- identity


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_rank": 1},
        {"pp_size": 4},
        {"attn_cp_rank": 1},
        {"attn_cp_size": 4},
        {"is_mla_model": True},
        {"revision": "2"},
        {"kv_dtype": "float16"},
        {"kv_scales": "per-tensor"},
        {"pool_name": "swa"},
        {"layout": "page_first_direct"},
        {"sizes": [64, 32]},
        {"direct": False},
    ],
)
def test_each_part_of_the_identity_separates_pages(change: dict[str, Any]) -> None:
    def digest(**changed: Any) -> bytes:
        layout = changed.pop("layout", "page_first")
        rest = {k: changed.pop(k) for k in ("pool_name", "sizes", "direct") if k in changed}
        fields = [field.name for field in dataclasses.fields(Settings)]
        extra = {k: changed.pop(k) for k in fields if k in changed}
        base = {"model_name": "m", "tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
        values: dict[str, Any] = {"pool_name": KV, "sizes": [64, 64], "direct": True} | rest
        space = namespace_for(
            config("unix:/k", **base | changed),
            Settings("unix:/k", **{"revision": "1"} | extra),
            mha_pool(layout),
            **values,
        )
        return space.digest("tenant")

    assert digest() != digest(**change)


def test_settings_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError, match="'revision' is missing"):
        attach(config("unix:/k", extra={"revision": ""}), mha_pool("page_first"))


def test_quantised_kv_needs_the_name_of_its_scales(daemon: RunningDaemon) -> None:
    pool = mha_pool("page_first", torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="kv_scales"):
        attach(config(daemon.address), pool)
    named = {"kv_dtype": "fp8_e4m3", "kv_scales": "none-used"}
    attach(config(daemon.address, extra=named), pool).close()


# ---- trouble


def test_sglangs_own_failures_are_misses_and_never_wrong_bytes(daemon: RunningDaemon) -> None:
    pool, keys = mha_pool("page_first"), page_keys(4)
    written = [page(pool, number) for number in range(4)]
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.002),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
    ):
        backend = attach(config(daemon.address), pool)
    assert isinstance(backend, HiCacheStorageFailureInjector)
    assert isinstance(backend._backend, KvpoolHiCache)
    seen = set()
    for _ in range(40):
        backend.batch_set_v1(keys, indices(0, 4))
        pool.kv_buffer[:, 8 * PAGE :].zero_()
        got = backend.batch_get_v1(keys, indices(8, 4))
        assert not all(got) or holds(pool, 8, written)
        seen.add((all(got), any(got)))
    assert seen == {(True, True), (False, False)}
    backend.close()


def test_a_store_that_is_away_is_a_miss_and_is_used_when_it_is_back(tmp_path: Path) -> None:
    settings = config(f"unix:{tmp_path / 'k.sock'}", extra={"deadline_s": 0.5})
    pool, keys = mha_pool("page_first"), page_keys(2)
    backend = attach(settings, pool)

    def assert_misses() -> None:
        began = time.monotonic()
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, indices(8, 2)) == [False, False]
        assert backend.batch_set_v1(keys, indices(0, 2)) == [False, False]
        assert not backend.clear()
        assert time.monotonic() - began < 20  # four calls; without a bound they would never end

    assert_misses()
    daemon = RunningDaemon(tmp_path, "--no-populate", "--headroom", "0")
    try:
        eventually(lambda: all(backend.batch_set_v1(keys, indices(0, 2))), "the store is used")
        assert backend.batch_exists(keys) == 2
        daemon.signal(signal.SIGSTOP)
        assert_misses()
        daemon.signal(signal.SIGCONT)
        daemon.kill()
        assert_misses()
    finally:
        daemon.close()
        backend.close()


def test_a_full_store_takes_no_page_and_raises_nothing(tmp_path: Path) -> None:
    flags = ("--no-populate", "--headroom", "0", "--capacity", "1MiB")
    with running(tmp_path, *flags) as daemon:
        pool = mha_pool("page_first")
        backend = attach(config(daemon.address), pool)
        session, stored = backend._pages[KV]._session, True
        for seed in range(0, 1000, 10):
            keys = page_keys(8, seed * PAGE)
            if not all(backend.batch_set_v1(keys, indices(0, 8))):
                stored = False
                break
            session.pin([key.encode() for key in keys])
        assert not stored
        backend.close()
