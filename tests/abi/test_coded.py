"""Headers of coded weights."""

from dataclasses import replace

import pytest

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.coded import CodedHeader, CodedSection, list_sections
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import FormatError, ShapeError, StreamError
from nearflash.abi.topk import StreamFault

HEADER = CodedHeader(ElementFormat.BF16, 2, False, 70_000, 16_384, 4, 90_000, 7)


def test_a_header_comes_back():
    for header in (HEADER, replace(HEADER, element=ElementFormat.FP16, code_bits=1, has_bitmap=True)):
        text = header.pack()
        assert len(text) == 64 and CodedHeader.unpack(text, 90_000) == header
    assert (HEADER.blocks, HEADER.groups) == (5, 2)


def test_sections_are_in_order_and_hold_every_bit():
    for code_bits, entries in ((1, 6), (2, 10)):
        for element, narrow in ((ElementFormat.BF16, 0), (ElementFormat.FP16, 3)):
            sections = list_sections(element, code_bits, has_bitmap=True)
            assert list(sections) == sorted(sections) and sections[CodedSection.FIRST] == code_bits
            rest = (
                sections[CodedSection.VALUES] + sections.get(CodedSection.LOW, 0) + sections.get(CodedSection.MIDDLE, 0)
            )
            assert rest == 8 + narrow == 16 - element.number_format.exponent_bits
        assert replace(HEADER, code_bits=code_bits).codebook_entries == entries
    assert CodedSection.BITMAP not in list_sections(ElementFormat.BF16, 2, has_bitmap=False)


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [(0, 0x58, StreamFault.HEADER), (4, 9, StreamFault.HEADER), (6, 1, StreamFault.CHECKSUM),
     (40, 1, StreamFault.CHECKSUM), (63, 1, StreamFault.CHECKSUM)],
)  # fmt: skip
def test_damaged_headers_are_refused(at, value, fault):
    text = bytearray(HEADER.pack())
    text[at] ^= value
    with pytest.raises(StreamError, match="coded weights must") as found:
        CodedHeader.unpack(bytes(text), 90_000)
    assert found.value.fault is fault


def test_headers_of_other_streams_are_refused():
    for stream_bytes, rule in (
        (63, "after 63 bytes"),
        (90_001, "90001 bytes where 90000 are stated"),
        (500, "500 bytes for"),
    ):
        with pytest.raises(StreamError, match=rule):
            CodedHeader.unpack(HEADER.pack(), stream_bytes)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"element": ElementFormat.INT8}, FormatError), ({"code_bits": 3}, FormatError), ({"elements": 0}, ShapeError),
     ({"block_elements": 0}, ShapeError), ({"group_blocks": 1 << 32}, ShapeError)],
)  # fmt: skip
def test_what_cannot_be_coded_is_refused(change, error):
    with pytest.raises(error):
        replace(HEADER, **change)


def test_fields_lie_where_the_contract_states():
    """docs/contracts/weights.md, section 5."""
    text = replace(HEADER, element=ElementFormat.FP16, code_bits=1, has_bitmap=True).pack()
    number = {name: int.from_bytes(text[first:last], "little")
              for name, first, last in (("version", 4, 6), ("element", 6, 7), ("code_bits", 7, 8), ("has_bitmap", 8, 9),
                                        ("block_elements", 12, 16), ("group_blocks", 16, 20), ("elements", 20, 28),
                                        ("stream_bytes", 28, 36), ("ends", 36, 40), ("header", 60, 64))}  # fmt: skip
    assert text[:4] == b"NFCW" and not any(text[9:12]) and not any(text[40:60])
    assert number == {
        "version": 1, "element": 1, "code_bits": 1, "has_bitmap": 1, "block_elements": 16_384, "group_blocks": 4,
        "elements": 70_000, "stream_bytes": 90_000, "ends": 7, "header": crc32c(text[:60]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("at", "size", "value", "rule"),
    [(6, 1, 3, "format 3, codes of 2 bits"), (7, 1, 3, "codes of 3 bits"), (8, 1, 2, "bitmap 2"),
     (12, 4, 0, "0 a block"), (16, 4, 0, "0 blocks a group"), (20, 8, 0, "for 0 elements"),
     (20, 8, 1 << 50, "elements"), (4, 2, 2, "version 2")],
)  # fmt: skip
def test_forged_headers_are_refused(at, size, value, rule):
    """Under a checksum that holds."""
    text = bytearray(HEADER.pack()[:60])
    text[at : at + size] = value.to_bytes(size, "little")
    with pytest.raises(StreamError, match=rule):
        CodedHeader.unpack(bytes(text) + crc32c(bytes(text)).to_bytes(4, "little"), 90_000)
