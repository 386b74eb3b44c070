"""Write arbiter: several AXI4 write masters share one port.

    port[0] AW ──┐                       port[0] W ──┐                     ┌──► port[0] B
    port[1] AW ──┴─ round robin ─► bus   port[1] W ──┴─ owner's ─► bus   B ┴──► port[1] B
                        └── owners, in order ───────────┴──────────────────────┘

Contract: every burst of every master goes out once; W carries the bursts' data in the order of their addresses;
responses, which come in order (one identifier), go back to the master whose burst they belong to. One that requests
waits for at most one burst of each other one. At most `max_outstanding` bursts are in flight. Reset needs a reset of
the slave too, for bursts may be in flight.

Timing: LATENCY cycle from a master's `awvalid` to that of the bus, one more until its data may pass, 0 cycles for W and
B; a burst a cycle; back-pressure: yes.
Limits: a master that does not give its data or take its responses blocks the others: the masters here have a burst's
data before they request.
Source: AMBA AXI specification, IHI 0022, clauses A3.2 (handshake) and A5 (ordering).
"""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.arbitration import owner_queue, share_address
from nearflash.gateware.bus.axi import Axi4WriteSignature

__all__ = ["WriteArbiter"]


class WriteArbiter(wiring.Component):
    """Round robin over write masters that use full beats in incrementing bursts, as BurstWriter does.

    Parameters
    ----------
    count : masters, at least 2.
    data_width_bits : 32, 64, 128, 256 or 512.
    max_outstanding : bursts in flight at most, at least 2.

    Members
    -------
    port : array of `count` In Axi4WriteSignature.
    bus : Out Axi4WriteSignature.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from `awvalid` of a port to that of the bus.
    LATENCY = 1

    def __init__(self, count: int, data_width_bits: int, *, max_outstanding: int = 16) -> None:
        self._data = owner_queue(count, max_outstanding)
        self._responses = owner_queue(count, max_outstanding)
        bus = Axi4WriteSignature(data_width_bits)
        super().__init__({"port": In(bus).array(count), "bus": Out(bus)})

    def elaborate(self, platform: object) -> Module:
        """One register between the masters' AW and the bus; queues of owners between AW and W, and AW and B."""
        m = Module()
        bus = self.bus
        m.submodules.data = data = self._data
        m.submodules.responses = responses = self._responses
        share_address(m, bus, self.port, "aw", [responses, data])

        # W: of the owner of the oldest burst whose data have not all gone. B: to the owner of the oldest one.
        for index, port in enumerate(self.port):
            sends = data.o.valid & (data.o.payload == index)
            waits = responses.o.valid & (responses.o.payload == index)
            m.d.comb += [
                port.wready.eq(bus.wready & sends),
                port.bvalid.eq(bus.bvalid & waits),
                port.bresp.eq(bus.bresp),
            ]
            with m.If(data.o.payload == index):
                m.d.comb += [
                    bus.wvalid.eq(port.wvalid & data.o.valid),
                    bus.wdata.eq(port.wdata),
                    bus.wstrb.eq(port.wstrb),
                    bus.wlast.eq(port.wlast),
                ]
            with m.If(responses.o.payload == index):
                m.d.comb += bus.bready.eq(port.bready & responses.o.valid)
        m.d.comb += [
            data.o.ready.eq(bus.wvalid & bus.wready & bus.wlast),
            responses.o.ready.eq(bus.bvalid & bus.bready),
        ]
        return m
