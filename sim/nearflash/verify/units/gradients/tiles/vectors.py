"""Vectors of the tile check of Top-K streams: commands of good tiles, and of one that is wrong and what follows it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.crc import crc32c
from nearflash.abi.topk import TILE_BITS, TILE_PARAMS, StreamFault, ValueFormat, pack_tile_word, tile_crc_prefix
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.header import TilesCommand
from nearflash.gateware.gradients.tiles import IndexRow, Tile, TileCheck
from nearflash.gateware.gradients.values import ROW_PAIRS, ValueWord
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedTiles", "vectors"]

_COMMANDS = 60
_TILES = 4
_LAST = 2
_COUNTS = [0, 0, *range(1, 10), 12, 13, 40]


_START = data.StructLayout({"start": TilesCommand, "words": 29})


class ObservedTiles(wiring.Component):
    """TileCheck as `inner`, indices that are not there zero; `o_end`: the fault of each command that ended."""

    def __init__(self) -> None:
        inputs = {"i_start": _START, "i": 64}
        outputs = {"o_index": IndexRow, "o_value": ValueWord, "o_tile": Tile, "o_end": StreamFault}
        super().__init__(
            {name: In(stream.Signature(shape)) for name, shape in inputs.items()}
            | {name: Out(stream.Signature(shape)) for name, shape in outputs.items()}
        )

    def elaborate(self, platform: Any) -> Module:
        """Build it with the queue of tiles that it has in the expander, and what comes from the header check."""
        m = Module()
        m.submodules.inner = inner = TileCheck()
        m.submodules.tiles = tiles = StreamQueue(Tile, _TILES)
        m.submodules.crc = crc = Crc32c()
        wiring.connect(m, inner.o_tile, tiles.i)
        wiring.connect(m, wiring.flipped(self.i), inner.i)
        gate(m, tiles.o, self.o_tile)
        gate(m, inner.o_value, self.o_value)
        gate(m, inner.o_index, self.o_index, self._present)
        ending, words, start = Signal(), Signal(29), Signal(TilesCommand)
        begins = self.i_start.valid & self.i_start.ready
        m.d.comb += [
            inner.room.eq(tiles.level < _TILES - 1),
            inner.i_start.payload.eq(Mux(ending, start.as_value(), self.i_start.payload.start.as_value())),
            inner.i_start.valid.eq(self.i_start.valid & ~ending),
            inner.more.eq(words != 0),
            self.i_start.ready.eq(inner.i_start.ready & ~ending),
            self.o_end.valid.eq(ending & inner.idle),
            self.o_end.payload.eq(Mux(self.o_end.valid, inner.fault, 0)),
            crc.enable.eq(self.i.valid & self.i.ready),
            crc.first.eq(inner.begins),
            crc.data.eq(inner.message),
            inner.crc.eq(crc.o),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += words.eq(words - 1)
        with m.If(begins):
            m.d.sync += [ending.eq(1), words.eq(self.i_start.payload.words), start.eq(self.i_start.payload.start)]
        with m.Elif(self.o_end.valid & self.o_end.ready):
            m.d.sync += ending.eq(0)
        return m

    def _present(self, row: Any) -> Any:
        lanes = (row.index.word_select(k, TILE_BITS) & row.there[k].replicate(TILE_BITS) for k in range(ROW_PAIRS))
        return Cat(*lanes, row.there, row.last)


@dataclass
class _Items:
    """Items of all streams."""

    starts: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Commands of up to five tiles, now and then of many empty ones; the last one has more than a run could bring."""
    items = _Items()
    for number in range(_COMMANDS):
        form, pairs = ValueFormat(int(rng.integers(len(ValueFormat)))), 0
        if rng.integers(12) == 0:  # refused by its header
            fault = StreamFault(int(rng.integers(1, len(StreamFault))))
            params = int(rng.integers(1, 1 << 18))
            items.starts.append(_start(params, int(rng.integers(1 << 32)), 0, form, fault))
            items.tiles += _empty(-(-params // TILE_PARAMS))
            items.ends.append(fault)
            continue
        many = rng.integers(40) == 0
        tiles = int(rng.choice((300, 3000, 140_000), p=(0.94, 0.05, 0.01)) if many else rng.integers(1, 6))
        tail = int(rng.choice([1, 4, 5, 100, 4095, TILE_PARAMS]))
        fault, begin, endless = StreamFault.NONE, len(items.words), number == _COMMANDS - 1
        first_tile = len(items.tiles)
        for tile in range(tiles):
            last = tile == tiles - 1 and not endless
            power = 1 << int(rng.integers(TILE_BITS + 1))
            count = 0 if many else power if rng.integers(25) == 0 else int(rng.choice(_COUNTS))
            tile_fault, ends, count = _tile(
                rng, items, tile, count, form, tail if last else TILE_PARAMS, fault, many or endless
            )
            fault, pairs = fault or tile_fault, pairs + count
            if ends:
                break
        if endless:
            params, words = TILE_PARAMS + (1 << int(rng.integers(30, 32))), 1 << int(rng.integers(18, 29))
            items.starts.append(_start(params, int(rng.integers(1 << 32)), words, form, StreamFault.NONE))
            continue
        kind = rng.integers(8)
        params = (tiles - 1) * TILE_PARAMS + tail
        if kind == 0 and not ends:
            items.words += rng.integers(0, 1 << 64, int(rng.integers(1, 4)), np.uint64).tolist()
        elif kind == 1:
            pairs ^= 1 << int(rng.integers(32))
        elif kind == 2 and not fault:  # many tiles are missing
            params += 1 << int(rng.integers(TILE_BITS + 1, TILE_BITS + 8))
        if kind < 3 and not fault:
            fault = StreamFault.LENGTH
            if kind < 2:
                items.tiles.pop()
        items.starts.append(_start(params, pairs, len(items.words) - begin, form, StreamFault.NONE))
        missing = -(-params // TILE_PARAMS) - (len(items.tiles) - first_tile)
        items.tiles += _empty(missing)
        items.tiles[-1] |= _LAST
        items.ends.append(fault)
    inputs: dict[str, NDArray[Any]] = {
        "i_start": words_from_integers(items.starts, 98),
        "i": np.array(items.words, np.uint64),
    }
    return inputs, {
        "o_index": np.array(items.rows, np.uint64),
        "o_value": words_from_integers(items.values, 65),
        "o_tile": np.array(items.tiles, np.uint8),
        "o_end": np.array(items.ends, np.uint8),
    }


def _empty(count: int) -> list[int]:
    """Tiles without pairs up to the last one."""
    return [0] * (count - 1) + [_LAST] if count else []


def _start(params: int, pairs: int, words: int, form: ValueFormat, fault: StreamFault) -> int:
    return params | pairs << 32 | form << 64 | fault << 66 | words << 69


def _tile(
    rng: np.random.Generator,
    items: _Items,
    number: int,
    count: int,
    form: ValueFormat,
    limit: int,
    before: StreamFault,
    good: bool,
) -> tuple[StreamFault, bool, int]:
    """Add tile `number` of at most `count` pairs, with what is to come of it where no fault was `before`.

    If it need not be `good`, one in six is wrong. Its fault, whether the stream ends with it, and its pairs.
    """
    count = min(count, limit)
    indices = np.sort(rng.choice(limit, count, replace=False)).astype("<u2")
    kind = 40 if good else int(rng.integers(40))
    fault = StreamFault.NONE
    if kind == 0 and count > 1:
        place = int(rng.integers(count - 1))
        indices[place] = rng.choice((int(indices[place + 1]), int(rng.integers(indices[place + 1], 1 << 16))))
        fault = StreamFault.ORDER
    elif kind == 1 and count:
        indices[-1] = rng.choice((limit, int(rng.integers(limit, 1 << 16))))
        fault = StreamFault.RANGE
    values = rng.integers(0, 256, count * form.number_format.bytes, np.uint8)
    sections = np.concatenate([_words(rng, indices.tobytes()), _words(rng, values.tobytes())])
    wrong_number = number ^ (1 << int(rng.integers(32)) if kind == 2 else 0)
    crc = crc32c(tile_crc_prefix(wrong_number, pack_tile_word(count, 0)) + sections.tobytes())
    if kind == 4 and count:
        sections[rng.integers(len(sections))] ^= np.uint64(1 << int(rng.integers(64)))
    if kind in (2, 3) or (kind == 4 and count):
        fault = StreamFault.CHECKSUM
    stated = int(rng.choice((TILE_PARAMS + 1, 1 << int(rng.integers(13, 16))))) if kind == 5 else count
    words = [int.from_bytes(pack_tile_word(stated, crc), "little"), *sections.tolist()]
    if kind == 3:  # of the checksum, or of what fills up the count
        words[0] ^= 1 << int(rng.integers(16, 64))
    if kind == 5:
        fault, words = StreamFault.COUNT, words[:1]
    elif kind == 6:
        fault, words = StreamFault.LENGTH, words[: int(rng.integers(len(words)))]
    items.words += words
    if before is StreamFault.NONE:
        _expect(items, words[1:], count if kind != 5 else 0, len(sections))
        if fault is StreamFault.NONE:
            items.tiles.append(count != 0)
    return fault, kind == 6, count


def _words(rng: np.random.Generator, section: bytes) -> NDArray[np.uint64]:
    """A section; what fills up its last word is anything."""
    return np.frombuffer(section + rng.bytes(-len(section) % 8), "<u8")


def _expect(items: _Items, words: list[int], count: int, complete: int) -> None:
    """Rows and values of those words of a tile's sections that come."""
    rows = -(-count // ROW_PAIRS)
    for place, word in enumerate(words[:rows]):
        there = min(ROW_PAIRS, count - ROW_PAIRS * place)
        lanes = sum((word >> 16 * k & TILE_PARAMS - 1) << TILE_BITS * k for k in range(there))
        items.rows.append(lanes | ((1 << there) - 1) << 48 | (place == rows - 1) << 52)
    items.values += [word | (rows + place == complete - 1) << 64 for place, word in enumerate(words[rows:])]


TARGET = Target(ObservedTiles, vectors, part="inner", stalls=("none", "both"), batches=60, cut_cycles=(3, 9, 20, 33))
