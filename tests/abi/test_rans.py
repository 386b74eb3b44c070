"""Headers of rANS-coded bytes."""

from dataclasses import replace

import pytest

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import ShapeError, StreamError
from nearflash.abi.rans import (
    HEAD_BYTES,
    LANES,
    LOWEST_STATE,
    MOST_SLOTS,
    PRECISION_BITS,
    STATES_BYTES,
    TABLE_BYTES,
    WORD_BITS,
    RansHeader,
)
from nearflash.abi.topk import StreamFault

HEADER = RansHeader(70_000, 16_384, 2, 60_000, 7)


def test_a_header_comes_back():
    text = HEADER.pack()
    assert len(text) == 64 and RansHeader.unpack(text, 60_000) == HEADER
    assert (HEADER.blocks, HEADER.groups) == (5, 3)


@pytest.mark.parametrize(
    ("at", "fault"), [(0, StreamFault.HEADER), (4, StreamFault.HEADER), (20, StreamFault.CHECKSUM)]
)
def test_damaged_headers_are_refused(at, fault):
    text = bytearray(HEADER.pack())
    text[at] ^= 9
    with pytest.raises(StreamError, match="rANS-coded weights must") as found:
        RansHeader.unpack(bytes(text), 60_000)
    assert found.value.fault is fault


def test_headers_that_cannot_be_are_refused():
    for stream_bytes, rule in ((63, "after 63 bytes"), (60_001, "where 60000 are stated"), (500, "500 bytes for")):
        with pytest.raises(StreamError, match=rule):
            RansHeader.unpack(HEADER.pack(), stream_bytes)
    text = bytearray(HEADER.pack()[:60])
    text[12:16] = bytes(4)
    with pytest.raises(StreamError, match="0 a block"):
        RansHeader.unpack(bytes(text) + crc32c(bytes(text)).to_bytes(4, "little"), 60_000)
    with pytest.raises(ShapeError, match="must be 1 at least"):
        replace(HEADER, elements=0)


def test_constants_bound_each_other():
    """A slot's entry has 12 bits of a frequency and of a place, 8 of a value; a step leaves every state in 32 bits."""
    assert MOST_SLOTS.bit_length() == 12 and 2 * MOST_SLOTS < 1 << PRECISION_BITS  # more than a bit an element
    largest = MOST_SLOTS * ((1 << 32) - 1 >> PRECISION_BITS) + MOST_SLOTS - 1
    assert largest < 1 << 32 and (LOWEST_STATE - 1 << WORD_BITS | (1 << WORD_BITS) - 1) < 1 << 32
    assert (TABLE_BYTES, STATES_BYTES, HEAD_BYTES) == (512, 4 * LANES, 4)


def test_streams_state_their_size():
    header = replace(HEADER, elements=1, stream_bytes=640, ends_crc32c=None)
    assert (header.blocks, header.groups) == (1, 1)
    whole = replace(HEADER, elements=2 * HEADER.block_elements)
    assert (whole.blocks, whole.groups) == (2, 1)
    for change in ({"block_elements": 0}, {"group_blocks": 0}, {"block_elements": 1 << 32}, {"elements": 1 << 49}):
        with pytest.raises(ShapeError, match="must be 1 at least"):
            replace(HEADER, **change)
