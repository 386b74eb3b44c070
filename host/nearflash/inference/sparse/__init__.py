"""The attention modes in torch: index, selection, attention, flash traffic; baselines to compare with."""

from nearflash.inference.sparse.attention import SparseOutput, sparse_attention
from nearflash.inference.sparse.traffic import FlashReads, flash_reads

__all__ = ["FlashReads", "SparseOutput", "flash_reads", "sparse_attention"]
