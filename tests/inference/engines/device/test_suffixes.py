"""Unindexed suffixes in a device's memory: what is written when, where entries point, what is released."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.attention.pages import PageEntry
from nearflash.device import open_device
from nearflash.inference.engines.device.suffixes import DeviceSuffixes
from nearflash.storage.flash.page import seal_codewords


@pytest.mark.parametrize("kept", [True, False])
def test_entries_point_to_sealed_groups(make_store, make_layout, shape, filled, kept):
    """A sequence that grows, its suffix kept or only its last group: every entry's page is the group's."""
    layout = make_layout()
    store = make_store(shape, layout, suffix_bytes=1 << 20 if kept else 0)
    with open_device("model:attend-tiny") as device:
        suffixes, memory = DeviceSuffixes(device, store, 2), {}
        (number,), ((k, v),) = filled(store, shape, [5])
        for more in (0, 1, 2, 1, 30, 25, 1):
            new = np.random.default_rng(more).standard_normal((2, shape.kv_heads, more, shape.dim)).astype(np.float16)
            store.append(number, 1, *new)
            k, v = (np.concatenate(pair, axis=1) for pair in zip((k, v), new, strict=True))
            stored = store.layer(number, 1)
            groups = range(stored.flash_tokens // 8, -(-k.shape[1] // 8))
            assert stored.flash_tokens == k.shape[1] // (32 if kept else 8) * (32 if kept else 8)
            entries = suffixes.entries(stored)
            assert entries.shape == (3, len(groups))
            space = (0, 0), (0, groups.stop * 8 - k.shape[1]), (0, 0)
            full = [np.pad(x[:, stored.flash_tokens :], space) for x in (k, v)]
            want = seal_codewords(store.pages.token_pages(store.pages.token_keys(number, 1, groups), *full))
            memory = suffixes._suffixes[number, 1].buffer
            for word, page in zip(entries.reshape(-1), want, strict=True):
                entry = PageEntry.unpack(int(word))
                place = entry.address - memory.address
                assert entry.channel < 2 and np.array_equal(memory.host[place : place + 8 * SEALED_BYTES], page.ravel())
        suffixes.free(number)
        assert not suffixes._suffixes


def test_a_full_group_is_sealed_once(make_store, make_layout, shape, filled, monkeypatch):
    store = make_store(shape, make_layout())
    with open_device("model:attend-tiny") as device:
        suffixes = DeviceSuffixes(device, store, 2)
        (number,), _ = filled(store, shape, [20])
        written = []
        write = DeviceSuffixes._write
        monkeypatch.setattr(DeviceSuffixes, "_write", lambda *a: written.append((a[-1].start, a[-1].stop)) or write(*a))
        for more in (0, 1, 3, 1):
            store.append(number, 1, *np.zeros((2, shape.kv_heads, more, shape.dim), np.float16))
            suffixes.entries(store.layer(number, 1))
        assert written == [(0, 3), (2, 3), (2, 3), (3, 4)]
        suffixes.free()
