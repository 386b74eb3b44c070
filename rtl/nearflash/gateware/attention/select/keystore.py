"""KeyStore: keeps the keys of one selection in block RAM and gives them again, from the first, as often as asked.

Timing: latency LATENCY cycles from `write` or `read` to `o`; one beat a cycle, free-running.
"""

from amaranth import C, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.fp.pipeline import register

__all__ = ["LANES", "KeyStore", "key_beat"]

LANES = 4
"""Keys a cycle."""


def key_beat(key_bits: int = 16) -> data.StructLayout:
    """Keys of the next four entries. `local`: the entry counts as having the largest key, whatever its own."""
    keys = data.ArrayLayout(key_bits, LANES)
    return data.StructLayout({"keys": keys, "local": LANES, "valid": LANES, "last": 1})


class KeyStore(wiring.Component):
    """Up to `entries` keys of `key_bits`.

    Members
    -------
    i : In, key_beat. write : In, the next beat is `i`.
    read : In, give the next beat. rewind : In, the next beat is the first. final : Out, the next beat is the last.
    o : Out, key_beat; what was written, or read: then `local` keys are the largest and `local` means nothing. Lanes are
        valid only in the cycle in which their beat comes.
    """

    #: Cycles from `write` or `read` to `o`.
    LATENCY = 2

    def __init__(self, entries: int, key_bits: int) -> None:
        self._beats, self._key_bits = entries // LANES, key_bits
        beat = key_beat(key_bits)
        super().__init__(
            {"i": In(beat), "write": In(1), "read": In(1), "rewind": In(1), "final": Out(1), "o": Out(beat)}
        )

    def elaborate(self, platform: object) -> Module:
        """The output register takes the beat that was written, or the memory's."""
        m = Module()
        m.submodules.memory = memory = Memory(shape=self._key_bits * LANES, depth=self._beats, init=[])
        write, read = memory.write_port(), memory.read_port()
        beat, final_beat, final_valid = Signal(range(self._beats)), Signal(range(self._beats)), Signal(LANES)
        # Cycle 0.
        m.d.comb += [self.final.eq(beat == final_beat), read.addr.eq(beat)]
        with m.If(self.rewind):
            m.d.sync += beat.eq(0)
        with m.Elif(self.write | self.read):
            m.d.sync += beat.eq(beat + 1)
        with m.If(self.write):
            m.d.sync += [final_beat.eq(beat), final_valid.eq(self.i.valid)]
        place, written, came, asked = (register(m, value) for value in (beat, self.i, self.write, self.read))
        valid = register(m, Mux(self.final, final_valid, C(-1, LANES)))
        # Cycle 1.
        m.d.comb += [write.addr.eq(place), write.en.eq(came)]
        o = Signal(key_beat(self._key_bits), reset_less=True)
        for lane, (key, local) in enumerate(zip(written.keys, written.local, strict=True)):
            part = slice(lane * self._key_bits, (lane + 1) * self._key_bits)
            m.d.comb += write.data[part].eq(key | local.replicate(self._key_bits))
            m.d.sync += o.keys[lane].eq(Mux(came, key, read.data[part]))
        m.d.sync += [
            o.local.eq(written.local),
            o.valid.eq(Mux(came, written.valid, valid & asked.replicate(LANES))),
        ]
        m.d.comb += self.o.eq(o)
        return m
