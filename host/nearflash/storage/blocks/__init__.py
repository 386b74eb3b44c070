"""Blocks of KV by content key, bounded, kept over restarts: the store beneath serving engines' offloading."""

from nearflash.storage.blocks.block_store import BlockStore
from nearflash.storage.blocks.statistics import BlockStatistics

__all__ = ["BlockStatistics", "BlockStore"]
