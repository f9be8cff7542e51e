"""`KvpoolTier`: the store behind vLLM's own CPU pool, as a secondary tier of its offloading.

vLLM decides what goes and comes; keys are its block hashes, a chunk is one row of its pool.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpool.client import Namespace, Outcome, Session, connect, native
from kvpool.client.engines.vllm import version
from kvpool.client.engines.vllm.identity import fingerprint, layout_name
from kvpool.proto.errors import ConfigError

log = logging.getLogger("kvpool.vllm")

DEADLINE_S = 2.0
"""Of one job, and of one batch of lookups; both run beside vLLM's scheduler."""


class KvpoolTier(SecondaryTierManager):
    """One entry of `secondary_tiers`: ``{"type": "KvpoolTier", "module_path":
    "kvpool.client.engines.vllm.tier", "address": …}``.

    `revision` names the weights where the model is not a local folder. Loads and stores that fail
    are reported, and vLLM computes or forgets.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        address: str,
        token: str = "",
        revision: str = "",
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        space = namespace_of(offloading_spec.config, self._rows.shape[1], revision)
        self._client = connect(address, token=token, name="vllm tier", deadline_s=DEADLINE_S)
        self._threads = ThreadPoolExecutor(2, "kvpool-tier")
        self._session = Lazy(lambda: self._client.open(space))
        self._lookups = _Lookups(tier_type, self._session)
        self._done: SimpleQueue[tuple[TransferJob, int]] = SimpleQueue()
        self._running: set[Future[None]] = set()

    # ---- lookups

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    # ---- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._start(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._start(job_metadata, self._load)

    def _start(self, job: TransferJob, work: Any) -> None:
        def run() -> None:
            good = 0
            try:
                good = work(list(job.keys), [self._rows[chunk] for chunk in job.chunk_ids])
            except Exception:
                log.exception("job %s failed", job.job_id)
            finally:
                self._done.put((job, good))

        self._running = {future for future in self._running if not future.done()}
        self._running.add(self._threads.submit(run))

    def _store(self, keys: Sequence[bytes], rows: Sequence[object]) -> int:
        """How many keys are in the store now."""
        done = self._session.get().publish(keys, rows)
        return int(np.isin(done.outcomes, (Outcome.OK, Outcome.EXISTS)).sum())

    def _load(self, keys: Sequence[bytes], rows: Sequence[object]) -> int:
        """How many leading keys have come."""
        session = self._session.get()
        with session.match(keys) as match:
            return session.pull(match, list(rows[: match.chunks])).chunks if match.chunks else 0

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while True:
            try:
                job, good = self._done.get_nowait()
            except Empty:
                return results
            keys = list(job.keys)
            whole = good == len(keys)
            if job.is_promotion and not whole:
                self._lookups.mark_miss(keys[good:])
            came = tuple(keys[:good]) if job.is_promotion and good and not whole else None
            results.append(JobResult(job.job_id, success=whole, successful_keys=came))

    def drain_jobs(self) -> None:
        wait(self._running)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._threads.shutdown()
        self._client.close()
        del self._rows  # vLLM unmaps it next


class Lazy:
    """A session that is opened where it may wait: not in vLLM's scheduler."""

    def __init__(self, opening: Any) -> None:
        self._open = opening
        self._session: Session | None = None

    def get(self) -> Session:
        if self._session is None:
            self._session = self._open()
        return self._session


class _Lookups(AsyncLookupManager):
    """Asks the store about many keys at once, in vLLM's own thread for that."""

    def __init__(self, tier_type: str, session: Lazy) -> None:
        self._session = session
        super().__init__(tier_type)

    def batch_lookup(self, keys: Collection[bytes], req_context: Any) -> list[bool]:
        found = self._session.get().explain(list(keys))
        return [one.outcome == Outcome.HIT for one in found]


def namespace_of(config: Any, row_bytes: int, revision: str) -> Namespace:
    """Of vLLM's `OffloadingConfig` and the bytes of one row of its CPU pool. Adapters, images and
    salts are in the block hashes.

    Raises `ConfigError` if nothing says which weights these are.
    """
    name, parallel = config.model.name, config.parallel
    weights = fingerprint(name) if Path(name).is_dir() else revision
    if not weights:
        raise ConfigError(f"say which weights of {name!r} these are: 'revision' of the tier")
    blocks = config.cache.blocks_per_chunk
    words = [str(group.tokens_per_block) for group in config.groups]
    words += [f"x{blocks}", f"pp{parallel.pp_size}", f"tp{parallel.tp_size}"]
    words += ["canonical"] if config.canonical_layout else []
    return Namespace(
        model=Path(name).resolve().name if Path(name).is_dir() else name,
        revision=weights,
        kv_dtype=config.model.dtype,
        kv_scales="of-the-weights",
        layout=layout_name(version(), config.kv_cache_layout, words),
        chunk_tokens=config.groups[0].tokens_per_block * blocks,
        parts=(native("row", layers=("all",), nbytes=row_bytes),),
        key_scheme="foreign:vllm",
        adapter="none",
        rope="of-the-model",
        salt="none",
    )
