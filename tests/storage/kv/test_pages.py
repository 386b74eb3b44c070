"""Pages: the bytes that the model of the attend kernel makes, and that devices read."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.model.attention.memory.image import head_image
from nearflash.model.attention.memory.placement import MemoryStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.storage.flash.page import PageWrites, seal_codewords
from nearflash.storage.kv import KvShape
from nearflash.storage.kv.index import index_rows

CASES = [
    # dim, group_tokens, interleaved, block_tokens, format, page_bytes
    (128, 8, True, 256, IndexFormat.INT4, 4096),
    (64, 32, False, 128, IndexFormat.INT8, 4096),
    (80, 24, False, 96, IndexFormat.FP16, 4096),
    (36, 12, True, 48, IndexFormat.INT4, 8192),
    (256, 16, True, 1024, IndexFormat.FP16, 16384),
]


@pytest.mark.parametrize("split", [[1.0], [0.3, 0.31, 0.8, 1.0]], ids=["at once", "in parts"])
@pytest.mark.parametrize("dim, n, interleaved, block, form, page_bytes", CASES)
def test_pages_are_the_models(make_store, draw, dim, n, interleaved, block, form, page_bytes, split):
    shape, tokens = KvShape(2, 2, dim), 2 * block
    k, v = draw([dim, n], tokens, shape)
    k[0, :, 1], k[1, 3, 2], k[1, 4, 2] = -0.0, np.inf, np.nan  # a row without range, and rows that are not finite
    settings = HeadSettings(
        Mode(0), dim, 1.0, dim // 4, tokens, group_tokens=n, interleaved=interleaved, block_tokens=block,
        index_format=form, page_bytes=page_bytes,
    )  # fmt: skip
    with make_store(
        shape=shape, group_tokens=n, interleaved=interleaved, block_tokens=block, index_format=form,
        page_bytes=page_bytes,
    ) as store:  # fmt: skip
        store.add()
        sequence, start = store.add(), 0
        for end in (round(part * tokens) for part in split):
            store.append(sequence, 1, k[:, start:end], v[:, start:end])
            start = end
        for head in range(2):
            image = head_image(k[head], v[head], settings, PageTag(sequence, 1, head), MemoryStore(8, 1))
            at = store.head(sequence, 1, head)
            pages = (at.token_pages[:, None] + np.arange(store.layout.group_pages)).reshape(-1)
            token_keys = store.pages.token_keys(sequence, 1, range(tokens // n))[head].reshape(-1)
            index_keys = store.pages.index_keys(sequence, 1, range(tokens // block))[head].reshape(-1)
            ours = b""
            for numbers, keys in ((pages, token_keys), (at.index_pages, index_keys)):
                read = store.read(numbers, keys)
                ours += seal_codewords(PageWrites(keys, read.data, read.aux)).tobytes()
            assert ours == b"".join(page.data for page in image.pages)


def test_rows_of_many_blocks_are_those_of_each(make_store, draw):
    with make_store(index_format=IndexFormat.INT8) as store:
        k, _ = draw(3, 128)
        layout = store.pages.index_layout
        blocks = k.reshape(-1, 64, layout.dim)
        rows, factors = index_rows(blocks, layout)
        for block, row, factor in zip(blocks, rows, factors, strict=True):
            alone = index_rows(block[None], layout)
            assert np.array_equal(alone[0][0], row) and np.array_equal(alone[1][0], factor)
