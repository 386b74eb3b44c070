"""Compressed weights: pruned or quantised matrices packed losslessly, and expanded on a device.

Formats: docs/contracts/weights.md.
"""

from nearflash.weights.expand import expand
from nearflash.weights.pack import pack
from nearflash.weights.quantize import QuantizedMatrix, quantize

__all__ = ["QuantizedMatrix", "expand", "pack", "quantize"]
