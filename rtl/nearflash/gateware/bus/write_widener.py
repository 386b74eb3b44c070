"""Write widener: a write master of narrow beats on a wide port.

    port AW ──► whole wide beats ──► queue ──► bus AW
                     └─ lane, beats: bursts in order ─┐
    port W  ──────────────────────────────────────► lanes of a register ──► bus W        bus B ──► port B

Contract: every burst goes out once, as the wide beats that hold its bytes, with the strobes of the lanes that it has.
W waits for no AW of the bus (clause A3.3.1). At most `max_outstanding` bursts wait for their beats. Responses pass.

Timing: LATENCY cycle from AW to AW; a narrow beat a cycle, the wide beat in the cycle after its last lane;
back-pressure: yes.
Limits: incrementing bursts of full beats, as BurstWriter's; a page of 4,096 bytes has whole wide beats, so that no
burst crosses one.
Source: AMBA AXI specification, IHI 0022, clauses A3.4.1 (bursts), A3.4.3 (strobes) and A5 (ordering).
"""

from amaranth import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import Axi4WriteSignature
from nearflash.gateware.bus.transfer import Burst, drive_address
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["WriteWidener"]


class WriteWidener(wiring.Component):
    """Between a write master and a wider port.

    Parameters
    ----------
    narrow_bits : of the master's beats. wide_bits : of the port's, larger.
    max_outstanding : bursts whose beats have not come at most, at least 2.

    Members
    -------
    port : In Axi4WriteSignature, `narrow_bits`. bus : Out Axi4WriteSignature, `wide_bits`.

    Raises
    ------
    ValueError : the port is not wider.
    """

    #: Cycles from `awvalid` of the port to that of the bus.
    LATENCY = 1

    def __init__(self, narrow_bits: int, wide_bits: int, *, max_outstanding: int = 8) -> None:
        if wide_bits <= narrow_bits:
            raise ValueError(f"wide_bits must be more than the {narrow_bits} of the master, not {wide_bits!r}")
        self.narrow_bits, self.max_outstanding = narrow_bits, max_outstanding
        self.lanes_log2 = (wide_bits // narrow_bits).bit_length() - 1
        super().__init__({"port": In(Axi4WriteSignature(narrow_bits)), "bus": Out(Axi4WriteSignature(wide_bits))})

    def elaborate(self, platform: object) -> Module:
        """AW through a queue; W into a register, lane by lane; B as it comes."""
        m = Module()
        port, bus = self.port, self.bus
        first_bit = (self.narrow_bits // 8).bit_length() - 1
        entry = data.StructLayout({"lane": self.lanes_log2, "left": 8})
        m.submodules.addresses = addresses = StreamQueue(Burst, self.max_outstanding)
        m.submodules.bursts = bursts = StreamQueue(entry, self.max_outstanding)
        first, wide = Signal(self.lanes_log2), addresses.i.payload
        m.d.comb += [
            first.eq(port.awaddr >> first_bit),
            # The lanes before the first one count: the last beat's place gives the number of wide beats.
            wide.length.eq((first + port.awlen) >> self.lanes_log2),
            wide.address.eq(Cat(Const(0, first_bit + self.lanes_log2), port.awaddr[first_bit + self.lanes_log2 :])),
            port.awready.eq(addresses.i.ready & bursts.i.ready),
            addresses.i.valid.eq(port.awvalid & bursts.i.ready),
            bursts.i.valid.eq(port.awvalid & addresses.i.ready),
            bursts.i.payload.lane.eq(first),
            bursts.i.payload.left.eq(port.awlen),
            bus.awvalid.eq(addresses.o.valid),
            addresses.o.ready.eq(bus.awready),
            port.bvalid.eq(bus.bvalid),
            port.bresp.eq(bus.bresp),
            bus.bready.eq(port.bready),
        ]
        drive_address(m, bus, "aw", addresses.o.payload)
        self._fill(m, bursts)
        return m

    def _fill(self, m: Module, bursts: StreamQueue) -> None:
        """Narrow beats go to their lanes; a wide beat leaves when its last lane, or its burst's last beat, is there."""
        port, bus = self.port, self.bus
        lane, left, open_burst = Signal(self.lanes_log2), Signal(8), Signal()
        fresh = Signal(init=1)  # the register's lanes are those of a beat that has left, or of none
        taken, last, load = Signal(), Signal(), Signal()
        strobes = Mux(fresh, 0, bus.wstrb)
        own = port.wstrb << (lane << (len(port.wstrb).bit_length() - 1))
        m.d.comb += [
            last.eq(left == 0),
            port.wready.eq(open_burst & (~bus.wvalid | bus.wready)),
            taken.eq(port.wvalid & port.wready),
            load.eq(~open_burst | (taken & last)),
            bursts.o.ready.eq(load),
        ]
        with m.If(bus.wready):
            m.d.sync += bus.wvalid.eq(0)
        with m.If(taken):
            m.d.sync += [
                bus.wdata.word_select(lane, self.narrow_bits).eq(port.wdata),
                bus.wstrb.eq(strobes | own),
                bus.wvalid.eq(lane.all() | last),
                bus.wlast.eq(last),
                fresh.eq(lane.all() | last),
            ]
        with m.If(load):
            m.d.sync += [open_burst.eq(bursts.o.valid), Cat(lane, left).eq(bursts.o.payload.as_value())]
        with m.Elif(taken):
            m.d.sync += [lane.eq(lane + 1), left.eq(left - 1)]
