"""Stores whose KV page groups are larger than a device takes: what is read back, cropped, forked, and kept."""

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore, open_kept_store

SHAPE = KvShape(layers=2, kv_heads=2, dim=32)
LAYOUTS = {
    "together": KvLayout(256, True, 512, IndexFormat.INT8, 32768),
    "apart": KvLayout(256, False, 1024, IndexFormat.INT4, 16384),
}
TOKENS = 1500


def opened(path, layout):
    geometry = FlashGeometry(layout.page_bytes, 16, 1, 2, 24)
    return open_kept_store(path, SHAPE, layout, geometry, direct=False, buffer_bytes=8 * layout.page_bytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_tokens_outlast_the_store(tmp_path, stored, name):
    layout = LAYOUTS[name]
    kv = np.random.default_rng(2).standard_normal((2, SHAPE.kv_heads, TOKENS, SHAPE.dim)).astype(np.float16)
    with opened(tmp_path / "kv", layout) as store:
        number = store.add()
        for start, end in ((0, 700), (700, 701), (701, TOKENS)):
            for layer in range(SHAPE.layers):
                store.append(number, layer, *kv[:, :, start:end])
        child = store.fork(number)
        store.crop(child, 300)
    with opened(tmp_path / "kv", layout) as store:
        assert store.lengths == {number: TOKENS, child: 300}
        for layer in range(SHAPE.layers):
            assert np.array_equal(np.stack(stored(store, number, layer)), kv)
            assert np.array_equal(np.stack(stored(store, child, layer)), kv[:, :, :300])


@pytest.mark.parametrize(
    ("group", "block", "message"),
    [
        (256, 512, "4 to 128, not 256"),
        (66, 528, "multiple of 4, 4 to 128, not 66"),
        (96, 1000, "block_tokens must be a multiple of 96"),
        (128, 2048, "16 to 1024, not 2048"),
    ],
)
def test_groups_that_fit_no_page_or_block_are_rejected(tmp_path, group, block, message):
    with FileFlash.create(tmp_path / "kv", FlashGeometry(16384, 16, 1, 2, 24), direct=False) as flash:
        with pytest.raises(CommandError, match=message):
            KvStore(flash, SHAPE, KvLayout(group, True, block, IndexFormat.INT8, 16384))
