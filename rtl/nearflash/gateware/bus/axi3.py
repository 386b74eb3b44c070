"""AXI3 wiring signature, for the processor systems whose ports are older than AXI4 (Zynq-7000).

What differs from AXI4: bursts of at most 16 beats, 32-bit addresses here, an identifier on W, and two bits of lock. All
identifiers that a master here sends are 0, so responses come in order and W is never interleaved.

Source: AMBA AXI specification, IHI 0022, chapters A2 to A5; AMD UG585, table "PS-PL AXI interface signals".
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import ADDRESS_BITS

__all__ = ["AXI3_ADDRESS_BITS", "AXI3_BEATS_MAX", "Axi3Signature", "BurstPiece", "PieceSplitter"]

#: Width of an address of a Zynq-7000.
AXI3_ADDRESS_BITS = 32
#: Longest burst of AXI3 (clause A3.4.1).
AXI3_BEATS_MAX = 16


class Axi3Signature(wiring.Signature):
    """An AXI3 master with `data_width_bits` of data and `id_bits` of identifier."""

    def __init__(self, data_width_bits: int, id_bits: int) -> None:
        address = {"id": id_bits, "addr": AXI3_ADDRESS_BITS, "len": 4, "size": 3, "burst": 2, "lock": 2, "cache": 4,
                   "prot": 3, "valid": 1}  # fmt: skip
        members = {
            **{f"{channel}{name}": Out(width) for channel in ("aw", "ar") for name, width in address.items()},
            **{f"{channel}ready": In(1) for channel in ("aw", "ar", "w")},
            "wid": Out(id_bits), "wdata": Out(data_width_bits), "wstrb": Out(data_width_bits // 8), "wlast": Out(1),
            "wvalid": Out(1),
            "bid": In(id_bits), "bresp": In(2), "bvalid": In(1), "bready": Out(1),
            "rid": In(id_bits), "rdata": In(data_width_bits), "rresp": In(2), "rlast": In(1), "rvalid": In(1),
            "rready": Out(1),
        }  # fmt: skip
        super().__init__(members)


class BurstPiece(data.Struct):
    """A part of an AXI4 burst: `length` + 1 beats at `address`; `final` is its last part, `outside` none of AXI3's."""

    address: AXI3_ADDRESS_BITS
    length: 4
    final: 1
    outside: 1


class PieceSplitter(wiring.Component):
    """Split AXI4 bursts of full beats into pieces of at most 16 beats, in order.

    A burst above 4 GiB gives pieces that are `outside`: they must not go out, for their address has no upper bits.

    Timing: latency LATENCY cycle; a piece a cycle, then one cycle until the next burst; back-pressure: yes.

    Parameters
    ----------
    data_width_bits : width of a beat, a power of two of at least 8.

    Members
    -------
    i : In stream of struct {address: 64, length: 8}, bursts of `length` + 1 beats.
    o : Out stream of `BurstPiece`.
    """

    #: Cycles from a burst on `i` to its first piece on `o`.
    LATENCY = 1

    def __init__(self, data_width_bits: int) -> None:
        self.piece_bytes = AXI3_BEATS_MAX * data_width_bits // 8
        burst = data.StructLayout({"address": ADDRESS_BITS, "length": 8})
        super().__init__({"i": In(stream.Signature(burst)), "o": Out(stream.Signature(BurstPiece))})

    def elaborate(self, platform: object) -> Module:
        """The low bits of the address inside a piece never change: only the pieces are counted."""
        m = Module()
        burst = self.i.payload
        shift = self.piece_bytes.bit_length() - 1
        low, high = Signal(shift), Signal(AXI3_ADDRESS_BITS - shift)
        left, busy, outside = Signal(8), Signal(), Signal()  # beats left but one
        piece = self.o.payload
        m.d.comb += [
            self.i.ready.eq(~busy),
            self.o.valid.eq(busy),
            piece.address.eq(Cat(low, high)),
            piece.final.eq(left[4:] == 0),
            piece.length.eq(left[:4] | ~piece.final.replicate(4)),
            piece.outside.eq(outside),
        ]
        with m.If(self.o.ready & busy):
            m.d.sync += [high.eq(high + 1), left[4:].eq(left[4:] - 1)]
            with m.If(piece.final):
                m.d.sync += busy.eq(0)
        with m.If(self.i.valid & ~busy):
            m.d.sync += [
                busy.eq(1),
                Cat(low, high).eq(burst.address),
                left.eq(burst.length),
                outside.eq(burst.address[AXI3_ADDRESS_BITS:].any()),
            ]
        return m
