"""Burst writer: AXI4 write master that turns transfer commands and a stream of beats into bursts.

    i ──► block RAM queue ───────────────────────────► W
               │ beats not yet promised      lengths ──┘ ▲
    i_command ─┴─► BurstSplitter ─► whole burst there? ──┴─► AW; burst addresses ──► error ◄── B

Contract: the beats of `i` go, in order, to the addresses of the commands, in order. A burst begins only when all of its
beats are in the queue, so W never makes the bus wait. W does not wait for AW's ready (clause A3.3.1). At most
`max_outstanding` bursts wait for a response. `idle` rises only after the last one. Beats without a command wait in
the queue. Reset needs a reset of the slave too, for bursts may be in flight.

Timing: LATENCY cycles from the last beat of a command's first burst to `awvalid` when the command came before; one beat
a cycle as long as the slave responds within max_outstanding bursts; one burst every 3 cycles; back-pressure: yes.
Limits: full beats only, with byte strobes; the bits of the address inside a beat are ignored.
Source: AMBA AXI specification, IHI 0022, chapters A3 and A5.
"""

from typing import Any

from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import ADDRESS_BITS, PAGE_BYTES, Axi4WriteSignature
from nearflash.gateware.bus.split import BurstSplitter, block_beats, queue_places
from nearflash.gateware.bus.transfer import Burst, BusError, TransferCommand, drive_address, latch_error, subtract_beats
from nearflash.gateware.stream.fork import Fork
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["BurstWriter", "WriteEvents"]


class WriteEvents(data.Struct):
    """Events of this cycle, for counters.

    A beat left; AW waits for the slave; W waits for the slave; a burst waits for its beats from the producer.
    """

    beat: 1
    wait_address: 1
    wait_data: 1
    wait_producer: 1


class BurstWriter(wiring.Component):
    """AXI4 write master.

    Parameters
    ----------
    data_width_bits : 32, 64, 128, 256 or 512.
    max_outstanding : bursts without a response at most, at least 2.
    max_burst_bytes : longest burst, a power of two up to 4,096; 256 beats limit it too. AXI3 slaves: 16 beats.
    queue_beats : places in the data queue, more than one burst; None: one more than max_outstanding bursts.

    Members
    -------
    i_command : In stream of `TransferCommand`.
    i : In stream of struct {data: data_width_bits, strb: data_width_bits / 8}.
    bus : Out `Axi4WriteSignature`.
    clear : In, forgets `error`.
    error : Out `BusError`.
    events : Out `WriteEvents`.
    idle : Out, every burst of every command has its response. Falls in the cycle after a command was taken.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from the last beat of a command's first burst to `awvalid`.
    LATENCY = 2

    def __init__(
        self,
        data_width_bits: int,
        *,
        max_outstanding: int = 8,
        max_burst_bytes: int = PAGE_BYTES,
        queue_beats: int | None = None,
    ) -> None:
        bus = Axi4WriteSignature(data_width_bits)
        self.data_width_bits = data_width_bits
        self.max_outstanding, self.max_burst_bytes = max_outstanding, max_burst_bytes
        burst_beats = block_beats(data_width_bits, max_burst_bytes)
        self.queue_beats = queue_places(burst_beats, max_outstanding, queue_beats)
        self.beat_layout = data.StructLayout({"data": data_width_bits, "strb": data_width_bits // 8})
        super().__init__(
            {
                "i_command": In(stream.Signature(TransferCommand)),
                "i": In(stream.Signature(self.beat_layout)),
                "bus": Out(bus),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(WriteEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Begin bursts that are complete in the queue; AW and W then go their own ways until B."""
        m = Module()
        bus = self.bus
        m.submodules.split = split = BurstSplitter(self.data_width_bits, self.max_burst_bytes)
        m.submodules.data = queue = StreamQueue(self.beat_layout, self.queue_beats, memory="block")
        m.submodules.fork = fork = Fork(Burst, 2)
        m.submodules.lengths = lengths = StreamQueue(8, self.max_outstanding)
        m.submodules.bursts = bursts = StreamQueue(ADDRESS_BITS, self.max_outstanding)
        # In the queue, in no burst yet. W may empty places before AW took the burst that frees them: one burst more.
        unclaimed_beats = Signal(range(self.queue_beats + split.block_beats + 1))
        enough = Signal()
        complete = Signal()
        begun, pushed, sent = Signal(), Signal(), Signal()
        burst = split.o.payload
        wiring.connect(m, wiring.flipped(self.i_command), split.i)
        wiring.connect(m, wiring.flipped(self.i), queue.i)

        # A burst begins when all of its beats are there; they stay, so a register may say so.
        to_address, to_data = fork.o
        m.d.comb += [
            enough.eq(burst.length < unclaimed_beats),
            fork.i.payload.eq(burst),
            fork.i.valid.eq(complete & bursts.i.ready),
            begun.eq(fork.i.valid & fork.i.ready),
            split.o.ready.eq(begun),
            bursts.i.payload.eq(burst.address),
            bursts.i.valid.eq(begun),
            pushed.eq(self.i.valid & self.i.ready),
        ]
        m.d.sync += [
            complete.eq(split.o.valid & enough & ~begun),
            unclaimed_beats.eq(subtract_beats(unclaimed_beats, begun, burst, pushed)),
        ]

        # AW.
        drive_address(m, bus, "aw", to_address.payload)
        m.d.comb += [bus.awvalid.eq(to_address.valid), to_address.ready.eq(bus.awready)]

        self._drive_data(m, queue, lengths, to_data, sent)

        # B: a response is taken when a burst is open, which is whenever one may come.
        m.d.comb += [bus.bready.eq(bursts.o.valid), bursts.o.ready.eq(bus.bvalid)]
        latch_error(m, self.error, self.clear, bus.bvalid & bus.bready, bus.bresp, bursts.o.payload)

        m.d.comb += [
            self.idle.eq(split.idle & ~bursts.o.valid),
            self.events.beat.eq(sent),
            self.events.wait_address.eq(bus.awvalid & ~bus.awready),
            self.events.wait_data.eq(bus.wvalid & ~bus.wready),
            self.events.wait_producer.eq(split.o.valid & ~enough),
        ]
        return m

    def _drive_data(self, m: Module, queue: StreamQueue, lengths: StreamQueue, to_data: Any, sent: Signal) -> None:
        """W: the queue's beats, the last of each burst marked."""
        bus = self.bus
        open_burst = Signal()
        left = Signal(8)  # beats of the open burst behind the one shown
        last = Signal()  # there is none
        load = Signal()
        m.d.comb += [
            lengths.i.valid.eq(to_data.valid),
            lengths.i.payload.eq(to_data.payload.length),
            to_data.ready.eq(lengths.i.ready),
            bus.wvalid.eq(open_burst & queue.o.valid),
            bus.wdata.eq(queue.o.payload.data),
            bus.wstrb.eq(queue.o.payload.strb),
            bus.wlast.eq(last),
            sent.eq(bus.wvalid & bus.wready),
            queue.o.ready.eq(sent),
            load.eq(~open_burst | (sent & last)),
            lengths.o.ready.eq(load),
        ]
        with m.If(load):
            m.d.sync += [open_burst.eq(lengths.o.valid), left.eq(lengths.o.payload), last.eq(lengths.o.payload == 0)]
        with m.Elif(sent):
            m.d.sync += [left.eq(left - 1), last.eq(left == 1)]
