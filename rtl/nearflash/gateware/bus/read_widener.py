"""Read widener: a read master of narrow beats on a wide port.

    port AR ──► whole wide beats ──► bus AR        bus R ──► lane ──► port R
                     └──────── lane, beats: bursts in order ───▲

Contract: every burst goes out once, as the wide beats that hold its bytes; of each the beats that were asked for leave,
in order, with the wide beat's response. At most `max_outstanding` + 1 bursts are in flight. Reset needs a reset of the
slave too, for beats may be in flight.

Timing: LATENCY cycles for AR, 0 for R, one from a burst's AR to its first beat on R at least; a narrow beat a cycle;
back-pressure: yes.
Limits: incrementing bursts of full beats, as BurstReader's; a page of 4,096 bytes has whole wide beats, so that no
burst crosses one.
Source: AMBA AXI specification, IHI 0022, clauses A3.4.1 (bursts) and A5 (ordering).
"""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.transfer import Burst, drive_address
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["ReadWidener"]


class ReadWidener(wiring.Component):
    """Between a read master and a wider port.

    Parameters
    ----------
    narrow_bits : of the master's beats. wide_bits : of the port's, larger.
    max_outstanding : bursts that wait behind the one that is answered at most, at least 2.

    Members
    -------
    port : In Axi4ReadSignature, `narrow_bits`. bus : Out Axi4ReadSignature, `wide_bits`.

    Raises
    ------
    ValueError : the port is not wider.
    """

    #: Cycles from `arvalid` of the port to that of the bus.
    LATENCY = 0

    def __init__(self, narrow_bits: int, wide_bits: int, *, max_outstanding: int = 16) -> None:
        if wide_bits <= narrow_bits:
            raise ValueError(f"wide_bits must be more than the {narrow_bits} of the master, not {wide_bits!r}")
        self.narrow_bits, self.max_outstanding = narrow_bits, max_outstanding
        self.lanes_log2 = (wide_bits // narrow_bits).bit_length() - 1
        super().__init__({"port": In(Axi4ReadSignature(narrow_bits)), "bus": Out(Axi4ReadSignature(wide_bits))})

    def elaborate(self, platform: object) -> Module:
        """AR as it comes; R by a count of lanes and one of beats that are left."""
        m = Module()
        port, bus = self.port, self.bus
        first_bit = (self.narrow_bits // 8).bit_length() - 1
        entry = data.StructLayout({"lane": self.lanes_log2, "left": 8})
        m.submodules.bursts = bursts = StreamQueue(entry, self.max_outstanding)
        first, wide = Signal(self.lanes_log2), Signal(Burst)
        m.d.comb += [
            first.eq(port.araddr >> first_bit),
            # The lanes before the first one count: the last beat's place gives the number of wide beats.
            wide.length.eq((first + port.arlen) >> self.lanes_log2),
            wide.address.eq(Cat(Const(0, first_bit + self.lanes_log2), port.araddr[first_bit + self.lanes_log2 :])),
            bus.arvalid.eq(port.arvalid & bursts.i.ready),
            port.arready.eq(bus.arready & bursts.i.ready),
            bursts.i.valid.eq(port.arvalid & bus.arready),
            bursts.i.payload.lane.eq(first),
            bursts.i.payload.left.eq(port.arlen),
        ]
        drive_address(m, bus, "ar", wide)

        lane, left, open_burst = Signal(self.lanes_log2), Signal(8), Signal()
        taken, last, load = Signal(), Signal(), Signal()
        m.d.comb += [
            last.eq(left == 0),
            port.rvalid.eq(bus.rvalid & open_burst),
            port.rdata.eq(bus.rdata.word_select(lane, self.narrow_bits)),
            port.rresp.eq(bus.rresp),
            port.rlast.eq(last),
            taken.eq(port.rvalid & port.rready),
            bus.rready.eq(port.rready & open_burst & (lane.all() | last)),
            load.eq(~open_burst | (taken & last)),
            bursts.o.ready.eq(load),
        ]
        with m.If(load):
            m.d.sync += [open_burst.eq(bursts.o.valid), Cat(lane, left).eq(bursts.o.payload.as_value())]
        with m.Elif(taken):
            m.d.sync += [lane.eq(lane + 1), left.eq(Mux(last, 0, left - 1))]
        return m
