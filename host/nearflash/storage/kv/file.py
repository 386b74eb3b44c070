"""A KV store in a file: how large it gets, and what its superblock says."""

from collections.abc import Mapping
from typing import Any

from nearflash.abi.errors import CommandError, StateError, StorageFullError
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.spare import SpareRecords
from nearflash.storage.io.direct import BLOCK_BYTES
from nearflash.storage.kv.layout import KvLayout, KvShape

__all__ = ["described", "file_geometry"]

_BLOCK_BYTES = 1 << 20
_PAGES_PER_BLOCK_LEAST = 16
_BLOCKS_LEAST = 3


def file_geometry(size_bytes: int, page_bytes: int, *, channels: int = 1) -> FlashGeometry:
    """The largest flash, of blocks of about 1 MiB, whose file takes at most `size_bytes`. Raises StorageFullError."""
    pages = max(_BLOCK_BYTES // page_bytes, _PAGES_PER_BLOCK_LEAST)
    one = FlashGeometry(page_bytes, pages, channels, 1, channels)
    each = one.block_bytes + SpareRecords(one).zone_bytes
    blocks = (size_bytes - BLOCK_BYTES) // each // channels * channels
    if blocks < _BLOCKS_LEAST * channels:
        least = BLOCK_BYTES + _BLOCKS_LEAST * channels * each
        raise StorageFullError(f"size_bytes must be at least {least} for pages of {page_bytes}, not {size_bytes!r}")
    return FlashGeometry(page_bytes, pages, channels, 1, blocks)


def described(about: Mapping[str, Any]) -> tuple[KvShape, KvLayout]:
    """Shape and layout as the superblock gives them. Raises StateError where it tells of something else."""
    try:
        return KvShape(**about["shape"]), KvLayout(**about["layout"])
    except (KeyError, TypeError, CommandError) as error:
        raise StateError(f"the flash must hold a KV store, not {dict(about)!r}") from error
