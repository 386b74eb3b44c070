"""Dither: the numbers that are added below the last bit of m or v before it is cut to a narrow format.

    DitherKeys ─ keys of the tiles ─┐
    row of lanes ─ places ─ pattern ┴─ + ─► o

Contract: `o` gives, without end, the dithers of the parameters from `first_param` on, a group of `lanes` at a time. A
command is always taken and drops what is left of the one before.

Timing: the first group LATENCY cycles after a command; then one group a cycle where no tile takes less than a key
(DitherKeys.INTERVAL); back-pressure: yes. o comes from registers.
Numerics: 16-bit integers, pattern(place) + key(step, array, tile) mod 2^16; equals nearflash.model.update.state.dither.
Limits: tiles are counted modulo 2^32.
"""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.optimizers.state import DITHER_BITS, TILE_PARAMS, dither_pattern
from nearflash.gateware.update.dither_keys import DitherKeys

__all__ = ["Dither", "DitherCommand"]

_PLACE_BITS = (TILE_PARAMS - 1).bit_length()


class DitherCommand(data.Struct):
    """Begin at parameter `first_param` of the flat vector, at `step`."""

    step: 32
    first_param: 40


class Dither(wiring.Component):
    """Dithers of one array.

    Parameters
    ----------
    lanes : parameters of a group, a power of two.
    role : the array, "m" or "v".

    Members
    -------
    i_command : In stream of DitherCommand, always ready.
    o : Out stream of array of `lanes` 16-bit numbers.
    """

    #: Cycles from a command to the first group.
    LATENCY = DitherKeys.LATENCY + 2

    def __init__(self, lanes: int, role: str) -> None:
        self.lanes = lanes
        self._keys = DitherKeys(role)
        super().__init__(
            {
                "i_command": In(stream.Signature(DitherCommand)),
                "o": Out(stream.Signature(data.ArrayLayout(DITHER_BITS, lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A group's places lie in one row of `lanes` places or in two: then the tile may end in between."""
        m = Module()
        m.submodules.keys = keys = self._keys
        lane_bits = (self.lanes - 1).bit_length()
        command, begins = self.i_command.payload, self.i_command.valid
        first = command.first_param
        row_bits = _PLACE_BITS - lane_bits
        row, above = Signal(row_bits), Signal(row_bits)  # a row and the next one
        shift = Signal(lane_bits) if lane_bits else Const(0, 1)  # place of lane 0 in its row
        key, keyed, last_row = Signal(DITHER_BITS), Signal(), Signal()
        able, step, wraps = Signal(), Signal(), Signal()
        m.d.comb += [
            self.i_command.ready.eq(1),
            keys.i_command.valid.eq(begins),
            keys.i_command.payload.step.eq(command.step),
            keys.i_command.payload.tile.eq(first[_PLACE_BITS:]),
            able.eq(keyed & (~last_row | (shift == 0) | keys.o.valid)),
            step.eq(able & (self.o.ready | ~self.o.valid)),
            wraps.eq(step & last_row),
            keys.o.ready.eq(wraps | ~keyed),
        ]

        # The next key moves up with the last row of a tile, or as soon as there is one.
        with m.If(wraps | ~keyed):
            m.d.sync += [key.eq(keys.o.payload), keyed.eq(keys.o.valid)]
        with m.If(step):
            m.d.sync += [row.eq(above), above.eq(above + 1), last_row.eq(above == (1 << row_bits) - 1)]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += self.o.valid.eq(1)
            for lane in range(self.lanes):
                column = shift + lane
                crosses = column[lane_bits:].any()
                place = Cat(column[:lane_bits], Mux(crosses, above, row))
                m.d.sync += self.o.payload[lane].eq(_pattern(place) + Mux(crosses & last_row, keys.o.payload, key))

        with m.If(begins):
            start = first[lane_bits:_PLACE_BITS]
            m.d.sync += [
                row.eq(start),
                above.eq(start + 1),
                last_row.eq(start.all()),
                keyed.eq(0),
                self.o.valid.eq(0),
            ]
            if lane_bits:
                m.d.sync += shift.eq(first[:lane_bits])
        return m


def _pattern(place: Cat) -> Cat:
    """abi's `dither_pattern`, which is linear over GF(2): each bit is the parity of some bits of the place."""
    columns = [dither_pattern(1 << bit) for bit in range(_PLACE_BITS)]
    return Cat(
        Cat(place[bit] for bit, column in enumerate(columns) if column >> result & 1).xor()
        for result in range(DITHER_BITS)
    )
