"""Pages of a head: everything that the attention reads is found where tables and layouts say, and nowhere else."""

from itertools import pairwise

import numpy as np
import pytest

from nearflash.abi.attention.codeword import CODEWORD_BYTES, RAW_BYTES, SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.model.attention.memory.image import head_image, image_bytes
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.memory.placement import MemoryStore, NandStore
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.nand.codeword import check, decode

OWNER = PageTag(sequence=0x01020304, layer=5, head=3)
FP16, INT8, INT4 = IndexFormat


def settings(interleaved, index, n, block, dim=64):
    return HeadSettings(Mode.PAGE, dim, 0.2, score_dims=8, top_k=4, local_window=4, group_tokens=n,
                        interleaved=interleaved, block_tokens=block, index_format=index)  # fmt: skip


def read(image, store, entry_word, page_index, kind, pages):
    """Codewords (data, aux) of a page, or of two, as a page source reads them."""
    entry = PageEntry.unpack(int(entry_word))
    if entry.address is not None:
        (data,) = (p.data for p in image.pages if p.entry == entry)
        codewords = np.frombuffer(data, np.uint8).reshape(-1, SEALED_BYTES)
        checked = check(codewords, OWNER, page_index, kind)
        assert not (checked.misdirected | checked.uncorrectable).any()
        return checked.data, checked.aux
    found = []
    for sibling in range(pages):
        unit = entry.lun ^ sibling
        (data,) = (p.data for p in image.pages if p.entry == PageEntry(entry.channel, unit, entry.row))
        codewords = np.frombuffer(data, np.uint8).reshape(-1, RAW_BYTES)
        checked = decode(codewords, entry.row, unit, OWNER, page_index, kind, first=sibling * len(codewords))
        assert not (checked.misdirected | checked.uncorrectable).any() and not checked.errors.any()
        found.append((checked.data, checked.aux))
    data, aux = zip(*found, strict=True)
    return np.concatenate(data), np.concatenate(aux)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("nand", [False, True])
def test_tokens_lie_where_the_layout_says(make_head, interleaved, nand):
    _, k, v, _ = make_head(70, 64)
    kind = settings(interleaved, FP16, 8, 512)
    store = NandStore(2, 4) if nand else MemoryStore(0x1000, 2)
    image = head_image(k, v, kind, OWNER, store, step=77)
    layout = kind.token_layout
    assert len(image.token_table) == 9 and len(image.index_table) == 0
    for token in range(70):
        group, place = divmod(token, 8)
        data, aux = read(image, store, image.token_table[group], group, PageKind.TOKEN, layout.pages)
        for value, source in enumerate((k, v)):
            start, end = layout.span(place, value=bool(value))
            np.testing.assert_array_equal(data.reshape(-1)[start:end].view(np.float16), source[token])
        words = aux.view("<u4")[:, 1]
        assert bytes(aux[0, 4:]) == b"NFKV" and not aux[:, :4].any()
        header = [OWNER.sequence, 5 | 3 << 16, 12 << 16, group, 77, min(8, 70 - 8 * group), 0]
        assert words[1:8].tolist() == header and words[8 % len(words)] == words[0]


