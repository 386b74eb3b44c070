"""Which block lies in which slot of a file, when it was used last, and which segment is to be erased next.

Least recently used blocks go a segment at a time: of the segments that are full the one whose blocks were used longest
ago in sum, empty slots counting as never used. Its blocks that are pinned, and up to half a segment of those that were
used more recently than the average block of the file, are moved before it is erased.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nearflash.storage.blocks.layout import BlockLayout
from nearflash.storage.blocks.record import RECORD, Records, keys_of

__all__ = ["BlockIndex"]

_NEVER = np.iinfo(np.int64).max


class BlockIndex:
    """The blocks of one file: about 150 bytes of memory a slot, and its key's. Callers hold a lock of their own."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.records: Records = np.zeros(layout.slots, RECORD)
        """Of each slot; what a slot without a block has means nothing."""
        self.pins: dict[bytes, int] = {}
        """Of each pinned block, how often."""
        self._slots: dict[bytes, int] = {}
        self._is_live = np.zeros(layout.slots, bool)
        self._used = np.zeros(layout.slots, np.int64)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def load(self, slots: NDArray[np.intp]) -> None:
        """Begin with the blocks of these slots, whose records are there; of two with one key the later slot counts."""
        self._slots = dict(zip(keys_of(self.records[slots]), slots.tolist(), strict=True))
        self._is_live[list(self._slots.values())] = True
        self._used[slots] = np.arange(1, len(slots) + 1)
        self._clock = len(slots)

    def find(self, key: bytes) -> int | None:
        """The slot of a block, which counts as used now; None where there is none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._clock += 1
            self._used[slot] = self._clock
        return slot

    def holds(self, key: bytes, slot: int) -> bool:
        """Whether a block lies in this slot still."""
        return self._slots.get(key) == slot

    def add(self, slots: NDArray[np.intp], records: Records) -> None:
        """The records' blocks lie in these slots now, and in no others, and count as used now."""
        self.records[slots], self._is_live[slots] = records, True
        self._used[slots] = np.arange(self._clock + 1, self._clock + 1 + len(slots))
        self._clock += len(slots)
        for slot, key in zip(slots.tolist(), keys_of(records), strict=True):
            if (before := self._slots.get(key)) is not None:
                self._is_live[before] = False
            self._slots[key] = slot

    def move(self, before: int, slots: NDArray[np.intp], records: Records) -> None:
        """A block has a copy in another slot, which replaces it where it is still there; it does not count as used."""
        if self._is_live[before]:
            used = self._used[before]
            self.add(slots, records)
            self._used[slots] = used

    def remove(self, key: bytes) -> None:
        """Forget a block, and its pins."""
        if (slot := self._slots.pop(key, None)) is not None:
            self._is_live[slot] = False
        self.pins.pop(key, None)

    def key(self, slot: int) -> bytes:
        """The key in a slot's record."""
        return keys_of(self.records[slot : slot + 1])[0]

    def keys(self) -> list[bytes]:
        """Keys of all blocks."""
        return list(self._slots)

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks."""
        return int(self.records["length"][self._is_live].sum(dtype=np.int64))

    def length(self, key: bytes) -> int:
        """Bytes of a block; 0 where there is none."""
        slot = self._slots.get(key)
        return 0 if slot is None else int(self.records["length"][slot])

    def last_used(self, slot: int) -> int:
        """When the block of a slot was used last."""
        return int(self._used[slot])

    def blocks_of(self, segment: int) -> list[int]:
        """Slots of a segment that have a block."""
        first = segment * self.layout.segment_slots
        live = np.flatnonzero(self._is_live[first : first + self.layout.segment_slots])
        return [first + place for place in live.tolist()]

    def victim(self, without: Iterable[int], room: int) -> int | None:
        """The segment to erase next, none of `without`; None where each of the others has more pinned blocks than there
        is room for, or nothing else."""
        pinned = np.zeros(self.layout.segments, np.int64)
        for key in self.pins:
            pinned[self._slots[key] // self.layout.segment_slots] += 1
        usable = (pinned < self.layout.segment_slots) & (pinned <= room)
        usable[list(without)] = False
        recency = np.where(self._is_live, self._used, 0).reshape(self.layout.segments, -1).sum(axis=1)
        return int(np.where(usable, recency, _NEVER).argmin()) if usable.any() else None

    def worth_moving(self, segment: int, room: int) -> list[int]:
        """Slots of a segment whose blocks are to be kept when it is erased: as many as there is room for."""
        slots = self.blocks_of(segment)
        average = self._used[self._is_live].mean() if slots else 0.0
        kept = [slot for slot in slots if self.key(slot) in self.pins]
        recent = [slot for slot in slots if slot not in kept and self._used[slot] > average]
        most = max(min(self.layout.segment_slots // 2, room) - len(kept), 0)
        return kept + sorted(recent, key=self.last_used, reverse=True)[:most]

    def free_segments(self) -> list[int]:
        """Segments without a block."""
        segments = self._is_live.reshape(self.layout.segments, -1)
        return [int(segment) for segment in np.flatnonzero(~segments.any(axis=1))]
