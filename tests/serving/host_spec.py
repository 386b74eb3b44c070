"""vLLM's tiered offloading on a processor: its own worker copies between a GPU and the host, this one on the host."""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies blocks of one KV group, one block a chunk, at once."""

    def __init__(self, kv_caches, region):
        self.blocks = [cache.tensor.view(torch.int8).flatten(1) for cache in kv_caches.tensors]
        self.region, self.finished = region, []
        self.chunks = region._base.view(torch.int8).view(region.num_chunks, -1)

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)

    def _copy(self, job_id, blocks, chunks, *, store):
        for block, chunk in zip(blocks.tolist(), chunks.tolist(), strict=True):
            start = 0
            for cache in self.blocks:
                end = start + cache.shape[1]
                ends = (self.chunks[chunk, start:end], cache[block])
                ends[not store].copy_(ends[store])
                start = end
        self.finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        del self.chunks
        self.region.cleanup()


class HostSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
