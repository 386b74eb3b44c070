"""EntryStore: entries in block RAM, four a line; written by the scorer while a selection reads.

Timing: latency LATENCY cycles from `address` to `o`; a line written and one read a cycle.
"""

from amaranth import Module
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.select.entry import ENTRY, EntryRow
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.fp.pipeline import register

__all__ = ["EntryStore"]


class EntryStore(wiring.Component):
    """`lines` lines.

    Members
    -------
    i : In, EntryRow: the entries in `mask` are written if `write`.
    address : In. o : Out, four ENTRY, LATENCY cycles later.
    """

    #: Cycles from `address` to `o`.
    LATENCY = 2

    def __init__(self, lines: int) -> None:
        self._lines = lines
        super().__init__(
            {
                "i": In(EntryRow),
                "write": In(1),
                "address": In(range(lines)),
                "o": Out(data.ArrayLayout(ENTRY, LANES)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A memory a lane; the memories' outputs are registered."""
        m = Module()
        for lane in range(LANES):
            bank = m.submodules[f"bank_{lane}"] = Memory(shape=ENTRY.size, depth=self._lines, init=[])
            write, read = bank.write_port(), bank.read_port()
            m.d.comb += [
                write.addr.eq(self.i.address),
                write.data.eq(self.i.entries[lane]),
                write.en.eq(self.write & self.i.mask[lane]),
                read.addr.eq(self.address),
                self.o[lane].eq(register(m, read.data)),
            ]
        return m
