"""Gradient compression: the largest elements only, what was left out carried over to the next step."""

from nearflash.training.gradients.compression.compressor import Compressor
from nearflash.training.gradients.compression.topk import TopK

__all__ = ["Compressor", "TopK"]
