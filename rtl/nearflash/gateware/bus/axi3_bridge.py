"""AXI4 to AXI3: a kernel's memory port in front of a processor system's slave port.

    port AR ─► PieceSplitter ─┬─► bus AR          port R ◄── last piece? ◄── bus R
                              └─► pieces ─────────────────────┘
    port AW ─► PieceSplitter ─┬─► bus AW
                              └─► lengths ─► port W ─► bus W ─► responses ─► port B ◄── bus B, the worst of all pieces

Contract: each burst of the AXI4 port becomes bursts of at most 16 beats to the same addresses, in order; it is answered
once, with the worst response of its parts. A burst above 4 GiB is answered with DECERR and never reaches the bus: its
address would be another one there. At most `max_outstanding` parts of each direction wait for responses. W does not
wait for AW (clause A3.3.1). Reset needs a reset of both sides.

Timing: LATENCY cycle from the port's address to the bus's; 0 cycles on W, B and R; a beat a cycle; back-pressure: yes.
Limits: incrementing bursts of full beats, as the masters of this package send; identifiers are 0.
Source: AMBA AXI specification, IHI 0022, chapters A3 to A5.
"""

from amaranth import Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import CACHE_NORMAL, Axi4Signature, AxiBurst, AxiResponse
from nearflash.gateware.bus.axi3 import Axi3Signature, BurstPiece, PieceSplitter
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["Axi3Bridge"]

_LENGTH = data.StructLayout({"length": 4, "final": 1, "outside": 1})
_RESPONSE = data.StructLayout({"final": 1, "outside": 1})


