"""A storage back end of SGLang's HiCache: pages on a drive of this machine, checked, bounded, kept over restarts.

Back end "dynamic", with this extra configuration: {"backend_name": "nearflash", "interface_v1": 1, "module_path":
"nearflash.serving.sglang", "class_name": "NearflashStorage", "path": "/mnt/nvme/kv", "capacity_bytes": 500000000000}.

A damaged page, a drive that fails, and a load of more than `deadline_s` seconds are misses: SGLang computes the tokens.
Checked against the classes of sglang 0.5.23; another interface is refused at the start.

Source: sglang.srt.mem_cache.hicache_storage.
"""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from nearflash.abi.errors import CommandError, StateError, UnsupportedError
from nearflash.serving.host_pages import HostPages, describe_pool, page_bytes
from nearflash.serving.interface import check_interface
from nearflash.serving.jobs import TransferJobs
from nearflash.serving.tier_store import TierSettings, model_files

__all__ = ["NearflashStorage"]

_METHODS: dict[str, tuple[str, ...]] = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "get": ("key", "target_location", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
}
_FACTORY_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}
_RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank", "dcp_rank", "dcp_size",
          "logical_page_size", "is_mla_model", "tp_lcm_size", "should_split_heads")  # fmt: skip
_log = logging.getLogger(__name__)


class NearflashStorage(HiCacheStorage):
    """See the module. Calls come from SGLang's own threads of prefetches and backups, which may wait for a drive: none
    does for longer than deadline_s.

    Of extra_config: nearflash.serving.tier_store.TierSettings, capacity_bytes of this rank's files together: each pool
    of SGLang's has a file, of a share by the length of its page.
    Raises UnsupportedError for another SGLang and for ranks that share pages; CommandError, StateError.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: Any = None) -> None:
        check_interface(HiCacheStorage, _METHODS, "SGLang")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise UnsupportedError(
                f"a model with latent attention must have one tensor-parallel rank, not {storage_config.tp_size}: "
                "its ranks share pages, and a file has one process"
            )
        self._config = storage_config
        given = storage_config.extra_config or {}
        self._settings = TierSettings.read({name: given[name] for name in given.keys() - _FACTORY_KEYS})
        deadline_s = self._settings.deadline_s
        self._loads, self._stores = TransferJobs[int](deadline_s), TransferJobs[int](deadline_s)
        self._pools: dict[str, HostPages] = {}

    # Pools

    def on_host_pools_registered(self) -> None:
        """See SGLang's: open the files, as the lengths of pages are known now. Raises CommandError, StateError."""
        pools = {str(PoolName.KV): self.mem_pool_host}
        pools |= {str(name): pool for name, pool in getattr(self, "registered_pools", {}).items()}
        sizes = {name: page_bytes(pool) for name, pool in pools.items()}
        for name, pool in pools.items():
            try:
                self._pools[name] = self._open(name, pool, sizes[name] / sum(sizes.values()))
            except BaseException:
                self.close()
                raise

    def _open(self, name: str, pool: Any, share: float) -> HostPages:
        config, model = self._config, self._config.model_name or ""
        facts = {"engine": "sglang", "model": model, "files": model_files(model), "pool": name,
                 "layout": describe_pool(pool), "ranks": {rank: getattr(config, rank) for rank in _RANKS}}  # fmt: skip
        store = self._settings.open(page_bytes(pool), model, facts, share)
        return HostPages(pool, store, self._loads, self._stores)

    @property
    def _kv(self) -> HostPages:
        if (pool := self._pools.get(str(PoolName.KV))) is None:
            raise StateError("the host's pool must be registered before pages are stored or loaded")
        return pool

    # One page, and flat copies of pages

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """See SGLang's."""
        (page,) = self.batch_get([key], [self._kv.new_page() if target_location is None else target_location])
        return page

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """See SGLang's."""
        pages = list(target_locations or [self._kv.new_page() for _ in keys])
        return [page if there else None for page, there in zip(pages, self._kv.load(keys, pages), strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """See SGLang's."""
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Sequence[torch.Tensor] | None = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        """See SGLang's."""
        if values is None or len(values) != len(keys):
            raise CommandError(f"there must be a page for each of {len(keys)} keys")
        return all(self._kv.save(keys, values))

    def exists(self, key: str) -> bool:
        """See SGLang's."""
        return self._kv.contains([key])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """See SGLang's."""
        return _count_leading(self._kv.contains(keys))

    # Pages of the host's pools

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """See SGLang's."""
        return self._kv.load_into(keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """See SGLang's."""
        return self._kv.save_from(keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """See SGLang's; of a pool that was registered late, nothing is there."""
        return {one.name: self._pools[one.name].load_into(one.keys or [], one.host_indices)
                if one.name in self._pools else [False] * len(one.keys or []) for one in transfers}  # fmt: skip

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """See SGLang's; pages of a pool that was registered late are not stored."""
        return {one.name: self._pools[one.name].save_from(one.keys or [], one.host_indices)
                if one.name in self._pools else [False] * len(one.keys or []) for one in transfers}  # fmt: skip

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """See SGLang's. Raises UnsupportedError for groups of blocks."""
        kv = self.batch_exists(keys)
        usable, hits = set(range(1, kv + 1)), {PoolName.KV: kv} if kv else {}
        for one in pool_transfers or []:
            lengths = self._restorable(one, keys[:kv])
            if lengths:
                hits[one.name] = max(lengths)
            usable &= lengths
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _restorable(self, transfer: PoolTransfer, keys: Sequence[str]) -> AbstractSet[int]:
        """Lengths of the keys' prefix, in pages, for which a pool has what its policy asks for."""
        pool = self._pools.get(transfer.name)
        there = pool.contains(keys) if pool else [False] * len(keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, _count_leading(there) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(len(transfer.keys or ()), 1)
            return {end for end in range(1, len(keys) + 1) if all(there[max(end - window, 0) : end])}
        raise UnsupportedError(f"a pool's hit policy must be all_pages or trailing_pages, not {transfer.hit_policy}")

    # End

    def clear(self) -> bool:  # type: ignore[override, unused-ignore]
        """Nothing is removed: pages go as others come. False."""
        _log.warning("nearflash keeps its pages: stop SGLang and remove the files to be rid of them")
        return False

    def close(self) -> None:
        """Store what is in flight and close the files; it may be called twice."""
        for name, pool in self._pools.items():
            pool.store.close()
            _log.info("pool %s: %s, %d expired", name, asdict(pool.store.stats()), self._loads.expired)
        self._pools.clear()


def _count_leading(there: Sequence[bool]) -> int:
    return next((number for number, one in enumerate(there) if not one), len(there))
