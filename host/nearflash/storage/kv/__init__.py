"""The KV cache on flash: token groups and index pages of sequences, found by layer and head."""

from nearflash.storage.kv.layout import KvLayout, KvShape
from nearflash.storage.kv.store import KvStore, StoredHead

__all__ = ["KvLayout", "KvShape", "KvStore", "StoredHead"]
