"""Changes of an extent's bf16 weights since their last whole half: deltas (nearflash.abi.delta), each in whole blocks.

Training reads weights from the model, so of this half only what a step changes has to be durable. Deltas follow one
another in the extent's own room; the step's table has how many bytes of them count, so one that was not committed is
written over by the next. Where one does not fit, or is more than half of the weights, these are written whole. After
the latter no changes are looked for in the next steps: to find them costs what they save.
"""

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.delta import DeltaHeader, delta_error
from nearflash.abi.topk import HEADER_BYTES, StreamFault, ValueFormat
from nearflash.device.backends.host.delta import apply_delta, tiles_of, write_delta
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.native import find_address

__all__ = ["WHOLE_STEPS", "apply_changes", "find_changes"]

WHOLE_STEPS = 7
"""Steps that write an extent's weights whole after one that changed most of them."""


def find_changes(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """Find what leads from weights to weights, aligned, in whole blocks. None where it is more than half of these."""
    words = after.view(np.uint16)
    part = tiles_of(before.view(np.uint16), words)
    size_bytes = _round_up(HEADER_BYTES + part.tiles.size)
    if 2 * size_bytes > after.size:
        return None
    memory = reuse_buffer(size_bytes)
    end = write_delta([part], words.size, ValueFormat.BF16, memory)
    memory[end:] = 0
    return memory


def apply_changes(changes: NDArray[np.uint8], weights: NDArray[np.uint8]) -> None:
    """Apply deltas, one behind another in whole blocks, to weights in place. Raises StreamError for damaged ones."""
    at = 0
    while at < changes.size:
        size_bytes = DeltaHeader.size_in(changes[at : at + HEADER_BYTES].tobytes())
        if not HEADER_BYTES <= size_bytes <= changes.size - at:
            raise delta_error(StreamFault.LENGTH, f"{size_bytes} bytes in its header")
        apply_delta(changes[at : at + size_bytes], [(0, find_address(weights), weights.size // 2)])
        at += _round_up(size_bytes)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
