"""The KV cache on flash: KV page groups and index pages of sequences, found by layer and head."""

from nearflash.storage.kv.kept import open_kept_store, read_kept_layout
from nearflash.storage.kv.layout import KvLayout, KvShape
from nearflash.storage.kv.store import DEFAULT_SUFFIX_BYTES, KvStore, StoredHead

__all__ = [
    "DEFAULT_SUFFIX_BYTES",
    "KvLayout",
    "KvShape",
    "KvStore",
    "StoredHead",
    "open_kept_store",
    "read_kept_layout",
]
