"""Direct I/O on flash and the crash-safe state file."""

from nearflash.storage.direct import BLOCK_BYTES, DirectFile, aligned_buffer
from nearflash.storage.layout import ARRAYS
from nearflash.storage.manifest import Extent, Manifest, TensorEntry
from nearflash.storage.state import StateFile

__all__ = ["ARRAYS", "BLOCK_BYTES", "DirectFile", "Extent", "Manifest", "StateFile", "TensorEntry", "aligned_buffer"]
