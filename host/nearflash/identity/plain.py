"""Values reduced to what JSON holds, and the digest of that."""

import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["OPAQUE", "digest_of", "plain"]

OPAQUE = object()
"""What `plain` returns for a value that has no content of its own to compare: a module, a configuration, a lock."""


def plain(value: Any) -> Any:
    """Numbers, text, dtypes and enumerations, and lists, sets and mappings of them, as JSON holds them; else OPAQUE."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.dtype | torch.Size | bytes | complex):
        return str(value)
    if isinstance(value, Mapping):
        return _join({f"{type(key).__name__} {key}": plain(item) for key, item in value.items()})
    if isinstance(value, set | frozenset):
        plain_items = [plain(item) for item in value]
        return OPAQUE if OPAQUE in plain_items else sorted(plain_items, key=str)
    if isinstance(value, list | tuple):
        return _join([plain(item) for item in value])
    return OPAQUE


def _join(found: Any) -> Any:
    values = found.values() if isinstance(found, dict) else found
    return OPAQUE if any(item is OPAQUE for item in values) else found


def digest_of(value: Any) -> str:
    """SHA-256, hexadecimal, of a value that `plain` returned; the order of mappings has no part in it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
