"""A KV store's life on NAND that fails: blocks bad from the factory, programs and erases, wear, reads, and power cuts.

Faults are drawn as the life goes on; what a returned `flush` covered must be there, whatever fails, and after a power
cut on the NAND itself: every page with its key, a right CRC32C and the bytes that were programmed.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import AUX_BYTES, SEALED_BYTES, PageKind, PageTag
from nearflash.abi.attention.page_operation import OperationKind
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.errors import PageError, StorageFullError
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.drivers.pages import NandPage, try_read
from nearflash.storage.flash.bad_blocks import TABLE_BLOCKS
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.flash.page import PageKeys, PageWrites, header_keys, unseal_pages
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.kv.statistics import Cause

__all__ = ["CountedFlash", "FaultKind", "FaultTally", "NandLife", "PowerLoss"]

SHAPE = KvShape(layers=1, kv_heads=2, dim=64)
LAYOUTS = [KvLayout(tokens, tokens == 16, 128, IndexFormat.INT4, 4096) for tokens in (16, 32)]
"""Groups that fill a page, and separate ones that fill two."""
PAGES_PER_BLOCK, BLOCKS, BUFFER_BYTES = 4, 4, 4 * 4096
READ_LIMIT, NAND_READ_LIMIT = 600, 1000
"""Reads after which the store moves a block, and after which its pages are lost."""
_RATES = {OperationKind.PROGRAM: 1 / 20, OperationKind.ERASE: 1 / 6}
"""Of faults of a program, and of an erase; as many blocks wear out at each."""
_WEAR_RATE, _FACTORY_RATE, _CUT_RATE = 1 / 40, 1 / 10, 1 / 5
"""Of blocks that fail from an operation on, and that are marked; of power cuts soon after a failure."""
_MAX_TOKENS, _CUT_WITHIN = 90, 12
Key = tuple[int, ...]
Flags = NDArray[np.bool_]


class FaultKind(StrEnum):
    """Faults of a NAND, and of what reads do to it."""

    PROGRAM = "program"
    """One program."""
    ERASE = "erase"
    """One erase."""
    FACTORY = "factory-bad"
    """A block has the factory's mark."""
    GROWN = "grown-bad"
    """A block fails from now on, whatever is done to it."""
    DISTURB = "read-disturb"
    """A block is read until the next reads would lose its pages."""


class PowerLoss(Exception):
    """The power is gone in the middle of an operation."""


@dataclass
class FaultTally:
    """Faults that were injected, and their cost, by kind."""

    injected: Counter[FaultKind] = field(default_factory=Counter)
    retired: Counter[FaultKind] = field(default_factory=Counter)
    moved_pages: Counter[FaultKind] = field(default_factory=Counter)
    cuts: int = 0
    cuts_in_moves: int = 0


class _Injector:
    """Faults of one NAND, at most `room` of each kind; none where `rng` is None."""

    def __init__(self, room: Counter[FaultKind], rng: np.random.Generator | None, *, loses_power: bool) -> None:
        self.tally, self._room, self._rng, self._loses_power = FaultTally(), room, rng, loses_power
        self.causes: dict[tuple[int, int, int], FaultKind] = {}
        """Why blocks (channel, lun, block) failed."""
        self.retired: set[tuple[int, int, int]] = set()
        self.reused: set[tuple[int, int, int]] = set()
        """Blocks that were programmed or erased after they had been retired."""
        self.moving = 0
        self._worn: set[tuple[int, int, int]] = set()
        self._cut_in: int | None = None

    def draw(self, kind: FaultKind, rate: float) -> bool:
        """Whether a fault of this kind happens now."""
        if self._rng is None or self.tally.injected[kind] >= self._room[kind] or self._rng.random() >= rate:
            return False
        self.tally.injected[kind] += 1
        return True

    def fails(self, kind: OperationKind, block: tuple[int, int, int]) -> bool:
        """See SimulatedNand.fails: of blocks behind the table."""
        self._count_down()
        self.note_use(kind, block)
        if block[2] < TABLE_BLOCKS:
            return False
        own = FaultKind.PROGRAM if kind is OperationKind.PROGRAM else FaultKind.ERASE
        if self.draw(FaultKind.GROWN, _WEAR_RATE):
            self._worn.add(block)
            own = FaultKind.GROWN
        elif block not in self._worn and not self.draw(own, _RATES[kind]):
            return False
        self.causes.setdefault(block, own)
        if self._loses_power and self._cut_in is None and self._rng is not None and self._rng.random() < _CUT_RATE:
            self._cut_in = int(self._rng.integers(1, _CUT_WITHIN))
        return True

    def note_use(self, _: OperationKind, block: tuple[int, int, int]) -> bool:
        """Nothing fails."""
        if block in self.retired:
            self.reused.add(block)
        return False

    def _count_down(self) -> None:
        if self._cut_in is None:
            return
        self._cut_in -= 1
        if not self._cut_in:
            self.tally.cuts += 1
            self.tally.cuts_in_moves += self.moving > 0
            raise PowerLoss


