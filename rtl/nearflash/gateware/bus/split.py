"""Burst splitter: one command of any number of beats becomes AXI4 bursts.

Contract: the bursts cover the command's beats in order, without gap or overlap. No burst crosses a multiple of the
block, min(max_burst_bytes, 256 beats), which divides 4 KB: so none crosses a 4 KB boundary and none exceeds 256 beats.
A command of 0 beats gives no burst. Reset drops a command that has begun.

Timing: latency LATENCY cycles; one burst every 2 cycles; back-pressure: yes. o.valid and o.payload come from registers.
Limits: the low bits of the address that select a byte inside a beat are ignored. Addresses wrap at 2**64.
Source: AMBA AXI specification, IHI 0022, clause A3.4.1.
"""

from amaranth import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import ADDRESS_BITS, PAGE_BYTES
from nearflash.gateware.bus.transfer import Burst, TransferCommand

__all__ = ["BURST_BEATS_MAX", "BurstSplitter", "block_beats", "queue_places"]

#: Longest incrementing burst of AXI4.
BURST_BEATS_MAX = 256


def block_beats(data_width_bits: int, max_burst_bytes: int) -> int:
    """Beats of the longest burst, which is also the alignment at which commands are split.

    Raises ValueError unless `max_burst_bytes` is a power of two from one beat to 4,096.
    """
    beat_bytes = data_width_bits // 8
    if max_burst_bytes.bit_count() != 1 or not beat_bytes <= max_burst_bytes <= PAGE_BYTES:
        raise ValueError(
            f"max_burst_bytes must be a power of two from {beat_bytes} to {PAGE_BYTES}, not {max_burst_bytes!r}"
        )
    return min(max_burst_bytes // beat_bytes, BURST_BEATS_MAX)


def queue_places(burst_beats: int, max_outstanding: int, queue_beats: int | None) -> int:
    """Places in the data queue of a reader or writer: as requested, or one more than all bursts in flight.

    Raises ValueError for fewer than two bursts in flight, or a queue that does not hold more than one.
    """
    if max_outstanding < 2:
        raise ValueError(f"max_outstanding must be at least 2 bursts, not {max_outstanding!r}")
    if queue_beats is not None and queue_beats <= burst_beats:
        raise ValueError(f"queue_beats must be more than {burst_beats}, one burst, not {queue_beats!r}")
    return max_outstanding * burst_beats + 1 if queue_beats is None else queue_beats


class BurstSplitter(wiring.Component):
    """Split transfer commands at multiples of `block_beats`.

    Parameters
    ----------
    data_width_bits : width of a beat, a power of two of at least 8.
    max_burst_bytes : limit of a burst, a power of two from one beat to 4,096.

    Members
    -------
    i : In stream of `TransferCommand`.
    o : Out stream of `Burst`.
    idle : Out, no command is inside and no burst waits on o.

    Attributes
    ----------
    block_beats : beats of the longest burst.
    beat_bytes : bytes of a beat.

    Raises
    ------
    ValueError : `max_burst_bytes` is not in its range.
    """

    #: Cycles from a command on `i` to its first burst on `o`.
    LATENCY = 3

    def __init__(self, data_width_bits: int, max_burst_bytes: int = PAGE_BYTES) -> None:
        self.block_beats = block_beats(data_width_bits, max_burst_bytes)
        self.beat_bytes = data_width_bits // 8
        super().__init__(
            {
                "i": In(stream.Signature(TransferCommand)),
                "o": Out(stream.Signature(Burst)),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Only a command's first burst can begin inside a block, so the address needs no adder, just a block count."""
        m = Module()
        byte_bits = self.beat_bytes.bit_length() - 1
        offset_bits = self.block_beats.bit_length() - 1
        block = Signal(ADDRESS_BITS - offset_bits - byte_bits)
        offset = Signal(offset_bits)  # beats from the start of the block
        left_beats = Signal(32)
        changed = Signal()  # left_beats is new
        some = Signal()  # there are some, which takes a cycle to see
        rest = Signal(signed(33))  # beats behind the end of the block; negative when the command ends before it
        step = Signal()

        # Cycle 0: take a command. Cycle 1: see whether beats are left.
        taken = self.i.ready & self.i.valid
        m.d.comb += [self.i.ready.eq(~changed & ~some), self.idle.eq(self.i.ready & ~self.o.valid)]
        m.d.sync += changed.eq(taken | step)
        with m.If(taken):
            address = self.i.payload.address
            m.d.sync += [
                offset.eq(address[byte_bits:]),
                block.eq(address[byte_bits + offset_bits :]),
                left_beats.eq(self.i.payload.beats),
            ]
        with m.If(changed):
            m.d.sync += some.eq(left_beats != 0)

        # Cycle 2: cut a burst off the front.
        m.d.comb += [
            rest.eq(left_beats + Cat(offset, 1).as_signed()),  # offset - block_beats in two's complement
            step.eq(some & ~changed & ~self.o.valid),
        ]
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(step):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.address.eq(Cat(Const(0, byte_bits), offset, block)),
                self.o.payload.length.eq(Mux(rest < 0, left_beats - 1, ~offset)),
                left_beats.eq(Mux(rest < 0, 0, rest)),
                block.eq(block + 1),
                offset.eq(0),
            ]
        return m
