"""Vectors of the pair merge: commands of a few groups and of whole tiles, with and without pairs; some of them fail.

The last one has more groups than a run could bring.
"""

from typing import Any

import numpy as np
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In
from numpy.typing import NDArray

from nearflash.abi.formats import FP32
from nearflash.abi.topk import TILE_BITS, TILE_PARAMS
from nearflash.gateware.gradients.pair_demux import PairDemux
from nearflash.gateware.gradients.pairs import PairMerge
from nearflash.gateware.gradients.tiles import IndexRow, Tile
from nearflash.gateware.gradients.values import ROW_PAIRS
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedMerge", "vectors"]

_LANES = 4
_COMMANDS = 50
_COMMAND = data.StructLayout({"params": 32, "tiles": 16, "rows": 16})
"""How many tiles and rows a command has."""
_ROW = data.StructLayout({"index": IndexRow, "value": ROW_PAIRS * FP32.bits})


class ObservedMerge(wiring.Component):
    """PairMerge as `inner`, behind PairDemux; tiles and rows wait for their command, which resets the demux."""

    def __init__(self) -> None:
        self._merge = PairMerge(_LANES)
        members = {"i_command": _COMMAND, "i_tile": Tile, "i": _ROW}
        o = self._merge.signature.members["o"]
        super().__init__({name: In(stream.Signature(shape)) for name, shape in members.items()} | {"o": o})

    def elaborate(self, platform: Any) -> Module:
        """Count what is still to come of a command."""
        m = Module()
        m.submodules.inner = inner = self._merge
        begin, demux = Signal(), PairDemux()
        m.submodules.demux = ResetInserter(begin)(demux)
        left = Signal(_COMMAND)
        gate(m, inner.o, self.o)
        m.d.comb += [
            begin.eq(self.i_command.valid & self.i_command.ready),
            inner.i_params.payload.eq(self.i_command.payload.params),
            inner.i_params.valid.eq(self.i_command.valid & inner.idle & (left.rows == 0)),
            self.i_command.ready.eq(inner.i_params.ready & (left.rows == 0)),
            demux.i_index.payload.eq(self.i.payload.index),
            demux.i_value.payload.eq(self.i.payload.value),
            inner.i_tile.payload.eq(self.i_tile.payload),
        ]
        for k in range(ROW_PAIRS):
            wiring.connect(m, getattr(demux, f"o_{k}"), getattr(inner, f"i_{k}"))
        tiles, rows = (left.tiles != 0) & ~inner.idle, left.rows != 0
        m.d.comb += [
            inner.i_tile.valid.eq(self.i_tile.valid & tiles),
            self.i_tile.ready.eq(inner.i_tile.ready & tiles),
            demux.i_index.valid.eq(self.i.valid & rows),
            self.i.ready.eq(demux.i_index.ready & rows),
            demux.i_value.valid.eq(self.i.valid & self.i.ready),
        ]
        for each, count in ((self.i_tile, left.tiles), (self.i, left.rows)):
            with m.If(each.valid & each.ready):
                m.d.sync += count.eq(count - 1)
        with m.If(begin):
            m.d.sync += left.eq(self.i_command.payload)
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Values are anything, also of pairs that are not there, and so are their indices."""
    commands, tiles, rows, groups = [], list[int](), list[int](), list[int]()
    for number in range(_COMMANDS):
        endless = number == _COMMANDS - 1
        whole = 1 if endless else int(rng.choice(3, p=[0.9, 0.08, 0.02]))
        tail = int(rng.choice([1, 2, 3, 4, 5, 17, 60, 200]))
        params = whole * TILE_PARAMS + tail
        fails = not endless and int(rng.integers(4)) == 0
        good = whole if endless else int(rng.integers(whole + 1)) if fails else whole + 1
        first_row, dense = len(rows), np.zeros(-(-params // _LANES) * _LANES, np.uint32)
        for tile in range(good):
            limit = TILE_PARAMS if tile < whole else tail
            indices = np.flatnonzero(rng.random(limit) < rng.choice([0, 0.01, 0.2, 0.6, 1]))
            if rng.integers(4) == 0:
                indices = np.concatenate([indices[indices < limit - 6], np.arange(limit)[-int(rng.integers(1, 7)) :]])
            tiles.append((len(indices) > 0) | (tile == whole) << 1)
            values = rng.integers(0, 1 << 32, len(indices), np.uint32)
            dense[tile * TILE_PARAMS + indices] = values
            rows += _rows(rng, indices.tolist(), values.tolist())
        if fails:  # what a tile that failed leaves at the streams; it and those behind it count as empty
            rows += _rows(rng, sorted(rng.choice(TILE_PARAMS, int(rng.integers(9)), replace=False).tolist()), [0] * 8)
            tiles += [(tile == whole) << 1 for tile in range(good, whole + 1)]
        if endless:  # one tile of very many; their number is a power of two, or some more
            dense, params = dense[:TILE_PARAMS], 1 << int(rng.integers(TILE_BITS + 1, 32))
            params += int(rng.integers(TILE_PARAMS)) * int(rng.integers(2))
        stated = good if endless else whole + 1
        commands.append(params | stated << 32 | len(rows) - first_row << 48)
        beats = dense.reshape(-1, _LANES)
        groups += [int.from_bytes(beat.tobytes(), "little") for beat in beats]
        if not endless:
            groups[-1] |= 1 << _LANES * FP32.bits
    inputs: dict[str, NDArray[Any]] = {
        "i_command": np.array(commands, np.uint64),
        "i_tile": np.array(tiles, np.uint8),
        "i": words_from_integers(rows, 181),
    }
    return inputs, {"o": words_from_integers(groups, _LANES * FP32.bits + 1)}


def _rows(rng: np.random.Generator, indices: list[int], values: list[int]) -> list[int]:
    rows = []
    for first in range(0, len(indices), ROW_PAIRS):
        count = min(ROW_PAIRS, len(indices) - first)
        row = int(rng.integers(1 << 48)) | (1 << count) - 1 << 48 | (first + ROW_PAIRS >= len(indices)) << 52
        row |= int.from_bytes(rng.bytes(16), "little") << 53
        for lane, (index, value) in enumerate(zip(indices[first:][:count], values[first:], strict=False)):
            for bits, width, at in ((index, TILE_BITS, TILE_BITS * lane), (value, FP32.bits, 53 + FP32.bits * lane)):
                row = row & ~((1 << width) - 1 << at) | bits << at
        rows.append(row)
    return rows


TARGET = Target(ObservedMerge, vectors, part="inner", stalls=("none", "both"), batches=30, cut_cycles=(9, 20, 33))
