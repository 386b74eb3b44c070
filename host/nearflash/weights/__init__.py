"""Compressed weights: pruned or quantised matrices packed losslessly, and expanded on a device.

Formats: docs/contracts/weights.md.
"""

from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.coded import pack_coded
from nearflash.weights.compress import compress_tensor
from nearflash.weights.expand import expand
from nearflash.weights.file import PackedTensor, WeightsTensor, read_file, write_file
from nearflash.weights.pack import pack
from nearflash.weights.quantize import QuantizedMatrix, quantize
from nearflash.weights.rans import pack_rans

__all__ = [
    "PackedTensor",
    "QuantizedMatrix",
    "WeightsTensor",
    "compress_tensor",
    "expand",
    "open_checkpoint",
    "pack",
    "pack_coded",
    "pack_rans",
    "quantize",
    "read_file",
    "write_file",
]
