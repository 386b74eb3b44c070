import struct

import pytest

from nearflash.abi.bitmap import BitmapHeader, ElementFormat, section_bytes
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import ShapeError


def test_header_layout():
    """Byte by byte as docs/weights.md has it."""
    text = BitmapHeader(ElementFormat.INT8, rows=3, columns=1000, group_rows=2, stream_bytes=704).pack()
    assert len(text) == 64
    assert text[:8] == b"NFBM" + bytes([1, 0, 3, 0])
    assert struct.unpack("<4IQ", text[8:32]) == (3, 1000, 2, 0, 704)
    assert text[32:60] == bytes(28)
    assert struct.unpack("<I", text[60:]) == (crc32c(text[:60]),)
    assert BitmapHeader.unpack(text, 704) == BitmapHeader(ElementFormat.INT8, 3, 1000, 2, 704)


def test_sections_are_whole_beats_of_512_bits():
    assert [section_bytes(bits) for bits in (0, 1, 512, 513)] == [0, 64, 64, 128]


@pytest.mark.parametrize("name", ["rows", "columns", "group_rows"])
def test_messages(name):
    fields = {"rows": 1, "columns": 1, "group_rows": 1, name: 0}
    with pytest.raises(ShapeError, match=rf"{name} must be between 1 and 2\^32 - 1, not 0"):
        BitmapHeader(ElementFormat.FP16, stream_bytes=64, **fields)
