"""The bad blocks of a device's NAND: those that the factory marked, and those that failed since, kept on the NAND.

A mark lies where codewords lie once a page is programmed, so marks are looked for once, before that, and the table goes
on from there. It is in the first TABLE_BLOCKS blocks of lun 0 of channel 0: versions one after the other, each in as
many pages as it needs, with the version as sequence of the page tag and the part as page index. The newest version of
which all parts are valid counts. A new one goes behind it, or to the next block, erased before.

    pages of a block, rows, bad blocks of the table as bits, 0 (each u32) | a bit for each (row, channel, lun)
"""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.page_operation import PageFault
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.errors import CommandError, ReadOnlyError, StateError
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Device
from nearflash.device.drivers import pages as nand
from nearflash.storage.flash.page import (
    PageKeys,
    PageWrites,
    header_keys,
    page_headers,
    page_keys,
    seal_codewords,
    unseal_pages,
)

__all__ = ["TABLE_BLOCKS", "BadBlockTable"]

TABLE_BLOCKS = 4
"""Blocks of every lun that a flash with spares leaves out; on lun 0 of channel 0 the table is in them."""
_HEADER = struct.Struct("<IIII")
_NOBODY = 0xFFFF
"""Layer and head of the table's page tag."""
_STEP_PAGES = 16
"""Pages read at once to find versions."""
Flags = NDArray[np.bool_]


