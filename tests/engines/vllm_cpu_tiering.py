"""vLLM's tiering for an engine whose own KV cache is in host memory, which vLLM's spec refuses.

Loaded by vLLM itself (`spec_module_path`), so that a tier can be tested without a GPU: the "GPU"
side of each transfer is one copy.
"""

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """One block of the engine is one chunk of the pool, and one worker has it all."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for cache in caches.tensors:
            blocks = cache.tensor.view(cache.tensor.shape[0], -1)
            self._pairs.append((blocks, region.create_next_worker_view(cache.page_size_bytes)))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for blocks, rows in self._pairs:
                rows[chunk].copy_(blocks[block])
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for blocks, rows in self._pairs:
                blocks[block].copy_(rows[chunk])
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region)
