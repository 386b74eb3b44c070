"""Pages found by their headers: which block garbage collection was about to erase."""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.page import PageWrites
from nearflash.storage.kv import KvLayout, KvShape
from nearflash.storage.kv.pages import PageMaker
from nearflash.storage.kv.recovery import FoundPages
from nearflash.storage.kv.sequence import Tags

SHAPE = KvShape(layers=1, kv_heads=1, dim=32)
LAYOUT = KvLayout(16, interleaved=True, block_tokens=64, index_format=IndexFormat.INT4, page_bytes=4096)
GEOMETRY = FlashGeometry(4096, pages_per_block=4, channels=1, luns=1, blocks=4)


@pytest.fixture
def find(tmp_path):
    """Program groups of sequence 0 at pages, and find them again."""

    def find(groups_of_pages, geometry=GEOMETRY):
        maker = PageMaker(SHAPE, LAYOUT)
        path = tmp_path / "kv"
        with FileFlash.create(path, geometry, threads=1) as flash:
            for page, group in sorted(groups_of_pages.items()):
                k = np.full((1, 16, 32), group, np.float16)
                batch = maker.token_pages(maker.token_keys(0, 0, range(group, group + 1)), k, k)
                flash.program(np.array([page]), PageWrites(batch.keys, batch.data, batch.aux))
            return FoundPages(flash, SHAPE, LAYOUT, verify=True)

    return find


FULL = {page: page for page in range(12)}
"""Three blocks of other groups each."""


@pytest.mark.parametrize(
    ("copies", "redundant"),
    [
        ({}, []),  # block 3 is free
        ({12: 0}, [3]),  # one of four copies was made: the block that they are in is the one to give up
        ({12: 0, 13: 1, 14: 2, 15: 3}, [0]),  # all of them were: either will do
        ({12: 0, 13: 99}, []),  # block 3 has a page of its own
    ],
)
def test_the_block_that_collection_was_to_erase_or_to_fill(find, copies, redundant):
    found = find(FULL | copies)
    tags = Tags((0,), (0,))
    live = found.tables(PageKind.TOKEN, tags)[0].ravel()
    live = np.concatenate([live, [page for page, group in copies.items() if group == 99]]).astype(np.int64)
    # A copy of a page that is live has its place in block 3 or in block 0: tables take the last one.
    assert found.redundant_blocks(live).tolist() == (
        [] if not set(redundant) & set((live // 4).tolist()) else redundant
    )
    avoided = found.tables(PageKind.TOKEN, tags, np.array([3]))[0].ravel()
    assert avoided.tolist() == list(range(12))
    assert found.tables(PageKind.TOKEN, tags, np.array([0]))[0].ravel().tolist() == [
        next((page for page, group in copies.items() if group == at), at) for at in range(12)
    ]


def test_a_flash_without_headers_that_last_is_rejected(make_store):
    with make_store(memory=True) as store, pytest.raises(CommandError, match="in a file"):
        FoundPages(store.flash, SHAPE, LAYOUT, verify=False)
