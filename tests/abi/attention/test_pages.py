"""Layouts of token and index pages, and entries of page tables: boundary values and messages."""

from dataclasses import replace
from itertools import pairwise

import pytest

from nearflash.abi.attention.pages import IndexFormat, IndexLayout, PageEntry, TokenLayout
from nearflash.abi.errors import CommandError

SEPARATE = TokenLayout(page_bytes=4096, dim=64, tokens=16, interleaved=False)
INTERLEAVED = TokenLayout(page_bytes=4096, dim=128, tokens=8, interleaved=True)
INDEX = IndexLayout(page_bytes=4096, dim=64, block_tokens=256, format=IndexFormat.FP16)


@pytest.mark.parametrize(
    ("page_bytes", "dim", "interleaved", "most"),
    [
        (4096, 64, False, 32),
        (4096, 64, True, 16),
        (4096, 80, True, 12),  # 12.8 fit
        (4096, 256, True, 4),
        (16384, 64, False, 128),
        (65536, 64, True, 256),
        (16384, 4, False, 1024),  # 2,048 fit
    ],
)
def test_most_tokens_of_a_group(page_bytes, dim, interleaved, most):
    assert TokenLayout.capacity(page_bytes, dim, interleaved) == min(most, 64)
    assert TokenLayout.capacity(page_bytes, dim, interleaved, 1024) == most
    TokenLayout(page_bytes, dim, most, interleaved)
    with pytest.raises(CommandError, match=f"group tokens must be a multiple of 4, 4 to {most}, not {most + 4}"):
        TokenLayout(page_bytes, dim, most + 4, interleaved)


@pytest.mark.parametrize("tokens", [0, 2, 6, -4])
def test_group_tokens_that_are_no_group(tokens):
    with pytest.raises(CommandError, match=f"group tokens must be a multiple of 4, 4 to 32, not {tokens}"):
        replace(SEPARATE, tokens=tokens)


def test_a_separate_group_has_k_on_one_page_and_v_on_the_next():
    assert (SEPARATE.pages, SEPARATE.page_codewords) == (2, 8)
    assert SEPARATE.span(0, value=False) == (0, 128)
    assert SEPARATE.span(15, value=False) == (1920, 2048)
    assert SEPARATE.span(0, value=True) == (4096, 4224)
    assert SEPARATE.codewords(3) == {0, 8}
    assert SEPARATE.codewords(4) == {1, 9}


def test_an_interleaved_group_has_v_after_k_of_each_token():
    assert (INTERLEAVED.pages, INTERLEAVED.page_codewords) == (1, 8)
    assert INTERLEAVED.span(1, value=False) == (512, 768)
    assert INTERLEAVED.span(1, value=True) == (768, 1024)
    assert [INTERLEAVED.codewords(token) for token in range(8)] == [{token} for token in range(8)]


def test_a_token_across_codewords_needs_both():
    """80 dimensions are 160 bytes: token 3's K is at 480 to 640."""
    assert TokenLayout(4096, 80, 20, False).codewords(3) == {0, 1, 8, 9}


def test_spans_do_not_overlap_and_stay_in_their_pages():
    for layout in (SEPARATE, INTERLEAVED, TokenLayout(8192, 80, 20, True)):
        spans = sorted(layout.span(token, value=value) for token in range(layout.tokens) for value in (False, True))
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert spans[-1][1] <= layout.pages * layout.page_bytes
        assert all(start % 8 == 0 for start, _ in spans), "beats of 8 bytes"


@pytest.mark.parametrize(
    ("form", "block_tokens", "stride", "rows"),
    [
        (IndexFormat.FP16, 256, 512, 8),
        (IndexFormat.FP16, 16, 512, 8),  # a codeword at least
        (IndexFormat.FP16, 272, 1024, 4),
        (IndexFormat.INT8, 256, 512, 8),
        (IndexFormat.INT8, 1024, 1024, 4),
        (IndexFormat.INT4, 1024, 512, 8),
    ],
)
def test_rows_of_an_index_page(form, block_tokens, stride, rows):
    layout = replace(INDEX, format=form, block_tokens=block_tokens)
    assert (layout.stride_bytes, layout.row_codewords, layout.rows) == (stride, stride // 512, rows)
    assert layout.pages == 64 // rows


def test_a_last_index_page_may_have_fewer_rows():
    assert replace(INDEX, dim=65).pages == 9
    assert replace(INDEX, dim=4).pages == 1


def test_rows_of_a_large_page_are_at_most_64():
    assert replace(INDEX, page_bytes=1 << 16).rows == 64


@pytest.mark.parametrize("block_tokens", [0, 8, 24, 1040])
def test_blocks_of_no_size(block_tokens):
    with pytest.raises(CommandError, match=f"block_tokens must be a multiple of 16, 16 to 1024, not {block_tokens}"):
        replace(INDEX, block_tokens=block_tokens)


def test_a_row_longer_than_a_page():
    with pytest.raises(CommandError, match="a row of 1024 tokens must fit a page of 1024 bytes"):
        IndexLayout(1024, 64, 1024, IndexFormat.FP16)


def test_bits_of_the_index_formats():
    assert [form.bits for form in IndexFormat] == [16, 8, 4]
    assert [int(form) for form in IndexFormat] == [0, 1, 2]


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (PageEntry(0), 0),
        (PageEntry(3, 5, 0x1234), 0x0003_0005_0000_1234),
        (PageEntry(255, 255, 0xFFFF_FFFF), 0x00FF_00FF_FFFF_FFFF),
        (PageEntry(2, address=0), 0x8002_0000_0000_0000),
        (PageEntry(7, address=0xFFFF_FFFF_FFF8), 0x8007_FFFF_FFFF_FFF8),
    ],
)
def test_words_of_a_page_table(entry, word):
    assert entry.pack() == word
    assert PageEntry.unpack(word) == entry


@pytest.mark.parametrize(
    "entry",
    [
        PageEntry(256),
        PageEntry(-1),
        PageEntry(0, 256),
        PageEntry(0, 0, 1 << 32),
        PageEntry(0, address=4),
        PageEntry(0, address=1 << 48),
    ],
)
def test_entries_that_do_not_fit(entry):
    text = "a page entry must have 8-bit channel and lun, 32-bit row, 48-bit address, not PageEntry"
    with pytest.raises(CommandError, match=text):
        entry.pack()
