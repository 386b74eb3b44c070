"""An AXI4 read slave in gateware, so that a component with a memory port runs in the stream harness as it is."""

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In

from nearflash.gateware.bus.axi import AxiResponse
from nearflash.gateware.bus.transfer import Burst
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["WithMemory"]


class WithMemory(wiring.Component):
    """`component` with its Axi4Read `bus` tied to a memory; all other members are its own.

    Parameters
    ----------
    component : has an Out member `bus`, an Axi4ReadSignature.
    words : contents, one integer a beat, from address 0; addresses wrap at their number, which is a power of two.
    latency_cycles : from a burst's address to its first beat.
    pause : one beat in `pause` waits for a cycle; 0: none does.
    bad_address : bursts from this byte address on are answered with SLVERR.
    """

    def __init__(
        self,
        component: Any,
        words: Sequence[int],
        *,
        latency_cycles: int = 4,
        pause: int = 0,
        bad_address: int | None = None,
    ) -> None:
        if len(words).bit_count() != 1:
            raise ValueError(f"words must be a power of two in number, not {len(words)!r}")
        self.component, self.words = component, words
        self.latency_cycles, self.pause, self.bad_address = latency_cycles, pause, bad_address
        super().__init__({name: member for name, member in component.signature.members.items() if name != "bus"})

    def elaborate(self, platform: object) -> Module:
        """Bursts wait in a queue; the oldest one counts its latency, then its beats."""
        m = Module()
        m.submodules.component = inner = self.component
        bus = inner.bus
        width = len(bus.rdata)
        byte_bits = (width // 8).bit_length() - 1
        m.submodules.bursts = bursts = StreamQueue(Burst, 16)
        m.submodules.memory = memory = Memory(shape=width, depth=len(self.words), init=self.words)
        port = memory.read_port(domain="comb")
        beat, waited, phase = Signal(8), Signal(range(self.latency_cycles + 2)), Signal(8)
        burst, ready = bursts.o.payload, Signal()

        for name, member in self.signature.members.items():
            pairs = [(getattr(self, name), getattr(inner, name))]
            if member.dimensions:
                pairs = list(zip(*pairs[0], strict=True))
            for outer, own in pairs:
                if member.is_signature:
                    wiring.connect(m, wiring.flipped(outer), own)
                else:
                    m.d.comb += own.eq(outer) if member.flow is In else outer.eq(own)
        m.d.comb += [
            bursts.i.valid.eq(bus.arvalid),
            bus.arready.eq(bursts.i.ready),
            bursts.i.payload.address.eq(bus.araddr),
            bursts.i.payload.length.eq(bus.arlen),
            port.addr.eq((burst.address >> byte_bits) + beat),
            bus.rdata.eq(port.data),
            bus.rlast.eq(beat == burst.length),
            ready.eq((waited >= self.latency_cycles) & (phase != 1 if self.pause else 1)),
            bus.rvalid.eq(bursts.o.valid & ready),
            bursts.o.ready.eq(bus.rvalid & bus.rready & bus.rlast),
        ]
        if self.bad_address is not None:
            bad = burst.address >= self.bad_address
            m.d.comb += bus.rresp.eq(Mux(bad, AxiResponse.SLVERR, AxiResponse.OKAY))
        if self.pause:
            m.d.sync += phase.eq(Mux(phase == self.pause, 0, phase + 1))
        with m.If(bursts.o.ready):
            m.d.sync += [beat.eq(0), waited.eq(0)]
        with m.Elif(bus.rvalid & bus.rready):
            m.d.sync += beat.eq(beat + 1)
        with m.Elif(bursts.o.valid & ~ready & (waited < self.latency_cycles)):
            m.d.sync += waited.eq(waited + 1)
        return m
