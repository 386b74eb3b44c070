"""The NAND PHY of a board without NAND: a bus whose pull-ups are all that there is.

It takes every cycle at once, swallows what is written, and reads all ones. So a status is "ready, failed", and a
request for a page ends with a fault instead of waiting for ever. Attention over pages in memory needs no NAND.

A board with NAND replaces this module by a PHY with the same ports (bitstreams/README.md lists them) and its pads.

Timing: a read's first beat comes in the cycle of its bus cycle; back-pressure: yes.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import wiring

from nearflash.gateware.nand.link import CycleKind, NandLinkSignature

__all__ = ["AbsentNand"]


class AbsentNand(wiring.Component):
    """The PHY's side of one NAND link.

    Members
    -------
    cycles, read, write : the PHY's side of NandLinkSignature.
    """

    def __init__(self) -> None:
        super().__init__({name: member.flip() for name, member in NandLinkSignature.members.items()})

    def elaborate(self, platform: object) -> Module:
        """A read or a write counts its beats; the cycle is taken with the last one."""
        m = Module()
        cycles, read, write = self.cycles, self.read, self.write
        moved = Signal.like(cycles.payload.beats)
        reads, writes, beat = Signal(), Signal(), Signal()
        m.d.comb += [
            reads.eq(cycles.valid & (cycles.payload.kind == CycleKind.READ)),
            writes.eq(cycles.valid & (cycles.payload.kind == CycleKind.WRITE)),
            read.payload.eq(-1),
            read.valid.eq(reads),
            write.ready.eq(writes),
            beat.eq((reads & read.ready) | (writes & write.valid)),
            cycles.ready.eq(Mux(reads | writes, beat & (moved + 1 == cycles.payload.beats), cycles.valid)),
        ]
        with m.If(beat):
            m.d.sync += moved.eq(Mux(cycles.ready, 0, moved + 1))
        return m
