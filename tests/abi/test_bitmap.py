import struct

import pytest

from nearflash.abi.bitmap import (
    GROUP_END_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    ElementFormat,
    RowFormat,
    Section,
    check_groups,
    pack_group_end,
    row_format,
    section_bytes,
    section_fields,
)
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import FormatError, ShapeError, StreamError
from nearflash.abi.topk import StreamFault

FP16, BF16, INT8, INT4 = ElementFormat
PLAIN, EXPONENTS, _ = Coding
FORMATS = {
    (FP16, PLAIN, None): RowFormat.PLAIN16, (BF16, PLAIN, None): RowFormat.PLAIN16,
    (INT8, PLAIN, None): RowFormat.PLAIN8, (FP16, EXPONENTS, None): RowFormat.CODED_FP16,
    (BF16, EXPONENTS, None): RowFormat.CODED_BF16, (INT8, PLAIN, FP16): RowFormat.SCALED8,
    (INT8, PLAIN, BF16): RowFormat.SCALED8, (INT4, PLAIN, FP16): RowFormat.SCALED4,
    (INT4, PLAIN, BF16): RowFormat.SCALED4,
}  # fmt: skip


def test_header_layout():
    """Byte by byte as docs/contracts/weights.md has it."""
    text = BitmapHeader(INT8, 3, 1000, 2, 704, output=BF16).pack()
    assert len(text) == 64
    assert text[:8] == b"NFBM" + bytes([1, 0, 3, 0])
    assert struct.unpack("<3IHBBQ", text[8:32]) == (3, 1000, 2, 64, 2, 0, 704)
    assert text[32:60] == bytes(28)
    assert struct.unpack("<I", text[60:]) == (crc32c(text[:60]),)
    coded = BitmapHeader(FP16, rows=3, columns=1000, group_rows=2, stream_bytes=704, coding=EXPONENTS).pack()
    assert coded[6:8] == bytes([1, 1]) and coded[20:24] == bytes(4)


@pytest.mark.parametrize(("element", "coding", "output"), FORMATS)
def test_headers_come_back(element, coding, output):
    header = BitmapHeader(element, 3, 1000, 2, 704, coding, output)
    assert BitmapHeader.unpack(header.pack(), 704) == header
    assert header.row_format is FORMATS[element, coding, output]
    assert header.dense is (output or element) and header.groups == 2


def test_formats_that_do_not_go_together_are_refused():
    outputs = (None, *ElementFormat)
    for key in [(element, coding, output) for element in ElementFormat for coding in Coding for output in outputs]:
        if key not in FORMATS:
            with pytest.raises(FormatError, match="a bitmap matrix must be of fp16 or bf16, plain or coded, or int8"):
                row_format(*key)


@pytest.mark.parametrize(
    ("at", "text"),
    [
        *((6, element) for element in (b"\0", b"\5", b"\4")),
        *((7, coding) for coding in (b"\1", b"\2")),
        *((at, bytes(4)) for at in (8, 12, 16)),
        *((20, scaling) for scaling in (b"\x40", b"\0\0\1", b"\x20\0\1", b"\x40\0\3")),
    ],
)
def test_headers_of_no_format_are_refused(at, text):
    """An element, coding, shape or scaling that does not exist, in a header whose CRC is right."""
    good = BitmapHeader(INT8, 3, 1000, 2, 704).pack()
    bad = good[:at] + text + good[at + len(text) : 60]
    with pytest.raises(StreamError) as raised:
        BitmapHeader.unpack(bad + crc32c(bad).to_bytes(4, "little"), 704)
    assert raised.value.fault is StreamFault.HEADER


def test_sections_are_whole_beats_of_512_bits():
    assert [section_bytes(bits) for bits in (0, 1, 512, 513)] == [0, 64, 64, 128]


def test_sections_of_a_row():
    """Each format has its sections in order; fields are columns, groups of 64, values or escapes."""
    assert all(list(sections) == sorted(sections) for sections in SECTIONS.values())
    fields = {section: section_fields(section, columns=129, values=70, escapes=5) for section in Section}
    assert fields == {section: 70 for section in Section} | {Section.BITMAP: 129, Section.SCALES: 3, Section.ESCAPES: 5}
    bits = {form: sum(SECTIONS[form].values()) for form in RowFormat}
    assert list(bits.values()) == [17, 9, 22, 19, 41, 37]


