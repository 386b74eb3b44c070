"""Top-K gradient streams on the host: packed by the optimizer, expanded by the device `host`.

Format and faults: nearflash.abi.topk. Equals nearflash.model.gradients.topk.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.crc import crc32c as contract_crc32c
from nearflash.abi.errors import CommandError
from nearflash.abi.topk import (
    HEADER_BYTES,
    INDEX_BYTES,
    TILE_BITS,
    TILE_PARAMS,
    WORD_BYTES,
    StreamHeader,
    ValueFormat,
)
from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values
from nearflash.device.backends.host.delta import expand_stream

__all__ = ["decode_values", "encode_values", "expand", "find_crc32c", "pack"]

Bytes: TypeAlias = NDArray[np.uint8]
Places: TypeAlias = NDArray[np.int64]

_LARGEST = {ValueFormat.FP16: np.float32(65504), ValueFormat.BF16: np.uint32(0x7F7F0000).view(np.float32)}


def encode_values(values: NDArray[np.float32], value_format: ValueFormat) -> NDArray[Any]:
    """Bit patterns of finite fp32 values (n,), rounded to nearest even, uint16 or uint32.

    Values beyond the format's range become its largest finite number of their sign, not infinity.
    """
    if value_format is ValueFormat.FP32:
        return np.ascontiguousarray(values).view(np.uint32)
    within = np.clip(values, -_LARGEST[value_format], _LARGEST[value_format])
    if value_format is ValueFormat.FP16:
        return within.astype(np.float16).view(np.uint16)
    return bf16_patterns(within).astype(np.uint16)


def decode_values(bits: NDArray[Any], value_format: ValueFormat) -> NDArray[np.float32]:
    """fp32 values of bit patterns (n,): exact."""
    if value_format is ValueFormat.FP32:
        return bits.view(np.float32)
    if value_format is ValueFormat.FP16:
        return bits.view(np.float16).astype(np.float32)
    return bf16_values(bits)


def pack(indices: NDArray[np.int64], values: NDArray[Any], params: int, value_format: ValueFormat) -> Bytes:
    """Stream of pairs: ascending indices (n,) below `params`, and bit patterns of their values (n,).

    Raises CommandError for indices out of order or range, or too many parameters for one stream.
    """
    if len(indices) and not (indices[0] >= 0 and indices[-1] < params and (np.diff(indices) > 0).all()):
        raise CommandError(f"indices must ascend from 0 to below {params}, not otherwise; sort them")
    value_bytes = value_format.number_format.bytes
    tiles = -(-params // TILE_PARAMS)
    counts = np.diff(np.searchsorted(indices, np.arange(tiles + 1) << TILE_BITS))
    ends = np.cumsum(_tile_bytes(counts, value_bytes)) + HEADER_BYTES
    crc32c = find_crc32c()
    header = StreamHeader(value_format, params, len(indices), int(ends[-1]))
    words_at = ends - _tile_bytes(counts, value_bytes)
    stream = np.zeros(header.stream_bytes, np.uint8)
    stream.view("<u2")[_places(counts, words_at + WORD_BYTES, INDEX_BYTES)] = indices & (TILE_PARAMS - 1)
    stream.view(f"<u{value_bytes}")[_places(counts, _values_at(counts, words_at), value_bytes)] = values
    words = stream.view("<u8")
    words[words_at // WORD_BYTES] = counts
    crcs = _checksums(words, words_at, counts, value_bytes)
    words[words_at // WORD_BYTES] |= crcs.astype(np.uint64) << np.uint64(32)
    header = replace(header, tiles_crc32c=crc32c(words[words_at // WORD_BYTES]))
    stream[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return stream


def expand(stream: Bytes, params: int) -> NDArray[np.float32]:
    """Dense gradients (params,), zero where the stream has no pair. Raises StreamError."""
    header = StreamHeader.unpack(stream[:HEADER_BYTES].tobytes(), params, stream.size)
    return expand_stream(stream, header)


def _section_bytes(counts: Places, element_bytes: int) -> Places:
    return -(-counts * element_bytes // WORD_BYTES) * WORD_BYTES


def _tile_bytes(counts: Places, value_bytes: int) -> Places:
    return WORD_BYTES + _section_bytes(counts, INDEX_BYTES) + _section_bytes(counts, value_bytes)


def _values_at(counts: Places, words_at: Places) -> Places:
    return words_at + WORD_BYTES + _section_bytes(counts, INDEX_BYTES)


def _places(counts: Places, sections_at: Places, element_bytes: int) -> Places:
    """Place in the stream, in elements, of each element of the tiles' sections; `sections_at` in bytes."""
    before = np.cumsum(counts) - counts
    return np.repeat(sections_at // element_bytes - before, counts) + np.arange(counts.sum())


def find_crc32c() -> Callable[..., int]:
    """CRC32C of arrays: the package's, or, where a board has none, the contract's, a thousand times slower."""
    try:
        from crc32c import crc32c
    except ImportError:
        return lambda data, crc=0: contract_crc32c(memoryview(data).tobytes(), crc)
    return crc32c  # type: ignore[no-any-return]


def _checksums(words: NDArray[np.uint64], words_at: Places, counts: Places, value_bytes: int) -> NDArray[np.uint32]:
    """CRC32C of each tile, in which its number and its count stand before its sections."""
    crc32c = find_crc32c()
    first = np.arange(len(counts), dtype=np.uint64) | words[words_at // WORD_BYTES] << np.uint64(32)
    starts, stops = words_at // WORD_BYTES + 1, (words_at + _tile_bytes(counts, value_bytes)) // WORD_BYTES
    spans = zip(first, starts.tolist(), stops.tolist(), strict=True)
    checksums = (crc32c(words[start:stop], crc32c(head)) for head, start, stop in spans)
    return np.fromiter(checksums, np.uint32, len(counts))
