"""AXI3 buffer: registers between a master and the ports of a processor system, whose wires are long.

Contract: every channel carries what it carried, in order. No output depends on an input of the same cycle.

Timing: latency LATENCY cycle on every channel; W and R: a beat a cycle; AW, AR and B: an item every two cycles;
back-pressure: yes.
Limits: identifiers are 0, and size, burst, lock, cache and protection of an address must not change: they pass by.
Source: AMBA AXI specification, IHI 0022, clause A3.2.1 (a valid may not wait for its ready).
"""

from collections.abc import Sequence

from amaranth import Module
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi3 import AXI3_ADDRESS_BITS, Axi3Signature
from nearflash.gateware.stream.half import HalfBuffer
from nearflash.gateware.stream.skid import SkidBuffer

__all__ = ["Axi3Buffer"]

_CONSTANT = ("id", "size", "burst", "lock", "cache", "prot")


class Axi3Buffer(wiring.Component):
    """AXI3 slave, AXI3 master.

    Parameters
    ----------
    data_width_bits : of both sides.
    id_bits : of both sides.

    Members
    -------
    port : In Axi3Signature, where the master is.
    bus : Out Axi3Signature.
    """

    #: Cycles from a transfer on one side to the same on the other.
    LATENCY = 1

    def __init__(self, data_width_bits: int, id_bits: int) -> None:
        self.data_width_bits = data_width_bits
        signature = Axi3Signature(data_width_bits, id_bits)
        super().__init__({"port": In(signature), "bus": Out(signature)})

    def elaborate(self, platform: object) -> Module:
        """A buffer for each channel, of the members that change."""
        m = Module()
        address = {"addr": AXI3_ADDRESS_BITS, "len": 4}
        beat = {"data": self.data_width_bits, "last": 1}
        strobes = {"strb": self.data_width_bits // 8}
        for channel in ("ar", "aw"):
            m.submodules[channel] = buffer = HalfBuffer(data.StructLayout(address))
            self._connect(m, buffer, channel, ["addr", "len"])
            m.d.comb += [getattr(self.bus, channel + name).eq(getattr(self.port, channel + name)) for name in _CONSTANT]
        m.submodules.w = buffer = SkidBuffer(data.StructLayout({**beat, **strobes}))
        self._connect(m, buffer, "w", ["data", "last", "strb"])
        m.submodules.r = buffer = SkidBuffer(data.StructLayout({**beat, "resp": 2}))
        self._connect(m, buffer, "r", ["data", "last", "resp"])
        m.submodules.b = buffer = HalfBuffer(data.StructLayout({"resp": 2}))
        self._connect(m, buffer, "b", ["resp"])
        return m

    def _connect(self, m: Module, buffer: HalfBuffer | SkidBuffer, channel: str, names: Sequence[str]) -> None:
        """A channel over its buffer: addresses and W from the port to the bus, R and B back."""
        source, sink = (self.bus, self.port) if channel in ("r", "b") else (self.port, self.bus)
        m.d.comb += [
            buffer.i.valid.eq(getattr(source, f"{channel}valid")),
            getattr(source, f"{channel}ready").eq(buffer.i.ready),
            getattr(sink, f"{channel}valid").eq(buffer.o.valid),
            buffer.o.ready.eq(getattr(sink, f"{channel}ready")),
            *(buffer.i.payload[name].eq(getattr(source, channel + name)) for name in names),
            *(getattr(sink, channel + name).eq(buffer.o.payload[name]) for name in names),
        ]
