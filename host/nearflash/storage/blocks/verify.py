"""Every record and block of a file checked, also while another process writes it.

A block is damaged where it is not what its record states, and the record is still there after the block was read: a
writer erases a segment before it fills its slots again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearflash.abi.errors import StateError
from nearflash.storage.blocks.block_file import RUN_BYTES, BlockFile
from nearflash.storage.blocks.record import Zone, block_checksums
from nearflash.storage.io.reuse import reuse_buffer

__all__ = ["BlockVerification", "verify_blocks"]


@dataclass
class BlockVerification:
    """Blocks that are right, those that a writer replaced meanwhile, and what is damaged, in words."""

    valid: int = 0
    changed: int = 0
    damaged: list[str] = field(default_factory=list)


def verify_blocks(blocks: BlockFile) -> BlockVerification:
    """Read all of an open file: of each block key, namespace, length, place and CRC32C."""
    found = BlockVerification()
    for segment in range(blocks.layout.segments):
        try:
            found.damaged += _check_records(blocks, segment)
        except StateError as error:
            found.damaged.append(f"records of segment {segment}: {error}")
        slots = blocks.index.blocks_of(segment)
        most = max(RUN_BYTES // blocks.layout.slot_bytes, 1)
        for start in range(0, len(slots), most):
            _verify_run(blocks, segment, slots[start : start + most], found)
    return found


def _check_records(blocks: BlockFile, segment: int) -> Iterator[str]:
    zone = blocks.read_zone(segment)
    if not len(places := zone.find_damaged()):
        return
    again = blocks.read_zone(segment)  # a writer may have been in the middle of it
    for place in np.intersect1d(places, again.find_damaged()).tolist():
        if again.records[place].tobytes() == zone.records[place].tobytes():
            yield f"record: segment {segment}, slot {segment * blocks.layout.segment_slots + place}"


def _verify_run(blocks: BlockFile, segment: int, slots: Sequence[int], found: BlockVerification) -> None:
    rows = reuse_buffer(len(slots) * blocks.layout.slot_bytes).reshape(len(slots), -1)
    loaded, records = blocks.load(slots, rows), blocks.index.records[slots]
    good = block_checksums(records, rows) == records["data_crc"]
    wrong = [slot for slot, *right in zip(slots, loaded, good.tolist(), strict=True) if not all(right)]
    still = _find_unchanged(blocks, segment, wrong)
    found.valid += len(slots) - len(wrong)
    found.changed += len(wrong) - len(still)
    found.damaged += _describe(blocks, still)


def _find_unchanged(blocks: BlockFile, segment: int, slots: Sequence[int]) -> list[int]:
    """Find the slots whose records are as they were."""
    if not slots:
        return []
    try:
        zone = blocks.read_zone(segment)
    except StateError:
        return list(slots)
    return [slot for slot in slots if _is_same(blocks, zone, slot)]


def _is_same(blocks: BlockFile, zone: Zone, slot: int) -> bool:
    record, now = blocks.index.records[slot], zone.records[slot % blocks.layout.segment_slots]
    return bool(zone.generation == record["generation"]) and now.tobytes() == record.tobytes()


def _describe(blocks: BlockFile, slots: Iterable[int]) -> Iterator[str]:
    for slot in slots:
        yield f"block {blocks.index.key(slot).hex()}: slot {slot}, offset {blocks.layout.slot_at(slot)}"