class Axi3Bridge(wiring.Component):
    """AXI4 slave, AXI3 master.

    Parameters
    ----------
    data_width_bits : 32, 64, 128, 256 or 512, of both sides.
    id_bits : identifier of the AXI3 side.
    max_outstanding : parts of bursts in flight in each direction, at least 2.

    Members
    -------
    port : In Axi4Signature.
    bus : Out Axi3Signature.
    """

    #: Cycles from the port's `arvalid` or `awvalid` to the bus's.
    LATENCY = PieceSplitter.LATENCY

    def __init__(self, data_width_bits: int, id_bits: int, *, max_outstanding: int = 8) -> None:
        self.data_width_bits, self.max_outstanding = data_width_bits, max_outstanding
        super().__init__(
            {"port": In(Axi4Signature(data_width_bits)), "bus": Out(Axi3Signature(data_width_bits, id_bits))}
        )

    def elaborate(self, platform: object) -> Module:
        """Reads and writes have nothing in common but the splitter's kind."""
        m = Module()
        for channel in ("ar", "aw"):
            m.d.comb += [
                getattr(self.bus, f"{channel}size").eq((self.data_width_bits // 8).bit_length() - 1),
                getattr(self.bus, f"{channel}burst").eq(AxiBurst.INCR),
                getattr(self.bus, f"{channel}cache").eq(CACHE_NORMAL),
            ]
        self._read(m)
        self._write(m)
        return m

    def _split(self, m: Module, channel: str) -> PieceSplitter:
        split = PieceSplitter(self.data_width_bits)
        m.submodules[f"split_{channel}"] = split
        port = {name: getattr(self.port, channel + name) for name in ("addr", "len", "valid", "ready")}
        m.d.comb += [
            split.i.payload.address.eq(port["addr"]),
            split.i.payload.length.eq(port["len"]),
            split.i.valid.eq(port["valid"]),
            port["ready"].eq(split.i.ready),
        ]
        return split

    def _read(self, m: Module) -> None:
        port, bus = self.port, self.bus
        split = self._split(m, "ar")
        m.submodules.pieces = pieces = StreamQueue(_LENGTH, self.max_outstanding)
        piece, head = split.o.payload, pieces.o.payload

        # AR: a piece goes out when there is a place to remember it in.
        m.d.comb += [
            bus.araddr.eq(piece.address),
            bus.arlen.eq(piece.length),
            bus.arvalid.eq(split.o.valid & ~piece.outside & pieces.i.ready),
            split.o.ready.eq(pieces.i.ready & (piece.outside | bus.arready)),
            pieces.i.valid.eq(split.o.valid & (piece.outside | bus.arready)),
            *(pieces.i.payload[name].eq(piece[name]) for name in ("length", "final", "outside")),
        ]

        # R: beats of the oldest piece, or as many errors in their place.
        index, last = Signal(4), Signal()
        m.d.comb += [
            last.eq(Mux(head.outside, index == head.length, bus.rlast)),
            port.rdata.eq(bus.rdata),
            port.rresp.eq(Mux(head.outside, AxiResponse.DECERR, bus.rresp)),
            port.rlast.eq(last & head.final),
            port.rvalid.eq(pieces.o.valid & (head.outside | bus.rvalid)),
            bus.rready.eq(pieces.o.valid & ~head.outside & port.rready),
            pieces.o.ready.eq(port.rvalid & port.rready & last),
        ]
        with m.If(pieces.o.valid & head.outside & port.rready):
            m.d.sync += index.eq(Mux(last, 0, index + 1))

    def _write(self, m: Module) -> None:
        port, bus = self.port, self.bus
        split = self._split(m, "aw")
        m.submodules.fork = fork = Fork(BurstPiece, 2)
        m.submodules.lengths = lengths = StreamQueue(_LENGTH, self.max_outstanding)
        m.submodules.responses = responses = StreamQueue(_RESPONSE, self.max_outstanding)
        wiring.connect(m, split.o, fork.i)
        to_address, to_data = fork.o

        # AW, and beside it what W and B need to know.
        piece = to_address.payload
        m.d.comb += [
            bus.awaddr.eq(piece.address),
            bus.awlen.eq(piece.length),
            bus.awvalid.eq(to_address.valid & ~piece.outside),
            to_address.ready.eq(piece.outside | bus.awready),
            lengths.i.valid.eq(to_data.valid),
            to_data.ready.eq(lengths.i.ready),
            *(lengths.i.payload[name].eq(to_data.payload[name]) for name in ("length", "final", "outside")),
        ]

        # W: the beats of a piece outside go nowhere. A piece that is sent has a place for its response.
        head, open_ = lengths.o.payload, Signal()
        index, sent = Signal(4), Signal()
        m.d.comb += [
            open_.eq(lengths.o.valid & responses.i.ready),
            bus.wdata.eq(port.wdata),
            bus.wstrb.eq(port.wstrb),
            bus.wlast.eq(index == head.length),
            bus.wvalid.eq(port.wvalid & open_ & ~head.outside),
            port.wready.eq(open_ & (head.outside | bus.wready)),
            sent.eq(port.wvalid & port.wready),
            lengths.o.ready.eq(sent & bus.wlast),
            responses.i.valid.eq(sent & bus.wlast),
            *(responses.i.payload[name].eq(head[name]) for name in ("final", "outside")),
        ]
        with m.If(sent):
            m.d.sync += index.eq(Mux(bus.wlast, 0, index + 1))
        self._respond(m, responses)

    def _respond(self, m: Module, responses: StreamQueue) -> None:
        """B: one response a burst, the worst of its pieces' (a larger code is a worse one)."""
        port, bus, owed = self.port, self.bus, responses.o.payload
        response, worst, seen = Signal(2), Signal(2), Signal(2)
        m.d.comb += [
            response.eq(Mux(owed.outside, AxiResponse.DECERR, bus.bresp)),
            worst.eq(Mux(response > seen, response, seen)),
            port.bresp.eq(worst),
            port.bvalid.eq(responses.o.valid & owed.final & (owed.outside | bus.bvalid)),
            bus.bready.eq(responses.o.valid & ~owed.outside & (~owed.final | port.bready)),
            responses.o.ready.eq((owed.outside | bus.bvalid) & (~owed.final | port.bready)),
        ]
        with m.If(responses.o.valid & responses.o.ready):
            m.d.sync += seen.eq(Mux(owed.final, 0, worst))
