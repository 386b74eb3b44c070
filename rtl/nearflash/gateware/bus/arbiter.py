"""Read arbiter: several AXI4 read masters share one port.

    port[0] AR ──┐                            ┌──► port[0] R
    port[1] AR ──┴─ round robin ─► bus   R ───┴──► port[1] R
                        └──── owners, in order ────┘

Contract: every burst of every master goes out once; responses, which come in order (one identifier), go back to the
master whose burst they belong to. A master that requests waits for at most one burst of each other one. At most
`max_outstanding` bursts are in flight. Reset needs a reset of the slave too, for beats may be in flight.

Timing: LATENCY cycle from a master's `arvalid` to that of the bus, one more until its beats may pass, 0 cycles for R; a
burst a cycle; back-pressure: yes.
Limits: a master that does not take its beats blocks the others: the masters here have room for what they request.
Source: AMBA AXI specification, IHI 0022, clauses A3.2 (handshake) and A5 (ordering).
"""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.arbitration import owner_queue, share_address
from nearflash.gateware.bus.axi import Axi4ReadSignature

__all__ = ["ReadArbiter"]


class ReadArbiter(wiring.Component):
    """Round robin over read masters that use full beats in incrementing bursts, as BurstReader does.

    Parameters
    ----------
    count : masters, at least 2.
    data_width_bits : 32, 64, 128, 256 or 512.
    max_outstanding : bursts in flight at most, at least 2.

    Members
    -------
    port : array of `count` In Axi4ReadSignature.
    bus : Out Axi4ReadSignature.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from `arvalid` of a port to that of the bus.
    LATENCY = 1

    def __init__(self, count: int, data_width_bits: int, *, max_outstanding: int = 16) -> None:
        self._owners = owner_queue(count, max_outstanding)
        bus = Axi4ReadSignature(data_width_bits)
        super().__init__({"port": In(bus).array(count), "bus": Out(bus)})

    def elaborate(self, platform: object) -> Module:
        """One register between the masters' AR and the bus; a queue of owners between AR and R."""
        m = Module()
        bus = self.bus
        m.submodules.owners = owners = self._owners
        share_address(m, bus, self.port, "ar", [owners])

        # R: to the owner of the oldest burst.
        for index, port in enumerate(self.port):
            answered = owners.o.payload == index
            m.d.comb += [
                port.rvalid.eq(bus.rvalid & owners.o.valid & answered),
                port.rdata.eq(bus.rdata),
                port.rresp.eq(bus.rresp),
                port.rlast.eq(bus.rlast),
            ]
            with m.If(answered):
                m.d.comb += bus.rready.eq(port.rready & owners.o.valid)
        m.d.comb += owners.o.ready.eq(bus.rvalid & bus.rready & bus.rlast)
        return m
