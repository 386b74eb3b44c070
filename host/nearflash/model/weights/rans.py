"""rANS-coded bytes, element by element: the reference of what expands them. Format and faults: nearflash.abi.rans."""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES, bitmap_error, section_bytes
from nearflash.abi.crc import crc32c
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

__all__ = ["expand_rans"]

_SLOTS = 1 << PRECISION_BITS


def expand_rans(stream: bytes) -> NDArray[np.uint8]:
    """Bytes (elements,) of a stream. Raises StreamError for the first fault in stream order."""
    header = RansHeader.unpack(stream[:HEADER_BYTES], len(stream))
    at, left, out, blocks = HEADER_BYTES, header.elements, bytearray(), 0
    for group in range(header.groups):
        begin = at
        table = np.frombuffer(_take(stream, at, TABLE_BYTES), "<u2").tolist()
        at += TABLE_BYTES
        if sum(table) != _SLOTS or max(table) > MOST_SLOTS:
            raise _misfit(blocks)
        for _ in range(min(header.group_blocks, header.blocks - blocks)):
            elements = min(left, header.block_elements)
            words = int.from_bytes(_take(stream, at, HEAD_BYTES)[:4], "little")
            size = section_bytes(8 * (HEAD_BYTES + STATES_BYTES) + WORD_BITS * words)
            out += _expand_block(_take(stream, at, size)[HEAD_BYTES:], words, table, elements, blocks)
            at, left, blocks = at + size, left - elements, blocks + 1
        if GROUP_END.unpack(_take(stream, at, SECTION_BYTES)) != (group, crc32c(stream[begin:at])):
            raise bitmap_error(StreamFault.CHECKSUM, f"another one in group {group}", header.what)
        at += SECTION_BYTES
    if at != len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"{at} bytes of {len(stream)}", header.what)
    return np.frombuffer(bytes(out), np.uint8)


def _take(stream: bytes, at: int, size: int) -> bytes:
    if at + size > len(stream):
        raise bitmap_error(StreamFault.LENGTH, f"at byte {at}", RansHeader.what)
    return stream[at : at + size]


def _misfit(block: int) -> Exception:
    return bitmap_error(StreamFault.COUNT, f"frequencies or states that do not fit in block {block}", RansHeader.what)


def _expand_block(body: bytes, count: int, table: list[int], elements: int, number: int) -> bytes:
    states = np.frombuffer(body, "<u4", LANES).tolist()
    words = iter(np.frombuffer(body, "<u2", count, STATES_BYTES).tolist())
    starts = [0, *accumulate(table)]
    values = [value for value, slots in enumerate(table) for _ in range(slots)]  # of each slot
    out = bytearray()
    for element in range(elements):
        state = states[element % LANES]
        slot = state % _SLOTS
        value = values[slot]
        out.append(value)
        state = table[value] * (state >> PRECISION_BITS) + slot - starts[value]
        if state < LOWEST_STATE:
            word = next(words, None)
            if word is None:
                raise _misfit(number)
            state = (state << WORD_BITS | word) & 0xFFFFFFFF
        states[element % LANES] = state
    if any(state != LOWEST_STATE for state in states) or next(words, None) is not None:
        raise _misfit(number)
    return bytes(out)