class CountedFlash(NandFlash):
    """Counts which fault retired a block and moved its pages; keeps what was programmed, by key."""

    injector: _Injector
    contents: dict[Key, bytes]

    def program(self, pages: PageNumbers, batch: PageWrites) -> None:
        """See Flash.program."""
        self.contents.update(zip(_keys(batch.keys), (row.tobytes() for row in batch.data), strict=True))
        super().program(pages, batch)

    def _move(self, block: int, new: Any) -> None:
        before, cause = self._moved_pages, self._find_cause(int(self._map.places[block]))
        self.injector.moving += 1
        super()._move(block, new)
        self.injector.moving -= 1
        self.injector.tally.moved_pages[cause] += self._moved_pages - before

    def _retire(self, place: int) -> None:
        self.injector.tally.retired[self._find_cause(place)] += 1
        super()._retire(place)
        self.injector.retired |= set(self._blocks_at(place))

    def _find_cause(self, place: int) -> FaultKind:
        return next(self.injector.causes[block] for block in self._blocks_at(place) if block in self.injector.causes)

    def _blocks_at(self, place: int) -> list[tuple[int, int, int]]:
        words = self._words(np.full(self._siblings, place), np.arange(self._siblings))
        return [_block_of(PageEntry.unpack(word)) for word in words.tolist()]


