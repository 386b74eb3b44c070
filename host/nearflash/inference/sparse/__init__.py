"""The attention modes in torch: index, selection, attention, flash traffic; baselines to compare with."""

from nearflash.inference.sparse.attention import Attended, sparse_attention
from nearflash.inference.sparse.traffic import FlashReads, flash_reads

__all__ = ["Attended", "FlashReads", "flash_reads", "sparse_attention"]