@pytest.mark.parametrize("name", ["rows", "columns", "group_rows"])
def test_messages(name):
    fields = {"rows": 1, "columns": 1, "group_rows": 1, name: 0}
    with pytest.raises(ShapeError, match=rf"{name} must be between 1 and 2\^32 - 1, not 0"):
        BitmapHeader(ElementFormat.FP16, stream_bytes=64, **fields)


GOOD = BitmapHeader(INT8, 3, 1000, 2, 704).pack()


@pytest.mark.parametrize(
    ("text", "stream_bytes", "fault", "found"),
    [
        (GOOD[:63], 704, StreamFault.LENGTH, "after 63 bytes"),
        (GOOD, 63, StreamFault.LENGTH, "after 63 bytes"),
        (GOOD, 768, StreamFault.LENGTH, "768 bytes where 704 are"),
        (b"NFBN" + GOOD[4:], 704, StreamFault.HEADER, "magic b'NFBN' and version 1"),
        (GOOD[:4] + b"\2" + GOOD[5:], 704, StreamFault.HEADER, "magic b'NFBM' and version 2"),
        (GOOD[:40] + b"\1" + GOOD[41:], 704, StreamFault.CHECKSUM, "another one in its header"),
        (GOOD[:60] + bytes(4), 704, StreamFault.CHECKSUM, "another one in its header"),
    ],
)
def test_headers_that_are_refused(text, stream_bytes, fault, found):
    with pytest.raises(StreamError, match=f"a bitmap matrix must .*, not {found}.*; compress the weights") as raised:
        BitmapHeader.unpack(text, stream_bytes)
    assert raised.value.fault is fault


@pytest.mark.parametrize(("rows", "group_rows", "groups"), [(1, 1, 1), (4, 2, 2), (5, 2, 3), (3, (1 << 32) - 1, 1)])
def test_groups_of_rows(rows, group_rows, groups):
    assert BitmapHeader(FP16, rows, 1, group_rows, 64).groups == groups


def groups_of(sizes, bound=True):
    """A stream of groups of one row of zeros of these sizes, with ends as they are written."""
    ends = [pack_group_end(number, 7 * number, size) for number, size in enumerate(sizes)]
    stated = crc32c(b"".join(end[:GROUP_END_BYTES] for end in ends)) if bound else None
    text = b"".join(bytes(size) + end for size, end in zip(sizes, ends, strict=True))
    header = BitmapHeader(FP16, len(sizes), 100, 1, 64 + len(text), ends_crc32c=stated)
    return header, header.pack() + text


def test_the_ends_of_groups_are_those_that_the_header_states():
    header, stream = groups_of([128, 64, 192])
    assert BitmapHeader.unpack(stream[:64], len(stream)) == header
    check_groups(memoryview(stream), header)


@pytest.mark.parametrize(
    ("at", "text", "message"),
    [
        (64 + 128, b"\5", "group 5 in the place of group 0"),
        (64 + 128 + 4, b"\5", "ends of groups that its header does not state"),
        (64 + 128 + 8, b"\x40", "ends of groups that its header does not state"),
        (64 + 128 + 64 + 64 + 8, b"\x00\x01", "must end where its header states, not fewer than its 3 groups"),
        (64 + 128 + 64 + 64 + 8, b"\xff" * 8, "must end where its header states, not fewer than its 3 groups"),
    ],
)
def test_an_end_of_another_group_is_refused(at, text, message):
    header, stream = groups_of([128, 64, 192])
    with pytest.raises(StreamError, match=message):
        check_groups(memoryview(stream[:at] + text + stream[at + len(text) :]), header)


def test_a_stream_without_its_groups_is_refused():
    header, stream = groups_of([64], bound=False)
    assert header.ends_crc32c is None and stream[32:40] == bytes(8)
    with pytest.raises(StreamError, match="does not state its groups"):
        check_groups(memoryview(stream), header)
