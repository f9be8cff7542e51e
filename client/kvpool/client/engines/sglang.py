"""SGLang's HiCache on the store: a storage backend that moves pages between the host pool and it.

SGLang hands over page hashes instead of tokens (key scheme ``foreign:sglang``): one page is one
chunk. It has hashed LoRA, salt and multimodal content into them. Each host pool and each rank's
shard is a namespace of its own with one part; a page's buffers are its planes, in the pool's own
order, and bytes move between them and the store without a copy in between.

Whatever the store does, SGLang sees hits and misses: nothing is raised, and what a call has to do
with one pool does not last longer than the deadline.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvpool.client.api import Client, connect
from kvpool.client.engines.versions import require
from kvpool.client.results import Publish
from kvpool.client.sessions import Session
from kvpool.proto.errors import ConfigError, KvpoolError
from kvpool.proto.layout import Part, Plane
from kvpool.proto.namespace import Namespace
from kvpool.proto.outcomes import Outcome
from kvpool.transfer.copying import Bytes, as_bytes

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host import HostKVCache

TESTED = ("0.5.23",)
KV = PoolName.KV.value
STORED = (Outcome.OK, Outcome.EXISTS, Outcome.WRITING)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `--hicache-storage-backend-extra-config` says to this backend."""

    address: str
    """Of the store: ``unix:PATH`` or ``tcp://HOST:PORT``."""
    revision: str
    """The weights, their quantisation and overrides of their configuration, in any words: engines
    with equal model names share KV only if these are equal, too."""
    token: str = ""
    """The credential, if the store asks for one."""
    deadline_s: float = 1.0
    """Longest wait of one call for one pool, in seconds, copies included. SGLang's own patience
    starts at one second."""
    kv_dtype: str = ""
    """Type of the KV where the pool's own does not say it (quantised KV is stored as uint8)."""
    kv_scales: str = "none"
    """Identity of the scales of quantised KV."""
    interface_v1: int = 0
    """1: SGLang moves pages without a copy. It reads this setting itself."""

    @classmethod
    def of(cls, extra: dict[str, Any] | None) -> Settings:
        """Raises `ConfigError` for what is missing; what others read is ignored."""
        given = {k: v for k, v in (extra or {}).items() if k in cls.__dataclass_fields__}
        for field in ("address", "revision"):
            if not given.get(field):
                raise ConfigError(
                    f"{field!r} is missing in --hicache-storage-backend-extra-config; "
                    'it needs {"address": "unix:PATH", "revision": "…"}'
                )
        return cls(**given)


def namespace_for(
    config: HiCacheStorageConfig,
    settings: Settings,
    pool: HostKVCache,
    pool_name: str,
    sizes: Sequence[int],
    direct: bool,
) -> Namespace:
    """The identity of the pages of `pool` on this rank; `sizes`: bytes of a page's buffers, in
    the pool's order if `direct`, else in that of SGLang's flat pages.

    MLA's KV is replicated over tensor-parallel ranks, which share it; Mamba's state never is.
    Raises `ConfigError` if quantised KV has no identity.
    """
    dtype = settings.kv_dtype or str(pool.dtype).removeprefix("torch.")
    if dtype == "uint8" or ("float8" in dtype and settings.kv_scales == "none"):
        raise ConfigError(
            f"the pool holds {dtype}: name the type and the scales, kv_dtype and kv_scales, in "
            "--hicache-storage-backend-extra-config"
        )
    shard = [pool_name, f"pp{config.pp_rank}of{config.pp_size}"]
    if not config.is_mla_model or pool_name == PoolName.MAMBA.value:
        shard.append(f"tp{config.tp_rank}of{config.tp_size}")
    if config.attn_cp_size > 1:
        shard.append(f"cp{config.attn_cp_rank}of{config.attn_cp_size}")
    planes = tuple(Plane(f"buffer.{i}", nbytes, 0) for i, nbytes in enumerate(sizes))
    return Namespace(
        model=config.model_name or "",
        revision=settings.revision,
        kv_dtype=dtype,
        kv_scales=settings.kv_scales,
        layout=f"native:sglang.{type(pool).__name__}.{pool.layout}" + ("" if direct else ".flat"),
        chunk_tokens=pool.page_size,
        parts=(Part(".".join(shard), planes),),
        key_scheme="foreign:sglang",
        adapter="in-the-page-hash",
        rope="in-the-revision",
        salt="in-the-page-hash",
    )


