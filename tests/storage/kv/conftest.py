"""Stores of the tests: small shapes, and K and V of sequences."""

from collections.abc import Callable

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config
from nearflash.device import open_device
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.kv import KvLayout, KvShape, KvStore

SHAPE = KvShape(layers=2, kv_heads=3, dim=32)


class CountingFlash(MemoryFlash):
    """Counts pages programmed and erases, and takes the pages of a block without holes only, as NAND does."""

    concurrent = True  # as host memory is

    def __init__(self, device, geometry):
        super().__init__(device, geometry)
        self.ends, self.erases, self.programmed = {}, np.zeros(geometry.blocks, int), 0

    def program(self, pages, batch):
        for page in pages.tolist():
            block, place = divmod(page, self.geometry.pages_per_block)
            assert place == self.ends.get(block, 0)
            self.ends[block] = place + 1
        super().program(pages, batch)
        self.programmed += len(pages)

    def erase(self, block):
        super().erase(block)
        self.ends[block] = 0
        self.erases[block] += 1


@pytest.fixture
def make_store(tmp_path) -> Callable[..., KvStore]:
    """A store on a file, in counted memory, or on NAND; keywords of what it is made of."""

    def make(path=None, *, shape=SHAPE, blocks=32, pages_per_block=16, channels=1, luns=1, page_bytes=4096,
             group_tokens=16, interleaved=True, block_tokens=64, index_format=IndexFormat.INT4,
             backend=None, memory=False, nand=False, **keywords):  # fmt: skip
        geometry = FlashGeometry(page_bytes, pages_per_block, channels, luns, blocks)
        layout = KvLayout(group_tokens, interleaved, block_tokens, index_format, page_bytes)
        if memory:
            flash = CountingFlash(open_device("host:update-tiny"), geometry)
        elif nand:
            device = AttendModelDevice(attend_config("attend-tiny"), pages_per_block=pages_per_block)
            flash = NandFlash(device, pages_per_block=pages_per_block, blocks_per_lun=blocks, paired=not interleaved)
        else:
            flash = FileFlash.create(path or tmp_path / "kv", geometry, threads=2, backend=backend)
        return KvStore(flash, shape, layout, **keywords)

    return make


@pytest.fixture
def draw() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """K and V (heads, t, d) of a seed."""

    def draw(seed, tokens, shape=SHAPE):
        rng = np.random.default_rng(seed)
        size = (2, shape.kv_heads, tokens, shape.dim)
        return tuple(rng.standard_normal(size, dtype=np.float32).astype(np.float16))

    return draw


def token_values(store, data):
    """K and V (groups, n, d) of full groups, from their pages (groups · pages of a group, page_bytes)."""
    layout, dim = store.layout, store.shape.dim
    n, places = layout.group_tokens, data.reshape(-1, layout.group_pages, layout.page_bytes).view(np.float16)
    if layout.interleaved:
        return np.moveaxis(places[:, 0, : 2 * n * dim].reshape(-1, n, 2, dim), 2, 0)
    return np.moveaxis(places[..., : n * dim].reshape(-1, 2, n, dim), 1, 0)


@pytest.fixture
def stored() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """K and V (heads, S, d) of a layer as the store gives them back: full groups from their pages."""

    def stored(store, sequence, layer):
        shape, size = store.shape, store.layout.group_tokens
        at = store.layer(sequence, layer)
        groups = range(at.tokens // size)
        pages = at.token_pages[..., None] + np.arange(store.layout.group_pages)
        last = len(groups) * size
        read = store.read(pages.reshape(-1), store.pages.token_keys(at.token_tags, layer, groups).reshape(-1))
        parts = zip(token_values(store, read.data), (at.suffix_k, at.suffix_v), strict=True)
        return tuple(
            np.concatenate([full.reshape(shape.kv_heads, last, shape.dim), suffix[:, last - at.flash_tokens :]], axis=1)
            for full, suffix in parts
        )

    return stored
