"""Unindexed suffixes in a device's memory: KV page groups that the store has in memory, sealed as pages."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.device.base import Buffer, Device
from nearflash.storage.flash.memory import memory_entries
from nearflash.storage.flash.page import seal_codewords
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["DeviceSuffixes"]


@dataclass
class _Suffix:
    """Groups of one (sequence, layer), each of all heads one after the other."""

    buffer: Buffer
    first: int
    """Number of the first group."""
    full: int = 0
    """Groups that are there and never change."""


class DeviceSuffixes:
    """A buffer for every (sequence, layer) that `entries` was asked for; a group is written when it changed."""

    def __init__(self, device: Device, store: KvStore, channels: int) -> None:
        self._device, self._store, self._channels = device, store, channels
        self._group_bytes = store.layout.group_pages * store.layout.page_codewords * SEALED_BYTES
        self._suffixes: dict[tuple[int, int], _Suffix] = {}
        """By sequence and layer."""

    def entries(self, stored: StoredHead) -> NDArray[np.uint64]:
        """Page entries (heads, groups) of the groups in memory, the last one filled up with zeros."""
        size, heads = self._store.layout.group_tokens, self._store.shape.kv_heads
        first, end = stored.flash_tokens // size, -(-stored.tokens // size)
        if first == end:
            return np.zeros((heads, 0), np.uint64)
        suffix = self._suffix((stored.sequence, stored.page_tag.layer), first, end - first)
        if first + suffix.full < end:
            self._write(suffix, stored, range(first + suffix.full, end))
        suffix.full = stored.tokens // size - first
        head, group = np.ogrid[:heads, first:end]
        addresses = suffix.buffer.address + ((group - first) * heads + head) * self._group_bytes
        return memory_entries(addresses, (group + head + stored.sequence) % self._channels)

    def free(self, sequence: int | None = None) -> None:
        """Release the buffers of a sequence, or all."""
        for key in [key for key in self._suffixes if sequence in (None, key[0])]:
            self._device.free(self._suffixes.pop(key).buffer)

    def _suffix(self, place: tuple[int, int], first: int, groups: int) -> _Suffix:
        """Room for so many groups from number `first` on."""
        suffix, size = self._suffixes.get(place), self._store.shape.kv_heads * self._group_bytes
        if suffix is None or suffix.buffer.size_bytes < groups * size:
            if suffix is not None:
                self._device.free(self._suffixes.pop(place).buffer)
            most = self._store.layout.block_tokens // self._store.layout.group_tokens
            suffix = self._suffixes[place] = _Suffix(self._device.allocate(min(2 * groups - 1, most) * size), first)
        if suffix.first != first:
            suffix.first, suffix.full = first, 0
        return suffix

    def _write(self, suffix: _Suffix, stored: StoredHead, groups: range) -> None:
        """Seal `groups`, and bring them into the device's memory."""
        size, heads, page_tag = self._store.layout.group_tokens, self._store.shape.kv_heads, stored.page_tag
        start = groups.start * size - stored.flash_tokens
        space = (0, 0), (0, groups.stop * size - stored.tokens), (0, 0)
        k, v = (np.pad(states[:, start:], space) for states in (stored.suffix_k, stored.suffix_v))
        keys = self._store.pages.token_keys(page_tag.sequence, page_tag.layer, groups)
        sealed = seal_codewords(self._store.pages.token_pages(keys, k, v))
        by_group = sealed.reshape(heads, len(groups), self._group_bytes).swapaxes(0, 1)
        offset = (groups.start - suffix.first) * heads * self._group_bytes
        suffix.buffer.host[offset : offset + sealed.nbytes] = by_group.reshape(-1)
        suffix.buffer.sync_to_device(offset, sealed.nbytes)
