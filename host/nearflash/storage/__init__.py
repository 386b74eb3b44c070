"""Direct I/O on flash and the crash-safe state store."""

from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile, aligned_buffer
from nearflash.storage.state.layout import ARRAYS
from nearflash.storage.state.manifest import ADAM_ARRAYS, Extent, Manifest, StateArray, TensorEntry
from nearflash.storage.state.state_store import StateStore

__all__ = [
    "ADAM_ARRAYS",
    "ARRAYS",
    "BLOCK_BYTES",
    "DirectFile",
    "Extent",
    "Manifest",
    "StateArray",
    "StateStore",
    "TensorEntry",
    "aligned_buffer",
]
