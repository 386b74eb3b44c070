"""Flash in a device's memory: sealed codewords at the addresses that a page table gives."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.errors import AddressError, PageError, StateError
from nearflash.device import open_device
from nearflash.model.nand.codeword import check
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.page import PageWrites, page_headers, page_keys

GEOMETRY = FlashGeometry(4096, 8, 2, 1, 4)
KEYS = page_keys(3, 1, 2, [4, 5], PageKind.INDEX)


@pytest.fixture
def flash():
    with open_device("host:update-tiny") as device, MemoryFlash(device, GEOMETRY) as flash:
        flash.device = device
        yield flash


@pytest.fixture
def batch():
    aux = np.zeros((2, 8, 8), np.uint8)
    aux[..., 4:] = page_headers(KEYS, 4096, 16, IndexFormat.INT4)
    return PageWrites(KEYS, np.random.default_rng(1).integers(0, 256, (2, 4096), dtype=np.uint8), aux)


def test_pages_are_found_by_the_device(flash, batch):
    pages = np.array([9, 3])
    flash.program(pages, batch)
    read = flash.read(pages[::-1], KEYS[::-1])
    assert np.array_equal(read.data, batch.data[::-1]) and np.array_equal(read.aux, batch.aux[::-1])
    for row, word in enumerate(flash.entries(pages).tolist()):
        entry = PageEntry.unpack(word)
        assert entry.channel == [1, 0][row]
        sealed = flash.device.memory.view(entry.address, 8 * 528).reshape(8, 528)
        checked = check(sealed, PageTag(3, 1, 2), 4 + row, PageKind.INDEX)
        assert not checked.misdirected.any() and np.array_equal(checked.data.reshape(-1), batch.data[row])


def test_damage_is_found(flash, batch):
    pages = np.array([0, 1])
    flash.program(pages, batch)
    flash.device.memory.view(PageEntry.unpack(int(flash.entries(pages)[1])).address, 1000)[600] ^= 4
    with pytest.raises(PageError, match=r"sequence 3, layer 1, head 2, index page 5 is damaged.*at page 1"):
        flash.read(pages, KEYS)


def test_blocks_are_programmed_in_order_and_erased(flash, batch):
    flash.program(np.array([0, 1]), batch)
    with pytest.raises(StateError, match="rising order in an erased block"):
        flash.program(np.array([1, 2]), batch)
    flash.erase(0)
    with pytest.raises(PageError, match="is erased"):
        flash.read(np.array([0]), KEYS[:1])
    flash.program(np.array([0, 1]), batch)


def test_the_memory_must_have_room():
    with open_device("host:update-tiny") as device, pytest.raises(AddressError, match="device memory"):
        MemoryFlash(device, FlashGeometry(65536, 256, 1, 1, 1024))
