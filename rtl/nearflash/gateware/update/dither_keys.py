"""Dither keys: one 16-bit number that looks random for each tile of 8,192 parameters, made ahead of its tile.

    2·step + array ─► mix ─► base;   base + tile ─► mix ─► upper 16 bits ─► o

Contract: after a command `o` gives, without end, the keys of tile, tile + 1, ... A command is always taken and drops
what is left of the one before.

Timing: first key LATENCY cycles after a command, a further one INTERVAL cycles after the one before was taken, since
the mixer does one of its six rounds (a sum of shifts and an exclusive or) a cycle; back-pressure: yes. o.valid comes
from a register.
Numerics: 32-bit integers; equals nearflash.abi.optimizers.state.dither_key to the bit.
"""

from amaranth import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.optimizers.state import DITHER_BITS, MIX_SHIFTS, ROLES

__all__ = ["DitherKeyCommand", "DitherKeys"]

_WORD_BITS = 32


class DitherKeyCommand(data.Struct):
    """Begin with the key of `tile` at `step`."""

    step: 32
    tile: 32


class DitherKeys(wiring.Component):
    """Keys of one array.

    Parameters
    ----------
    role : the array, "m" or "v".

    Members
    -------
    i_command : In stream of DitherKeyCommand, always ready.
    o : Out stream of unsigned(16).
    """

    #: Cycles between two keys.
    INTERVAL = len(MIX_SHIFTS) + 1
    #: Cycles from a command to its first key.
    LATENCY = 2 * INTERVAL

    def __init__(self, role: str) -> None:
        self._role = ROLES[role]
        super().__init__(
            {
                "i_command": In(stream.Signature(DitherKeyCommand)),
                "o": Out(stream.Signature(DITHER_BITS)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """One mixer for the base and for every key."""
        m = Module()
        word, base, tile = (Signal(_WORD_BITS, name=name) for name in ("word", "base", "tile"))
        turn, runs, mixes, based = Signal(range(len(MIX_SHIFTS))), Signal(), Signal(), Signal()
        added, mixed = Signal(_WORD_BITS), Signal(_WORD_BITS)
        m.d.comb += [
            self.i_command.ready.eq(1),
            added.eq(word + Array(word << up for up, _ in MIX_SHIFTS)[turn][:_WORD_BITS]),
            mixed.eq(added ^ Array(added >> down for _, down in MIX_SHIFTS)[turn]),
            self.o.payload.eq(word[-DITHER_BITS:]),
        ]
        with m.If(mixes):
            last = turn == len(MIX_SHIFTS) - 1
            m.d.sync += [word.eq(mixed), turn.eq(Mux(last, 0, turn + 1)), mixes.eq(~last)]
            with m.If(last):
                m.d.sync += self.o.valid.eq(based)
        # The base is there, or a key was taken: mix the next one.
        with m.Elif(runs & (~self.o.valid | self.o.ready)):
            m.d.sync += [self.o.valid.eq(0), mixes.eq(1), based.eq(1), tile.eq(tile + 1)]
            with m.If(based):
                m.d.sync += word.eq(base + tile)
            with m.Else():
                m.d.sync += [base.eq(word), word.eq(word + tile)]
        with m.If(self.i_command.valid):
            command = self.i_command.payload
            m.d.sync += [
                word.eq((command.step << 1) + self._role),
                tile.eq(command.tile),
                turn.eq(0),
                runs.eq(1),
                mixes.eq(1),
                based.eq(0),
                self.o.valid.eq(0),
            ]
        return m