class Pages:
    """The pages of one host pool in the store. Thread-safe."""

    def __init__(self, session: Session, deadline_s: float) -> None:
        self._session = session
        self._deadline_s = deadline_s
        self._trouble = ""

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading pages are stored."""
        match = self._session.match(_hashes(keys), peek=True, deadline_s=self._deadline_s)
        self._say(match.error)
        return match.chunks

    def stored(self, keys: Sequence[str]) -> list[bool]:
        """Page by page, whether it is stored."""
        try:
            told = self._session.explain(_hashes(keys), deadline_s=self._deadline_s)
        except KvpoolError as error:
            self._say(str(error))
            return [False] * len(keys)
        self._say("")
        return [page.outcome is Outcome.HIT for page in told]

    def read(self, keys: Sequence[str], into: Sequence[list[Bytes]]) -> list[bool]:
        """Fills `into`, the buffers of each page; False from the first page on that is missing."""
        end = time.monotonic() + self._deadline_s
        with self._session.match(_hashes(keys), deadline_s=self._deadline_s) as match:
            wanted = list(into[: match.chunks])
            pull = self._session.pull(match, wanted, deadline_s=max(0.0, end - time.monotonic()))
        self._say(match.error or pull.error)
        return [i < pull.chunks for i in range(len(keys))]

    def write(
        self, keys: Sequence[str], payloads: Sequence[list[Bytes]], parent: str | None
    ) -> list[bool]:
        """Stores pages that follow one another, the first below page `parent`; which are there.

        If the parent is not, they become a chain of their own: SGLang itself holds what is before
        them, and asks for no more than them.
        """
        end = time.monotonic() + self._deadline_s

        def publish(before: list[str]) -> Publish:
            chain = _hashes([*before, *keys])
            return self._session.publish(
                chain, payloads, first=len(before), deadline_s=max(0.0, end - time.monotonic())
            )

        done = publish([parent] if parent is not None else [])
        if parent is not None and keys and done.outcomes[0] == Outcome.NO_PARENT:
            done = publish([])
        self._say(done.text)
        return [outcome in STORED for outcome in done.outcomes]

    def clear(self) -> bool:
        """Deletes all pages; False if the store is away."""
        try:
            self._session.clear(deadline_s=self._deadline_s)
        except KvpoolError as error:
            self._say(str(error))
            return False
        return True

    def _say(self, trouble: str) -> None:
        """Logs when the store fails, and when it is back."""
        if trouble and not self._trouble:
            _log.warning("kvpool: %s; going on without the store", trouble)
        elif self._trouble and not trouble:
            _log.warning("kvpool: the store is back")
        self._trouble = trouble


class KvpoolHiCache(HiCacheStorage):  # type: ignore[misc]  # Any where SGLang is not installed
    """The backend. SGLang makes it from ``module_path`` and ``class_name`` of its configuration.

    With ``interface_v1`` pages go straight between the host pool and the store; without, through
    tensors of SGLang's own. Pages of the two ways never meet: their bytes are ordered differently.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Raises `ConfigError` for settings that are missing and versions nobody tested with."""
        require("sglang", ["sglang"], TESTED)
        self._config = storage_config
        self._settings = Settings.of(storage_config.extra_config)
        self._client: Client = connect(
            self._settings.address,
            token=self._settings.token,
            name=f"sglang tp{storage_config.tp_rank} pp{storage_config.pp_rank}",
        )
        self.registered_pools: dict[str, HostKVCache] = {}
        self._pages: dict[str, Pages] = {}
        """By pool; of pools that are addressed directly, and of all others by whole copies."""

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._open(KV, mem_pool_host, direct=bool(self._settings.interface_v1))

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._pages:
            self._open(str(host_pool_name), host_pool, direct=True)

    def _open(self, name: str, pool: HostKVCache, *, direct: bool) -> None:
        # Host memory is where the bytes are, so a page's shape is known before any page is moved.
        if direct:
            _, sizes = pool.get_page_buffer_meta(np.arange(pool.page_size))
        else:
            sizes = [pool.get_dummy_flat_data_page().nbytes]
        namespace = namespace_for(self._config, self._settings, pool, name, sizes, direct)
        deadline_s = self._settings.deadline_s
        self._pages[name] = Pages(self._client.open(namespace, deadline_s=deadline_s), deadline_s)

    # ---- version 1: pages of the KV pool, in place

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._pages[KV].leading(keys)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        into = page_buffers(self.mem_pool_host, host_indices, len(keys))
        return self._pages[KV].read(keys, into)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        payloads = page_buffers(self.mem_pool_host, host_indices, len(keys))
        return self._pages[KV].write(keys, payloads, _parent(extra_info))

    # ---- version 2: several pools at once

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        count = self._pages[KV].leading(keys)
        hits = {KV: count}
        restorable = set(range(1, count + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never gates a hit; a pool that is not reported has no verdict
            window = len(transfer.keys or ()) or 1
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = count
            pages = self._pages[str(transfer.name)]
            ends = covered(pages.stored(keys[:count]), window)
            hits[str(transfer.name)] = max(ends, default=0)
            restorable &= ends
        lengths = sorted(restorable)
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        def read(transfer: PoolTransfer, keys: list[str], into: list[list[Bytes]]) -> list[bool]:
            return self._pages[str(transfer.name)].read(keys, into)

        return self._each(transfers, read)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        def write(
            transfer: PoolTransfer, keys: list[str], payloads: list[list[Bytes]]
        ) -> list[bool]:
            # Only pools with all pages form chains; the others lack the pages before.
            chained = transfer.hit_policy == PoolHitPolicy.ALL_PAGES
            parent = _parent(extra_info) if chained else None
            return self._pages[str(transfer.name)].write(keys, payloads, parent)

        return self._each(transfers, write)

    def _each(
        self,
        transfers: list[PoolTransfer],
        move: Callable[[PoolTransfer, list[str], list[list[Bytes]]], list[bool]],
    ) -> dict[str, list[bool]]:
        """By pool, what became of its pages; a transfer with too few or many indices moves none."""
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, indices = transfer.keys or [], transfer.host_indices
            pool = self.registered_pools[transfer.name]
            if indices is None or len(indices) != len(keys) * pool.page_size:
                results[transfer.name] = [False] * len(keys)
            else:
                buffers = page_buffers(pool, indices, len(keys))
                results[transfer.name] = move(transfer, keys, buffers)
        return results

    # ---- the older methods: pages of the KV pool, through tensors

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        hits = self._pages[KV].read(keys, [[as_bytes(t, writable=True)] for t in targets])
        return [target if hit else None for target, hit in zip(targets, hits, strict=True)]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        payloads = [[as_bytes(value)] for value in values]
        return all(self._pages[KV].write(keys, payloads, None))

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets)[0]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # ---- the rest

    def clear(self) -> bool:
        """Deletes the pages of all pools of this rank; False if the store is away."""
        return all([pages.clear() for pages in self._pages.values()])

    def close(self) -> None:
        self._client.close()


def page_buffers(pool: HostKVCache, host_indices: torch.Tensor, pages: int) -> list[list[Bytes]]:
    """The memory of `pages` pages of `pool`, which begin at every page size of `host_indices`."""
    pointers, sizes = pool.get_page_buffer_meta(host_indices)
    views = [_memory(address, nbytes) for address, nbytes in zip(pointers, sizes, strict=True)]
    each = len(views) // pages if pages else 0
    return [views[at : at + each] for at in range(0, len(views), each or 1)]


def covered(stored: Sequence[bool], window: int) -> set[int]:
    """Lengths of prefixes of whose last `window` pages all are stored."""
    ends, run = set(), 0
    for length, there in enumerate(stored, 1):
        run = run + 1 if there else 0
        if run >= min(window, length):
            ends.add(length)
    return ends


def _memory(address: int, nbytes: int) -> Bytes:
    """The pool outlives every call that moves its pages."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _parent(extra_info: HiCacheStorageExtraInfo | None) -> str | None:
    """The page before those of a call, if SGLang says (``hicache_storage_pass_prefix_keys``)."""
    prefix = extra_info.prefix_keys if extra_info is not None else None
    return prefix[-1] if prefix else None
