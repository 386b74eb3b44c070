"""Gradient compression: the largest elements only, what was left out carried over to the next step."""

from nearflash.training.compression.compressor import Compressor
from nearflash.training.compression.topk import TopK

__all__ = ["Compressor", "TopK"]
