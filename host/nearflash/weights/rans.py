"""Elements of 8 bits packed losslessly by rANS, and expanded by the host's cores. Format: nearflash.abi.rans."""

from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from nearflash.abi.bitmap import GROUP_END_BYTES, HEADER_BYTES, SECTION_BYTES, bitmap_error, pack_group_end
from nearflash.abi.rans import HEAD_BYTES, MOST_SLOTS, PRECISION_BITS, RansHeader
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.matrix import expand_parts, find_parts
from nearflash.device.backends.host.vector.rans import (
    TABLE_COLUMNS,
    count_bytes,
    expand_blocks,
    find_rans_groups,
    pack_block,
)

__all__ = ["expand_rans", "pack_rans"]

Bytes = NDArray[np.uint8]
_BLOCK_ELEMENTS, _GROUP_BLOCKS = 1 << 19, 2
_MISFIT = "frequencies or states that do not fit in block {place}"


def pack_rans(values: NDArray[Any], *, block_elements: int = _BLOCK_ELEMENTS) -> bytes:
    """The stream of an array of elements of 8 bits, whatever they mean. Raises ShapeError for no element."""
    elements = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    header = RansHeader(elements.size, block_elements, _GROUP_BLOCKS, 0)
    size = block_elements * _GROUP_BLOCKS
    groups = [_pack_group(number, elements[first : first + size], header)
              for number, first in enumerate(range(0, elements.size, size))]  # fmt: skip
    ends = b"".join(group[-SECTION_BYTES:][:GROUP_END_BYTES] for group in groups)
    stream_bytes = HEADER_BYTES + sum(map(len, groups))
    return b"".join([replace(header, stream_bytes=stream_bytes, ends_crc32c=crc32c(ends)).pack(), *groups])


def _pack_group(number: int, elements: Bytes, header: RansHeader) -> bytes:
    """A group: its frequencies, its blocks, and their checksum."""
    frequencies = _choose_frequencies(count_bytes(elements))
    parts = [frequencies.tobytes()]
    for first in range(0, elements.size, header.block_elements):
        states, words = pack_block(elements[first : first + header.block_elements], frequencies)
        block = words.size.to_bytes(HEAD_BYTES, "little") + states.tobytes() + words.tobytes()
        parts += [block, bytes(-len(block) % SECTION_BYTES)]
    body = b"".join(parts)
    return body + pack_group_end(number, crc32c(body), len(body))


def _choose_frequencies(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Slots of each value, of 2^PRECISION_BITS in all: in proportion to the counts, what that leaves or lacks where it
    costs least."""
    slots = np.rint(counts * (2.0**PRECISION_BITS / counts.sum())).clip(counts > 0, MOST_SLOTS).astype(np.int64)
    while lacking := (1 << PRECISION_BITS) - int(slots.sum()):
        change = 1 if lacking > 0 else -1
        gains = counts * np.log2(np.maximum(slots + change, 1) / np.maximum(slots, 1))
        gains[slots == (MOST_SLOTS if change > 0 else 0)] = -np.inf
        gains[(slots == 1) & (change < 0)] = -np.inf
        slots[np.argmax(gains)] += change
    return slots.astype("<u2")


def expand_rans(stream: Bytes, out: Bytes, executor: Executor | None = None) -> None:
    """Write the elements of a stream to `out`, uint8, of as many elements.

    Groups are compared with their own checksums; check_groups tells whether they are this stream's. executor: as for
    expand_coded. Raises StreamError; elements before the fault may have been written.
    """
    header = RansHeader.unpack(stream[:HEADER_BYTES].tobytes(), stream.size)
    assert out.flags.c_contiguous and out.size == header.elements and out.dtype == np.uint8
    elements = out.reshape(-1)

    def expand(part: tuple[int, NDArray[np.int64]]) -> int:
        first, table = part
        done = expand_blocks(stream, table, elements[first * header.block_elements :])
        if done < len(table):
            raise bitmap_error(StreamFault.COUNT, _MISFIT.format(place=first + done), header.what)
        return done

    parts = find_parts(
        stream, header, partial(find_rans_groups, stream, header), (header.blocks, header.group_blocks, TABLE_COLUMNS),
        header.block_elements * header.group_blocks, _MISFIT,
    )  # fmt: skip
    expand_parts(parts, expand, out.nbytes, executor)