class BadBlockTable:
    """The table of a device whose attend kernel has `config`, its blocks from NAND block `first_block` on.

    Bad blocks are (rows, channels, luns), row 0 behind the table. Raises StateError for a table of other blocks,
    CommandError where a version is longer than a block, ReadOnlyError where none of its blocks can be written,
    NandError for other faults.
    """

    def __init__(self, device: Device, config: AttendConfig, first_block: int, pages_per_block: int, rows: int) -> None:
        self._device, self._config, self._pages = device, config, pages_per_block
        self._first, self._rows = first_block, rows
        if self._parts(rows) > pages_per_block:
            raise CommandError(f"pages_per_block must be at least {self._parts(rows)}, the table's pages")
        self._table_bad = np.zeros(TABLE_BLOCKS, bool)
        self._version, self._newest = 0, -1
        self._block, self._page = TABLE_BLOCKS - 1, pages_per_block
        self.saved = 0
        """Versions written."""
        found = self._load()
        known = 0 if found is None else len(found)
        self.bad = np.zeros((rows, config.channels, config.luns), bool)
        """Which blocks must not be used."""
        if found is not None:
            self.bad[: min(known, rows)] = found[:rows]
        else:
            marked = nand.are_marked_bad(device, [self._entry(block, 0) for block in range(TABLE_BLOCKS)], self._pages)
            self._table_bad[:] = marked
        self._beyond = np.zeros((0, config.channels, config.luns), bool) if found is None else found[rows:]
        """Of rows that are not used now."""
        if known < rows:
            self._find_marks(known)
            self._save()

    def retire(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Blocks (row, channel, lun) have failed; returns when the table has them."""
        for block in blocks:
            self.bad[block] = True
        self._save()

    def _find_marks(self, first_row: int) -> None:
        new = [tuple(place) for place in np.argwhere(~self.bad[first_row:]).tolist()]
        entries = [
            PageEntry(channel, lun, (self._first + TABLE_BLOCKS + first_row + row) * self._pages)
            for row, channel, lun in new
        ]
        for (row, channel, lun), marked in zip(
            new, nand.are_marked_bad(self._device, entries, self._pages), strict=True
        ):
            self.bad[first_row + row, channel, lun] = marked

    # On the NAND

    def _load(self) -> Flags | None:
        """The newest whole version; None where there is none."""
        parts: dict[int, dict[int, bytes]] = {}
        places: dict[int, int] = {}
        for block in range(TABLE_BLOCKS):
            for version, part, data in self._find_parts(block):
                parts.setdefault(version, {})[part] = data
                places[version] = block
        for version in sorted(parts, reverse=True):
            if 0 not in parts[version]:
                continue
            content = b"".join(data for _, data in sorted(parts[version].items()))
            pages, rows, table_bits, _ = _HEADER.unpack_from(content)
            if set(parts[version]) != set(range(self._parts(rows))):
                continue
            if pages != self._pages:
                raise StateError(f"pages_per_block must be {pages}, as the NAND's table of bad blocks has it, not "
                                 f"{self._pages}")  # fmt: skip
            self._version, self._block = version, places[version]
            self._newest = self._block
            self._page = self._pages  # what lies behind it is not known to be erased
            self._table_bad = np.array([bool(table_bits >> block & 1) for block in range(TABLE_BLOCKS)])
            bits = np.unpackbits(np.frombuffer(content, np.uint8)[_HEADER.size :], bitorder="little")
            shape = rows, self._config.channels, self._config.luns
            return bits[: int(np.prod(shape))].reshape(shape).astype(bool)
        return None

    def _find_parts(self, block: int) -> list[tuple[int, int, bytes]]:
        """Version, part and data of each valid page of the table in one of its blocks."""
        found: list[tuple[int, int, bytes]] = []
        for start in range(0, self._pages, _STEP_PAGES):
            pages = range(start, min(start + _STEP_PAGES, self._pages))
            valid = self._read_parts(block, pages)
            found += valid
            if not valid:
                break
        return found

    def _read_parts(self, block: int, pages: range) -> list[tuple[int, int, bytes]]:
        nobody = PageTag(0, 0, 0)
        names = [nand.NandPage(self._entry(block, page), nobody, 0, PageKind.TOKEN) for page in pages]
        read, _ = nand.try_read(self._device, names)
        sealed = np.stack(read).reshape(len(pages), -1, SEALED_BYTES)
        keys, has_header = header_keys(np.ascontiguousarray(sealed[..., :8]))
        data, valid = unseal_pages(sealed, keys)
        own = has_header & valid & (keys["layer"] == _NOBODY) & (keys["head"] == _NOBODY)
        return [
            (int(keys["sequence"][at]), int(keys["index"][at]), data.data[at].tobytes())
            for at in np.flatnonzero(own).tolist()
        ]

    def _save(self) -> None:
        self._version += 1
        batch = self._pack()
        parts = len(batch.keys)
        tries = 0
        while tries <= TABLE_BLOCKS:
            if self._page + parts > self._pages and not self._open_next_block():
                break
            if self._program(batch):
                self._page, self._newest = self._page + parts, self._block
                self.saved += 1
                return
            self._table_bad[self._block] = True
            self._page, batch, tries = self._pages, self._pack(), tries + 1
        raise ReadOnlyError(
            f"one of the first {TABLE_BLOCKS} blocks of lun 0 of channel 0 must take the table of bad blocks, but all "
            "others than the one with the last table have failed: what was durable can be read, so copy it"
        )

    def _open_next_block(self) -> bool:
        """Erase the next good block; False where there is none beside the one with the newest version."""
        for step in range(1, TABLE_BLOCKS):
            block = (self._block + step) % TABLE_BLOCKS
            if self._table_bad[block] or block == self._newest:
                continue
            try:
                nand.erase(self._device, [self._entry(block, 0)])
            except nand.NandError as error:
                _check_failed(error)
                self._table_bad[block] = True
                continue
            self._block, self._page = block, 0
            return True
        return False

    def _program(self, batch: PageWrites) -> bool:
        names = [
            nand.NandPage(self._entry(self._block, self._page + part), PageTag(self._version, _NOBODY, _NOBODY), part,
                          PageKind.TOKEN)
            for part in range(len(batch.keys))
        ]  # fmt: skip
        try:
            nand.program(self._device, names, list(seal_codewords(batch)))
        except nand.NandError as error:
            _check_failed(error)
            return False
        return True

    def _pack(self) -> PageWrites:
        bad = np.concatenate([self.bad, self._beyond])
        bits = sum(int(flag) << block for block, flag in enumerate(self._table_bad))
        content = _HEADER.pack(self._pages, len(bad), bits, 0) + np.packbits(bad, bitorder="little").tobytes()
        size = self._config.page_bytes
        data = np.zeros((self._parts(len(bad)), size), np.uint8)
        data.reshape(-1)[: len(content)] = np.frombuffer(content, np.uint8)
        keys = page_keys(self._version, _NOBODY, _NOBODY, np.arange(len(data)), PageKind.TOKEN)
        return PageWrites(keys, data, _header_aux(keys, size))

    def _parts(self, rows: int) -> int:
        """Pages of a version."""
        bits = rows * self._config.channels * self._config.luns
        return -(-(_HEADER.size + -(-bits // 8)) // self._config.page_bytes)

    def _entry(self, block: int, page: int) -> PageEntry:
        return PageEntry(0, 0, (self._first + block) * self._pages + page)


def _header_aux(keys: PageKeys, page_bytes: int) -> NDArray[np.uint8]:
    header = page_headers(keys, page_bytes, 0, IndexFormat.FP16)
    return np.concatenate([np.zeros_like(header), header], axis=-1)


def _check_failed(error: nand.NandError) -> None:
    """Raise the error where something else than a failed program or erase is in it."""
    if any(fault != PageFault.FAILED for fault in error.faults.values()):
        raise error
