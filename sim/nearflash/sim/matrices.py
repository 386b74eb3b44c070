"""Damaged bitmap matrices, and what the model says of them: for tests of everything that reads matrices."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES, BitmapHeader
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.model.expand.bitmap import read_rows

__all__ = ["damaged", "header_of", "odd", "outcome", "sealed"]

_CRC_BYTES = 4


def header_of(stream: bytes) -> BitmapHeader:
    """Header of a good matrix."""
    return BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))


def sealed(stream: bytes) -> bytes:
    """The stream with the header's checksum made right."""
    text = stream[: HEADER_BYTES - _CRC_BYTES]
    return text + crc32c(text).to_bytes(_CRC_BYTES, "little") + stream[HEADER_BYTES:]


def outcome(stream: bytes, expected: BitmapHeader) -> tuple[StreamFault, int]:
    """Fault of a stream that is to be the matrix of that header, and its rows before the fault."""
    rows = 0
    try:
        header = BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))
        if replace(header, group_rows=1, stream_bytes=0) != replace(expected, group_rows=1, stream_bytes=0):
            return StreamFault.HEADER, 0
        for _ in read_rows(stream):
            rows += 1
    except StreamError as error:
        return StreamFault(error.fault), rows
    return StreamFault.NONE, rows


def damaged(stream: bytes, rng: np.random.Generator, flips: int) -> Iterator[bytes]:
    """A good matrix cut at every block, made longer, with every byte of its header changed, and with single bits wrong.

    Where the header is changed or the length is, the header's checksum and length are made to fit, and in the first
    case also left as they were.
    """
    for size in (*range(HEADER_BYTES // 2, len(stream), SECTION_BYTES // 2), len(stream) + SECTION_BYTES):
        header = replace(header_of(stream), stream_bytes=size).pack()
        yield (header + stream[HEADER_BYTES:]).ljust(size, b"\0")[:size]
    for place in range(HEADER_BYTES - _CRC_BYTES):
        changed = stream[:place] + bytes([stream[place] ^ 1]) + stream[place + 1 :]
        yield changed
        yield sealed(changed)
    for bit in rng.integers(8 * HEADER_BYTES, 8 * len(stream), flips):
        text = bytearray(stream)
        text[bit // 8] ^= 1 << bit % 8
        yield bytes(text)


def odd(stream: bytes, rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """A matrix of one group with some bits of its rows changed, and its checksum right.

    Of some, sections lie elsewhere then and the matrix ends too early or too late; of others, values, padding, codes,
    scales are what no writer would write, and the matrix is good.
    """
    for _ in range(count):
        body = bytearray(stream[HEADER_BYTES:-SECTION_BYTES])
        for bit in rng.integers(0, 8 * len(body), int(rng.integers(1, 20))):
            body[bit // 8] ^= 1 << bit % 8
        yield stream[:HEADER_BYTES] + body + GROUP_END.pack(0, crc32c(bytes(body)))
