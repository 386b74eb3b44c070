import struct

import pytest

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import CommandError, DeviceError, StreamError
from nearflash.abi.topk import (
    FAULT_TEXTS,
    StreamFault,
    StreamHeader,
    ValueFormat,
    pack_tile_word,
    padded_bytes,
    stream_error,
    tile_crc_prefix,
    unpack_tile_word,
)


def test_header_layout():
    """Byte by byte as docs/guides/training.md has it."""
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
    assert [padded_bytes(count, 2) for count in (0, 1, 4, 5)] == [0, 8, 8, 16]


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
