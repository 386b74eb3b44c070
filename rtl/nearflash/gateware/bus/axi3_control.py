"""AXI3 to AXI4-Lite: a processor's general-purpose master in front of a kernel's register block.

Contract: each beat of a burst is one access, in order; its bytes are those of its strobes. Fixed and incrementing
bursts of up to 32-bit beats are done; a wrapping burst is answered with SLVERR, and one that begins or ends outside the
register block's window with DECERR, both without an access. Identifiers come back. One burst of each direction at a
time.

Timing: 2 cycles a read beat and 3 a written one, with a slave that responds in the cycle after the address, and 2 and 3
a burst; back-pressure: yes.
Limits: no exclusive accesses; the lock bits are ignored. A window is a power of two that is aligned to itself.
Source: AMBA AXI specification, IHI 0022, chapters A3, A7 and B1.
"""

from typing import Any

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import AxiBurst, AxiLiteSignature, AxiResponse
from nearflash.gateware.bus.axi3 import AXI3_ADDRESS_BITS, Axi3Signature

__all__ = ["Axi3ControlBridge"]


class Axi3ControlBridge(wiring.Component):
    """AXI3 slave of 32-bit data, AXI4-Lite master.

    Parameters
    ----------
    id_bits : identifier of the AXI3 side.
    base_address : where the window lies, a multiple of its size.
    address_bits : of the AXI4-Lite side; the window has 2**address_bits bytes.

    Members
    -------
    bus : In Axi3Signature(32, id_bits).
    port : Out AxiLiteSignature(address_bits).

    Raises
    ------
    ValueError : a base address that is not a multiple of the window, or not below 4 GiB.
    """

    def __init__(self, id_bits: int, base_address: int, address_bits: int) -> None:
        if base_address % (1 << address_bits) or not 0 <= base_address < 1 << AXI3_ADDRESS_BITS:
            raise ValueError(
                f"base_address must be a multiple of {1 << address_bits:#x} below 4 GiB, not {base_address:#x}"
            )
        self.base_address, self.address_bits = base_address, address_bits
        self._burst = data.StructLayout(
            {"id": id_bits, "address": AXI3_ADDRESS_BITS, "left": 4, "size": 2, "kind": AxiBurst, "error": AxiResponse}
        )
        super().__init__({"bus": In(Axi3Signature(32, id_bits)), "port": Out(AxiLiteSignature(address_bits))})

    def elaborate(self, platform: object) -> Module:
        """Two machines that do not know of each other."""
        m = Module()
        self._read(m)
        self._write(m)
        return m

    def _accept(self, m: Module, channel: str, burst: Any) -> None:
        """Keep a burst as it came: the processor's wires are long, so that nothing is computed of them."""
        address, length, size, kind, name = (
            getattr(self.bus, channel + member) for member in ("addr", "len", "size", "burst", "id")
        )
        m.d.sync += [
            burst.id.eq(name),
            burst.address.eq(address),
            burst.left.eq(length),
            burst.size.eq(size),
            burst.kind.eq(kind),
        ]

    def _check(self, m: Module, burst: Any) -> None:
        """Find the error that a kept burst is answered with: it is inside where it begins there and ends no later."""
        bits = self.address_bits
        # `last` has a carry above `bits`: a burst may not run over the end of the range.
        last = burst.address[:bits] + Mux(burst.kind == AxiBurst.FIXED, 0, burst.left << burst.size)
        inside = (burst.address[bits:] == self.base_address >> bits) & (last[bits:] == 0)
        m.d.sync += burst.error.eq(
            Mux(burst.kind == AxiBurst.WRAP, AxiResponse.SLVERR, Mux(inside, AxiResponse.OKAY, AxiResponse.DECERR))
        )

    def _step(self, m: Module, burst: Any) -> None:
        m.d.sync += burst.left.eq(burst.left - 1)
        with m.If(burst.kind != AxiBurst.FIXED):
            low = burst.address[: self.address_bits]
            m.d.sync += low.eq(low + (1 << burst.size))

    def _read(self, m: Module) -> None:
        bus, port = self.bus, self.port
        burst = Signal(self._burst, name="read")
        refused = Value.cast(burst.error) != 0
        m.d.comb += [
            port.araddr.eq(burst.address),
            bus.rid.eq(burst.id),
            bus.rdata.eq(Mux(refused, 0, port.rdata)),
            bus.rresp.eq(Mux(refused, burst.error, port.rresp)),
            bus.rlast.eq(burst.left == 0),
        ]
        with m.FSM(name="read_state"):
            with m.State("IDLE"):
                m.d.comb += bus.arready.eq(1)
                with m.If(bus.arvalid):
                    self._accept(m, "ar", burst)
                    m.next = "CHECK"
            with m.State("CHECK"):
                self._check(m, burst)
                m.next = "REQUEST"
            with m.State("REQUEST"):
                m.d.comb += port.arvalid.eq(~refused)
                with m.If(refused | port.arready):
                    m.next = "RESPOND"
            with m.State("RESPOND"):
                # A refused burst has its beats, too: AXI asks for all of them.
                m.d.comb += [bus.rvalid.eq(refused | port.rvalid), port.rready.eq(~refused & bus.rready)]
                with m.If(bus.rvalid & bus.rready):
                    self._step(m, burst)
                    m.next = "REQUEST"
                    with m.If(bus.rlast):
                        m.next = "IDLE"

    def _write(self, m: Module) -> None:
        bus, port = self.bus, self.port
        burst = Signal(self._burst, name="write")
        refused = Value.cast(burst.error) != 0
        worst, address_sent, data_sent = Signal(2), Signal(), Signal()
        m.d.comb += [port.awaddr.eq(burst.address), bus.bid.eq(burst.id), bus.bresp.eq(worst)]
        with m.FSM(name="write_state"):
            with m.State("IDLE"):
                m.d.comb += bus.awready.eq(1)
                with m.If(bus.awvalid):
                    self._accept(m, "aw", burst)
                    m.next = "CHECK"
            with m.State("CHECK"):
                self._check(m, burst)
                m.next = "DATA"
            with m.State("DATA"):
                m.d.comb += bus.wready.eq(1)
                m.d.sync += [port.wdata.eq(bus.wdata), port.wstrb.eq(bus.wstrb), address_sent.eq(0), data_sent.eq(0)]
                with m.If(bus.wvalid):
                    m.next = "WRITE"
            with m.State("WRITE"):
                # Two channels, taken in any order: each is offered until it was taken, and never again.
                m.d.comb += [port.awvalid.eq(~refused & ~address_sent), port.wvalid.eq(~refused & ~data_sent)]
                with m.If(port.awready):
                    m.d.sync += address_sent.eq(1)
                with m.If(port.wready):
                    m.d.sync += data_sent.eq(1)
                with m.If(refused | ((address_sent | port.awready) & (data_sent | port.wready))):
                    m.next = "RESPONSE"
            with m.State("RESPONSE"):
                response = Mux(refused, burst.error, port.bresp)
                # The port answers each word: without its response the next one may not go.
                m.d.comb += port.bready.eq(~refused)
                with m.If(refused | port.bvalid):
                    self._step(m, burst)
                    # One response for the whole burst: the worst one, by AXI's numbers.
                    m.d.sync += worst.eq(Mux(response > worst, response, worst))
                    m.next = "DATA"
                    with m.If(burst.left == 0):
                        m.next = "RESPOND"
            with m.State("RESPOND"):
                m.d.comb += bus.bvalid.eq(1)
                with m.If(bus.bready):
                    m.d.sync += worst.eq(0)
                    m.next = "IDLE"