class NandLife:
    """One life of a store, of the actions of `seed`; `room`: how many faults of each kind may happen; None: not one.

    loses_power: the power goes soon after a failure, which raises PowerLoss. `flash` and `read_limit` are others where
    the bench shows that it notices what is lost.
    """

    def __init__(
        self, seed: int, room: Counter[FaultKind] | None, *, spare_blocks: int, loses_power: bool = False,
        flash: type[CountedFlash] | None = None, read_limit: int = READ_LIMIT,
    ) -> None:  # fmt: skip
        self._rng = np.random.default_rng(seed)
        rng = None if room is None else np.random.default_rng([seed, 1])
        self.injector = _Injector(room or Counter(), rng, loses_power=loses_power)
        self._layout = LAYOUTS[seed % len(LAYOUTS)]
        self._device = device = AttendModelDevice(attend_config("attend-tiny"), pages_per_block=PAGES_PER_BLOCK)
        self._mark(spare_blocks)
        device.nand.read_limit = NAND_READ_LIMIT
        self._options: dict[str, Any] = {
            "pages_per_block": PAGES_PER_BLOCK, "blocks_per_lun": BLOCKS, "paired": not self._layout.interleaved,
            "spare_blocks": spare_blocks,
        }  # fmt: skip
        self._flash = (flash or CountedFlash)(device, **self._options)
        self._contents: dict[Key, bytes] = {}
        self._flash.injector, self._flash.contents = self.injector, self._contents
        device.nand.fails = self.injector.fails
        self._store = KvStore(self._flash, SHAPE, self._layout, buffer_bytes=BUFFER_BYTES, read_limit=read_limit)
        self._tokens: dict[int, int] = {}
        self._promised: frozenset[Key] = frozenset()
        self.actions = 0

    def _mark(self, spare_blocks: int) -> None:
        config, nand = attend_config("attend-tiny"), self._device.nand
        for row in range(TABLE_BLOCKS, TABLE_BLOCKS + BLOCKS + spare_blocks):
            for channel in range(config.channels):
                for lun in range(config.luns):
                    if self.injector.draw(FaultKind.FACTORY, _FACTORY_RATE):
                        nand.marked.add((channel, lun, row))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's data."""
        return self._layout.page_bytes

    @property
    def refreshed_pages(self) -> int:
        """Moved since their blocks were read often."""
        return self._store.statistics.programmed[Cause.DISTURB]

    @property
    def programmed_bytes(self) -> int:
        """On the NAND, with copies and tables."""
        return self._device.nand.programs * self._layout.page_bytes

    @property
    def host_bytes(self) -> int:
        """K and V appended."""
        return self._store.statistics.host_bytes

    def act(self) -> None:
        """One random call, and now and then reads without end of a block."""
        action = self._rng.choice(["add", "append", "append", "append", "free", "flush", "flush"])
        self.actions += 1
        if action == "flush":
            reads, disturbed = self._device.nand.reads, self._disturb()
            self._store.flush()
            if disturbed is not None and reads[disturbed] > READ_LIMIT:  # not erased since: what is there is lost
                reads[disturbed] = NAND_READ_LIMIT
            self._promised = frozenset(key for number in self._tokens for key in _keys(self._pages_of(number)[1]))
        elif action == "free" and len(self._tokens) > 1:
            self._free(int(self._rng.choice(list(self._tokens))))
        elif action == "add" or not self._tokens:
            self._tokens[self._store.add()] = 0
        else:
            self._append(int(self._rng.choice(list(self._tokens))), int(self._rng.integers(1, _MAX_TOKENS)))

    def count_lost(self) -> int:
        """Words of 16 bits, of what was flushed, that the store does not give back."""
        return sum(self._compare(*self._find_promised(number)) for number in self._tokens)

    def count_lost_on_nand(self) -> int:
        """The same after a power cut: what no page on the NAND has."""
        self._device.nand.fails = self.injector.note_use
        found = dict(self._find_pages())
        lost = [key for key in self._promised if found.get(key) != self._contents[key]]
        return len(lost) * self._layout.page_bytes // 2

    def count_reused(self) -> int:
        """Retired blocks that were used again, here or by a new flash on this NAND, which erases all of its blocks."""
        self._device.nand.fails = self.injector.note_use
        flash = NandFlash(self._device, **self._options)
        for block in range(flash.geometry.blocks):
            flash.erase(block)
        return len(self.injector.reused | self._device.nand.marked & set(self._device.nand.erases))

    # Parts

    def _append(self, number: int, tokens: int) -> None:
        size = (2, SHAPE.kv_heads, tokens, SHAPE.dim)
        k, v = self._rng.standard_normal(size, dtype=np.float32).astype(np.float16)
        try:
            self._store.append(number, 0, k, v)
            self._tokens[number] += tokens
        except StorageFullError:
            self._free(max(self._tokens, key=self._tokens.__getitem__))

    def _free(self, number: int) -> None:
        del self._tokens[number]
        self._promised = frozenset(key for key in self._promised if key[0] != number)
        self._store.free(number)

    def _disturb(self) -> tuple[int, int, int] | None:
        """A device reads one block (channel, lun, block) so often that the store must move it with the next call."""
        pages = [page for number in self._tokens for page in self._find_promised(number)[0].tolist()]
        if not pages or not self.injector.draw(FaultKind.DISTURB, 1.0):
            return None
        page = pages[len(pages) // 2]
        block = _block_of(self._flash.entry(page))
        self._device.nand.reads[block] += READ_LIMIT + 1
        self._store.count_reads(np.full(READ_LIMIT + 1, page))
        return block

    def _find_promised(self, number: int) -> tuple[PageNumbers, PageKeys]:
        pages, keys = self._pages_of(number)
        promised = np.array([key in self._promised for key in _keys(keys)], bool)
        return pages[promised], keys[promised]

    def _pages_of(self, number: int) -> tuple[PageNumbers, PageKeys]:
        """Pages of whole groups and index blocks, and their keys."""
        at, maker = self._store.layer(number, 0), self._store.pages
        groups, blocks = range(at.token_pages.shape[-1]), range(len(at.index_tags))
        keys = [maker.token_keys(at.token_tags, 0, groups), maker.index_keys(at.index_tags, 0, blocks)]
        pages = at.token_pages[..., None] + np.arange(self._layout.group_pages)
        both = np.concatenate([pages.reshape(-1), at.index_pages.reshape(-1)])
        return both, np.concatenate([part.reshape(-1) for part in keys])

    def _compare(self, pages: PageNumbers, keys: PageKeys) -> int:
        """Words that differ; of pages that cannot be read, all."""
        try:
            read = self._store.read(pages, keys).data.view(np.uint16)
        except PageError:
            if len(pages) == 1:
                return self._layout.page_bytes // 2
            return sum(self._compare(pages[row : row + 1], keys[row : row + 1]) for row in range(len(pages)))
        expected = [np.frombuffer(self._contents[key], np.uint16) for key in _keys(keys)]
        return int((read != np.array(expected, np.uint16).reshape(read.shape)).sum())

    def _find_pages(self) -> Iterator[tuple[Key, bytes]]:
        """Key and data of each page on the NAND that is whole, with V's of separate groups."""
        entries = [PageEntry(*place) for place in self._device.nand.pages()]
        nobody = PageTag(0, 0, 0)
        read, _ = try_read(self._device, [NandPage(entry, nobody, 0, PageKind.TOKEN) for entry in entries])
        sealed = np.array(read, np.uint8).reshape(len(entries), -1, SEALED_BYTES)
        keys, known = header_keys(np.ascontiguousarray(sealed[..., :AUX_BYTES]))
        odd = np.array([entry.lun % 2 for entry in entries], bool) & (keys["kind"] == PageKind.TOKEN)
        if not self._layout.interleaved:
            keys["first"][odd] = self._layout.page_codewords
        data, valid = unseal_pages(sealed, keys)
        whole = np.flatnonzero(known & valid)
        yield from zip(_keys(keys[whole]), (data.data[row].tobytes() for row in whole.tolist()), strict=True)


def _block_of(entry: PageEntry) -> tuple[int, int, int]:
    return entry.channel, entry.lun, entry.row // PAGES_PER_BLOCK


def _keys(keys: PageKeys) -> Iterator[Key]:
    names = ("sequence", "layer", "head", "index", "kind", "first")
    return zip(*(keys[name].reshape(-1).tolist() for name in names), strict=True)
