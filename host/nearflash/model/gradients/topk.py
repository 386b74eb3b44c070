"""Top-K gradient streams, one tile and one pair at a time: the reference for the host's and the gateware's expander.

Format and faults: nearflash.abi.topk.
"""

import struct
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.crc import crc32c
from nearflash.abi.formats import BF16, FP16, NumberFormat
from nearflash.abi.topk import (
    HEADER_BYTES,
    INDEX_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamFault,
    StreamHeader,
    ValueFormat,
    pack_tile_word,
    pad_bytes,
    stream_error,
    tile_crc_prefix,
    unpack_tile_word,
)

__all__ = ["expand", "fp32_pattern", "pack"]


def pack(indices: NDArray[np.int64], values: NDArray[np.uint32], params: int, value_format: ValueFormat) -> bytes:
    """Stream of pairs: ascending indices below `params` (n,), and bit patterns of their values (n,)."""
    number = value_format.number_format
    tiles = [b""] * -(-params // TILE_PARAMS)
    for tile in range(len(tiles)):
        mine = indices // TILE_PARAMS == tile
        local, bits = (indices[mine] % TILE_PARAMS).tolist(), values[mine].tolist()
        sections = b"".join(
            b"".join(x.to_bytes(size, "little") for x in section).ljust(pad_bytes(len(section), size), b"\0")
            for section, size in ((local, INDEX_BYTES), (bits, number.bytes))
        )
        prefix = tile_crc_prefix(tile, pack_tile_word(len(local), 0))
        tiles[tile] = pack_tile_word(len(local), crc32c(prefix + sections)) + sections
    body, words = b"".join(tiles), b"".join(tile[:WORD_BYTES] for tile in tiles)
    return StreamHeader(value_format, params, len(indices), HEADER_BYTES + len(body), crc32c(words)).pack() + body


def expand(stream: bytes, params: int) -> NDArray[np.float32]:
    """Dense gradients (params,), zero where the stream has no pair. Raises StreamError."""
    header = StreamHeader.unpack(stream[:HEADER_BYTES], params, len(stream))
    number = header.value_format.number_format
    dense = [0] * params
    at, pairs = HEADER_BYTES, 0
    for tile in range(header.tiles):
        first = tile * TILE_PARAMS
        word = stream[at : at + WORD_BYTES]
        if len(word) < WORD_BYTES:
            raise stream_error(StreamFault.LENGTH, f"before tile {tile}")
        count, crc = unpack_tile_word(word)
        if count > TILE_PARAMS:
            raise stream_error(StreamFault.COUNT, f"{count} in tile {tile}")
        values_at = at + WORD_BYTES + pad_bytes(count, INDEX_BYTES)
        end = values_at + pad_bytes(count, number.bytes)
        if end > len(stream):
            raise stream_error(StreamFault.LENGTH, f"within tile {tile}")
        if crc32c(tile_crc_prefix(tile, word) + stream[at + WORD_BYTES : end]) != crc:
            raise stream_error(StreamFault.CHECKSUM, f"another one in tile {tile}")
        local = struct.unpack_from(f"<{count}H", stream, at + WORD_BYTES)
        for before, index in pairwise(local):
            if index <= before:
                raise stream_error(StreamFault.ORDER, f"{index} behind {before} in tile {tile}")
        if count and local[-1] >= min(TILE_PARAMS, params - first):
            raise stream_error(StreamFault.RANGE, f"{local[-1]} in tile {tile} of {params} parameters")
        for value_index, index in enumerate(local):
            bits = stream[values_at + value_index * number.bytes :][: number.bytes]
            dense[first + index] = fp32_pattern(int.from_bytes(bits, "little"), number)
        at, pairs = end, pairs + count
    if (at, pairs) != (len(stream), header.pairs):
        raise stream_error(StreamFault.LENGTH, f"{pairs} pairs in {at} bytes of {header.pairs} in {len(stream)}")
    return np.array(dense, np.uint32).view(np.float32)


def fp32_pattern(bits: int, number: NumberFormat) -> int:
    """fp32 bit pattern of a value: exact; a NaN keeps its sign and its payload, in the top bits."""
    if number is BF16:
        return bits << 16
    if number is not FP16:
        return bits
    sign, exponent, mantissa = bits >> 15, bits >> 10 & 31, bits & 1023
    if exponent == 0 and mantissa:
        shift = 11 - mantissa.bit_length()
        exponent, mantissa = 1 - shift, mantissa << shift & 1023
    elif exponent == 0:
        exponent = -112
    elif exponent == 31:
        exponent = 255 - 112
    return sign << 31 | exponent + 112 << 23 | mantissa << 13
