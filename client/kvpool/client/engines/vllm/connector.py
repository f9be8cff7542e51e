"""`KvpoolConnector`: what vLLM calls, and which side of ours answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvpool.client.engines.vllm import version
from kvpool.client.engines.vllm.identity import Identity
from kvpool.client.engines.vllm.memory import memory_of
from kvpool.client.engines.vllm.plan import Plan
from kvpool.client.engines.vllm.scheduler import DEADLINE_S as LOOKUP_S
from kvpool.client.engines.vllm.scheduler import SchedulerSide
from kvpool.client.engines.vllm.settings import Sessions, Settings, one_step_at_a_time
from kvpool.client.engines.vllm.worker import DEADLINE_S, Rank, WorkerSide
from kvpool.proto.errors import ConfigError

log = logging.getLogger("kvpool.vllm")


@dataclass(frozen=True, slots=True)
class Metadata(KVConnectorMetadata):
    """What vLLM carries from its scheduler to its workers with every step."""

    plan: Plan


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """The store as vLLM's external prefix cache.

    vLLM makes one for its scheduler and one for each worker. With `kv_role` ``kv_both`` KV is
    published in the background; with ``kv_producer`` a step ends only when it is stored, so that
    who waits for an answer finds the prompt's KV; ``kv_consumer`` publishes nothing.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigError`. The store may be away; it is used once it is there."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.of(transfer)
        identity = Identity.of(
            vllm_config, kv_cache_config, chunk_tokens=settings.chunk_tokens, version=version()
        )
        self._identity = identity
        self._synchronous = settings.load == "sync" and not identity.hybrid
        if self._synchronous and not one_step_at_a_time(vllm_config):
            log.warning("load='sync' is for one worker, one step at a time: loads are 'async'")
            self._synchronous = False
        self._bad_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                identity,
                Sessions(settings.connect("vllm scheduler", LOOKUP_S), identity),
                asynchronous=not self._synchronous,
                saves=transfer.is_kv_producer,
            )
        else:
            rank = _rank(vllm_config.parallel_config, kv_cache_config.kv_tp_replicas)
            name = f"vllm worker pp{rank.stage} tp{rank.shard}"
            self._worker = WorkerSide(
                identity,
                Sessions(settings.connect(name, DEADLINE_S), identity),
                rank,
                waits=transfer.kv_role == "kv_producer",
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed again."""
        return False

    # ---- the scheduler's side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        return Metadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.failed(connector_output.invalid_block_ids, connector_output.failed_recving)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, None]:
        """Blocks may be freed at once: what is saved was copied in the step that computed it."""
        self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        return self._scheduler.clear()

    # ---- the workers' side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for caches that are not what the configuration says."""
        config, memories = self._kv_cache_config, {}
        for group in self._identity.groups:
            names = config.kv_cache_groups[group.number].layer_names
            expected = group.layers[self._worker.rank.stage]
            if len(names) != expected:
                raise ConfigError(f"{len(names)} layers are here where {expected} were expected")
            tensors = [kv_caches[name] for name in names]
            memories[group.number] = memory_of(tensors, config.num_blocks, group.page_bytes)
        self._worker.register(memories)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._synchronous:
            self._worker.load_now(self._plan)
        else:
            self._worker.load_meanwhile(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before the forward pass that uses them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing yet: chunks are saved when all layers are there."""

    def wait_for_save(self) -> None:
        self._worker.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded = self._worker.loaded(self._plan)
        bad = {name: blocks for name, blocks in loaded.items() if blocks}
        if not self._identity.hybrid:
            self._bad_blocks.update(*bad.values())
        return KVConnectorTransferResults(
            finished_recving=set(loaded),
            failed_recving=set(bad) if self._identity.hybrid else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad | self._worker.failed_now()

    @property
    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        return metadata.plan

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        else:
            self._worker.close()


def _rank(parallel: Any, replicas: int) -> Rank:
    stage, number = divmod(parallel.rank, parallel.tensor_parallel_size)
    return Rank(stage % parallel.pipeline_parallel_size, number // replicas, number % replicas == 0)
