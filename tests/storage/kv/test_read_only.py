"""A store whose NAND has no spare block left: a named error, then all that was durable is read, by host and device."""

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import ReadOnlyError
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.kv import KvLayout, KvShape, KvStore

SHAPE = KvShape(1, 2, 32)
LAYOUT = KvLayout(16, True, 32, IndexFormat.INT4, 4096)


def tokens_of(store, sequence):
    """K and V (2, heads, t, d) of all whole groups, from pages."""
    heads = []
    for head in range(SHAPE.kv_heads):
        at = store.head(sequence, 0, head)
        keys = store.pages.token_keys(at.token_tags, 0, range(len(at.token_pages)))[head].reshape(-1)
        heads.append(store.pages.values(store.read(at.token_pages, keys).data).reshape(2, -1, SHAPE.dim))
    return np.stack(heads, axis=1)


def test_durable_tokens_are_read_and_nothing_more_is_taken(draw):
    with AttendModelDevice(attend_config("attend-tiny"), pages_per_block=8) as device:
        flash = NandFlash(device, pages_per_block=8, blocks_per_lun=4, paired=False, spare_blocks=1)
        store = KvStore(flash, SHAPE, LAYOUT, buffer_bytes=4 * 4096)
        sequence, (k, v) = store.add(), draw(3, 128, SHAPE)
        store.append(sequence, 0, k[:, :64], v[:, :64])
        store.flush()
        device.nand.fails = lambda kind, block: block[2] >= TABLE_BLOCKS
        with pytest.raises(ReadOnlyError, match="nothing more is written to this flash; what was durable can be read"):
            store.append(sequence, 0, k[:, 64:], v[:, 64:])
            store.flush()
        for call in (store.flush, lambda: store.append(sequence, 0, k[:, :16], v[:, :16])):
            with pytest.raises(ReadOnlyError):
                call()
        found = tokens_of(store, sequence)
        assert np.array_equal(found[:, :, :64], np.stack([k, v])[:, :, :64])
        durable = store.head(sequence, 0, 1).token_pages[:4]
        assert np.array_equal(store.table(durable), flash.entries(durable))
        store.close()
