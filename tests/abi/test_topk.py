import struct

import pytest

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import CommandError, DeviceError, StreamError
from nearflash.abi.topk import (
    FAULT_TEXTS,
    StreamFault,
    StreamHeader,
    ValueFormat,
    check_tiles,
    longest_stream_bytes,
    pack_tile_word,
    pad_bytes,
    stream_error,
    tile_crc_prefix,
    unpack_tile_word,
)


def test_header_layout():
    """Byte by byte as docs/contracts/gradients.md has it."""
    text = StreamHeader(ValueFormat.FP16, params=5000, pairs=7, stream_bytes=96).pack()
    assert len(text) == 32
    assert text[:8] == b"NFTK" + bytes([1, 0, 1, 12])
    assert struct.unpack("<5I", text[8:28]) == (5000, 2, 7, 96, 0)
    assert struct.unpack("<I", text[28:]) == (crc32c(text[:28]),)
    assert StreamHeader.unpack(text, 5000, 96) == StreamHeader(ValueFormat.FP16, 5000, 7, 96)


def test_tile_word_layout():
    word = pack_tile_word(0x123, 0x89ABCDEF)
    assert word == bytes([0x23, 0x01, 0, 0, 0xEF, 0xCD, 0xAB, 0x89])
    assert unpack_tile_word(word) == (0x123, 0x89ABCDEF)
    assert tile_crc_prefix(7, word) == bytes([7, 0, 0, 0, 0x23, 0x01, 0, 0])


def test_sections_are_padded_to_words():
    assert [pad_bytes(count, 2) for count in (0, 1, 4, 5)] == [0, 8, 8, 16]


def test_every_fault_has_a_text_and_an_error():
    for fault in list(StreamFault)[1:]:
        error = stream_error(fault, "x")
        assert error.fault == fault and FAULT_TEXTS[fault] in str(error)
        assert isinstance(error, StreamError) and isinstance(error, DeviceError)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": 0}, r"params must be between 1 and 2\^32 - 1, not 0"),
        ({"stream_bytes": 1 << 32}, "a stream must be shorter than 4 GiB, not 4294967296 bytes; split it"),
    ],
)
def test_header_messages(fields, message):
    with pytest.raises(CommandError, match=message):
        StreamHeader(**{"value_format": ValueFormat.FP32, "params": 1, "pairs": 0, "stream_bytes": 40, **fields})


GOOD = StreamHeader(ValueFormat.FP16, params=5000, pairs=7, stream_bytes=96).pack()


def sealed(at, text):
    """The good header with other bytes, its checksum right."""
    body = GOOD[:at] + text + GOOD[at + len(text) : 28]
    return body + crc32c(body).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("text", "params", "stream_bytes", "fault", "found"),
    [
        (GOOD[:31], 5000, 96, StreamFault.LENGTH, "not after 31 bytes"),
        (GOOD, 5000, 31, StreamFault.LENGTH, "not after 31 bytes"),
        (GOOD, 5000, 104, StreamFault.LENGTH, "not 104 bytes where 96 are"),
        (b"NFTL" + GOOD[4:], 5000, 96, StreamFault.HEADER, "not magic b'NFTL' and version 1"),
        (sealed(4, b"\2"), 5000, 96, StreamFault.HEADER, "not magic b'NFTK' and version 2"),
        (GOOD[:16] + b"\1" + GOOD[17:], 5000, 96, StreamFault.CHECKSUM, "not another one in its header"),
        (sealed(6, b"\3"), 5000, 96, StreamFault.HEADER, "not format 3, 2\\^12 parameters a tile, 5000 parameters"),
        (sealed(7, b"\x0d"), 5000, 96, StreamFault.HEADER, "2\\^13 parameters a tile"),
        (sealed(12, b"\3"), 5000, 96, StreamFault.HEADER, "5000 parameters in 3 tiles"),
        (GOOD, 5001, 96, StreamFault.HEADER, "5000 parameters in 2 tiles"),
        (sealed(20, b"\x5f"), 5000, 95, StreamFault.LENGTH, "not 95 bytes"),
    ],
)
def test_headers_that_are_refused(text, params, stream_bytes, fault, found):
    with pytest.raises(
        StreamError, match=f"a gradient stream must .*{found}.*; compress the gradients again"
    ) as raised:
        StreamHeader.unpack(text, params, stream_bytes)
    assert raised.value.fault is fault


@pytest.mark.parametrize(("params", "tiles"), [(1, 1), (4096, 1), (4097, 2), ((1 << 32) - 1, 1 << 20)])
def test_tiles_of_a_stream(params, tiles):
    header = StreamHeader(ValueFormat.BF16, params, pairs=0, stream_bytes=40)
    assert header.tiles == tiles
    assert StreamHeader.unpack(header.pack(), params, 40) == header


@pytest.mark.parametrize(
    ("params", "pairs", "value_format", "most"),
    [
        (1, 0, ValueFormat.FP32, 32 + 20 + 4),
        (4096, 4096, ValueFormat.FP16, 32 + 20 + 4 + 4 * 4096),
        (8192, 1, ValueFormat.FP32, 32 + 40 + 8),  # 78, in whole words
    ],
)
def test_the_longest_stream(params, pairs, value_format, most):
    assert longest_stream_bytes(params, pairs, value_format) == most


def test_codes_and_widths_of_the_values():
    assert [(form.name, int(form), form.number_format.bytes) for form in ValueFormat] == [
        ("FP32", 0, 4),
        ("FP16", 1, 2),
        ("BF16", 2, 2),
    ]


def stream_of(counts, value_format=ValueFormat.FP16):
    """A stream of zeros with so many pairs in its tiles."""
    words = [pack_tile_word(count, 5 * tile) for tile, count in enumerate(counts)]
    body = b"".join(
        word + bytes(pad_bytes(count, 2) + pad_bytes(count, value_format.number_format.bytes))
        for word, count in zip(words, counts, strict=True)
    )
    fields = value_format, 4096 * len(counts), sum(counts), 32 + len(body), crc32c(b"".join(words))
    header = StreamHeader(*fields)
    return header, header.pack() + body


@pytest.mark.parametrize("value_format", ValueFormat)
def test_the_words_of_tiles_are_those_that_the_header_states(value_format):
    header, stream = stream_of([3, 0, 9], value_format)
    assert StreamHeader.unpack(stream[:32], header.params, len(stream)) == header
    check_tiles(memoryview(stream), header)


@pytest.mark.parametrize(
    ("at", "text", "message"),
    [
        (32 + 4, b"\7", "words of tiles that its header does not state"),
        (32, b"\5", "words of tiles that its header does not state"),
        (32, b"\x00\x10", "must end where its header states, with as many pairs, not before tile 1"),
    ],
)
def test_a_tile_of_another_stream_is_refused(at, text, message):
    header, stream = stream_of([3, 0, 9])
    with pytest.raises(StreamError, match=message):
        check_tiles(memoryview(stream[:at] + text + stream[at + len(text) :]), header)
