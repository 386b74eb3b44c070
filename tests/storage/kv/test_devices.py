"""Heads attended to by a device, on the pages of a store: its tables lead to them, wherever they were moved."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.drivers.attend import Head, attend
from nearflash.model.attention import head as model
from nearflash.model.attention.memory.settings import Addresses, HeadSettings
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.kv.statistics import Cause

SHAPE = KvShape(2, 2, 32)
TOKENS = 96


@pytest.fixture
def device():
    with AttendModelDevice(attend_config("attend-tiny"), pages_per_block=8) as device:
        yield device


def nand(device, layout):
    return NandFlash(device, pages_per_block=8, blocks_per_lun=6, paired=not layout.interleaved)


def memory(device, layout):
    return MemoryFlash(device, FlashGeometry(layout.page_bytes, 8, 2, 1, 36))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("flash_of", [memory, nand])
def test_heads_from_a_store_are_the_models(device, draw, flash_of, interleaved):
    layout = KvLayout(16, interleaved, 32, IndexFormat.INT4, 4096)
    settings = HeadSettings(Mode.PAGE | Mode.PROBABILITY, 32, 0.25, score_dims=12, top_k=3, local_window=4,
                            group_tokens=16, interleaved=interleaved, block_tokens=32,
                            index_format=IndexFormat.INT4)  # fmt: skip
    rng = np.random.default_rng(5)
    with KvStore(flash_of(device, layout), SHAPE, layout, read_limit=10) as store:
        values = {}
        for sequence in (store.add() for _ in range(9)):  # which come and go until pages of those that stay are moved
            values[sequence] = draw(sequence, TOKENS, SHAPE)
            for start in range(0, TOKENS, 24):
                store.append(sequence, 1, *(x[:, start : start + 24] for x in values[sequence]))
            if sequence >= 4:
                store.free(sequence - 3)
                del values[sequence - 3]
            store.count_reads(store.layer(0, 1).token_pages.reshape(-1))
        heads, expected = [], []
        for sequence, (k, v) in values.items():
            for head in range(SHAPE.kv_heads):
                at, q = store.head(sequence, 1, head), rng.standard_normal((3, 32)).astype(np.float16)
                descriptor = settings.descriptor(PageTag(sequence, 1, head), TOKENS, 3, Addresses())
                tables = store.table(at.token_pages), store.table(at.index_pages)
                heads.append(Head(descriptor, q, at.v_mean, *tables))
                expected.append(model.attend_repeated(q, k[head], v[head], at.v_mean, settings).out)
        outs = [output.value() for output in attend(device, heads).heads]
        assert np.array_equal(outs, expected)
        programmed = store.statistics.programmed
        assert programmed[Cause.COLLECTION] + programmed[Cause.DISTURB] > 0
