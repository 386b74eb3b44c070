"""The pages of one host memory pool of SGLang, kept in a block store.

Source: sglang.srt.mem_cache.pool_host.base (HostKVCache).
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch

from nearflash.abi.errors import CommandError
from nearflash.serving.jobs import TransferJobs
from nearflash.storage.blocks import BlockStore

__all__ = ["HostPages", "describe_pool", "page_bytes"]


class HostPages:
    """Pages go to the store and back by way of flat copies, so that every layout of SGLang's works.

    Calls wait no longer than the deadline of `loads` and `stores`.
    """

    def __init__(self, pool: Any, store: BlockStore, loads: TransferJobs[int], stores: TransferJobs[int]) -> None:
        self.store, self._pool, self._loads, self._stores = store, pool, loads, stores
        self._empty = pool.get_dummy_flat_data_page()

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Look up which pages are there; no drive is asked."""
        return self.store.contains([_hash(key) for key in keys])

    def new_page(self) -> torch.Tensor:
        """Memory for one flat page."""
        return torch.empty(self._empty.shape, dtype=self._empty.dtype)

    def save(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Store flat pages; of each whether it is durable."""
        blocks = [_bytes_of(page.contiguous()) for page in pages]
        return self._stores.run(len(keys), lambda: self.store.submit_put([_hash(key) for key in keys], blocks))

    def load(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Fill contiguous flat pages; of each whether it is filled."""
        blocks = [_bytes_of(page) for page in pages]
        return self._loads.run(len(keys), lambda: self.store.submit_get([_hash(key) for key in keys], blocks))

    def save_from(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Store the pool's pages that begin at each page_size-th of `indices`; raises CommandError for others."""
        return self.save(keys, [self._pool.get_data_page(start) for start in self._starts(keys, indices)])

    def load_into(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """See `save_from`; pages that are not found are left as they are."""
        starts, pages = self._starts(keys, indices), [self.new_page() for _ in keys]
        loaded = self.load(keys, pages)
        for start, page, there in zip(starts, pages, loaded, strict=True):
            if there:
                self._pool.set_from_flat_data_page(start, page)
        return loaded

    def _starts(self, keys: Sequence[str], indices: torch.Tensor | None) -> list[int]:
        size = getattr(self._pool, "page_size", 1) or 1
        if indices is None or indices.numel() != len(keys) * size:
            raise CommandError(f"host_indices must be {size} for each of {len(keys)} pages")
        return [int(start) for start in indices[::size].tolist()]


def page_bytes(pool: Any) -> int:
    """Bytes of one page of a pool."""
    page = pool.get_dummy_flat_data_page()
    return int(page.numel()) * int(page.element_size())


def describe_pool(pool: Any) -> dict[str, Any]:
    """List facts of a pool in which its pages must agree, as JSON values."""
    named = ("layout", "dtype", "page_size", "start_layer", "end_layer", "head_num", "head_dim", "storage_format_tag")
    return {"bytes": page_bytes(pool)} | {name: str(getattr(pool, name, None)) for name in named}


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _bytes_of(page: torch.Tensor) -> Any:
    return page.reshape(-1).view(torch.uint8).numpy()