@pytest.mark.parametrize(("index", "block"), [(FP16, 64), (FP16, 512), (INT8, 128), (INT4, 64), (INT4, 1024)])
def test_index_rows_lie_where_the_layout_says(make_head, index, block):
    tokens = 2 * block + 24
    _, k, v, _ = make_head(tokens, 64)
    kind = settings(True, index, 8, block)
    store = NandStore(3, 4)
    image = head_image(k, v, kind, OWNER, store)
    layout = kind.index_layout
    assert len(image.index_table) == 2 * layout.pages
    for page_index, word in enumerate(image.index_table):
        number, page = divmod(page_index, layout.pages)
        assert PageEntry.unpack(int(word)).channel == (OWNER.head + number) % 3
        data, aux = read(image, store, word, page_index, PageKind.INDEX, 1)
        own = k[number * block : (number + 1) * block]
        for row in range(min(layout.rows, 64 - page * layout.rows)):
            channel, start = page * layout.rows + row, row * layout.stride_bytes
            values = data.reshape(-1)[start : start + block * index.bits // 8]
            first = row * layout.row_codewords
            scale, zero = aux[first : first + layout.row_codewords, :4].view(np.float16).T
            if index is FP16:
                np.testing.assert_array_equal(values.view(np.float16), own[:, channel])
                assert not scale.any() and not zero.any()
            else:
                codes = values if index is INT8 else np.stack([values & 15, values >> 4], 1).reshape(-1)
                expected = quantise(own, index)
                np.testing.assert_array_equal(codes, expected.codes[:, channel])
                assert set(scale) == {expected.scale[channel]} and set(zero) == {expected.zero[channel]}


def test_places_are_distinct_and_siblings_are_neighbours(make_head):
    """Several heads share the stores; no page lies where another does, on any unit or byte."""
    flash, memory, taken, bytes_taken = NandStore(2, 4, first_row=9), MemoryStore(4096, 2), set(), []
    for head, interleaved in enumerate([False, True, False]):
        _, k, v, _ = make_head(150, 64, seed=head)
        kind = settings(interleaved, INT4, 8, 64)
        image = head_image(k, v, kind, PageTag(1, 2, head), flash, memory=memory, flushed=144)
        for page in image.pages:
            entry = page.entry
            if entry.address is not None:
                bytes_taken.append((entry.address, entry.address + len(page.data)))
                continue
            assert len(page.data) == 4096 // CODEWORD_BYTES * RAW_BYTES
            place = (entry.channel, entry.lun, entry.row)
            assert place not in taken and entry.lun < 4 and entry.row >= 9
            taken.add(place)
        entries = [PageEntry.unpack(int(word)) for word in image.token_table]
        assert [e.address is not None for e in entries] == [False] * 18 + [True]
        assert [e.channel for e in entries] == [(head + group) % 2 for group in range(19)]
        if not interleaved:
            assert all((e.channel, e.lun ^ 1, e.row) in taken for e in entries[:18])
    bytes_taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(bytes_taken))
    assert memory.end == bytes_taken[-1][1]


def test_units_fill_evenly():
    store = NandStore(1, 4)
    singles = [store.take(0, 1, 4096) for _ in range(8)]
    assert [(e.lun, e.row) for e in singles] == [(u, r) for r in (0, 1) for u in range(4)]
    store.take(0, 1, 4096)
    pairs = [store.take(0, 2, 4096) for _ in range(3)]
    assert [(e.lun, e.row) for e in pairs] == [(2, 2), (0, 3), (2, 3)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_pages_in_memory_are_copied_and_fill_it(make_head, interleaved):
    _, k, v, _ = make_head(150, 64)
    kind = settings(interleaved, INT8, 8, 64)
    size = image_bytes(kind, len(k))
    image = head_image(k, v, kind, OWNER, MemoryStore(0x1000, 2))
    assert not image.flash_pages and sum(len(page.data) for page in image.pages) == size
    memory = np.zeros(size, np.uint8)
    image.copy_to_memory(memory, 0x1000)
    assert memory.tobytes() == b"".join(page.data for page in sorted(image.pages, key=lambda page: page.entry.address))


def test_the_last_group_is_in_memory_where_it_is_not_full(make_head):
    _, k, v, _ = make_head(21, 64)
    kind, memory = settings(False, FP16, 8, 512), MemoryStore(0, 2)
    image = head_image(k, v, kind, OWNER, NandStore(2, 4), memory=memory, flushed=16)
    assert len(image.flash_pages) == 4 and len(image.pages) == 5 and memory.end == image_bytes(kind, 5)


def test_a_turn_is_another_channel(make_head):
    _, k, v, _ = make_head(70, 64)
    kind = settings(True, INT4, 8, 32)
    entries = [[PageEntry.unpack(int(word)).channel for word in (*image.token_table, *image.index_table)]
               for image in (head_image(k, v, kind, OWNER, NandStore(4, 4), turn=turn) for turn in (0, 1))]  # fmt: skip
    assert entries[1] == [(channel + 1) % 4 for channel in entries[0]]
