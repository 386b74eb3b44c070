"""Burst reader: AXI4 read master that turns transfer commands into a stream of beats.

    i_command ──► BurstSplitter ──► room? ──► AR          R ──► block RAM queue ──► o
                                      ▲ └──► burst addresses ──► error              │
                                      └──────────── places given back ◄─────────────┘

Contract: the beats of every command leave in order, commands in order. A burst is requested only when the queue has
room for all of it, so `rready` never falls while a beat may come: a slow consumer cannot block the bus. At most
`max_outstanding` bursts are in flight. Beats of a burst that had an error response leave like others; `error`
states it. Reset needs a reset of the slave too, for beats may be in flight.

Timing: LATENCY cycles from a command to `arvalid`, QUEUE_LATENCY cycles from R to o; one beat a cycle as long as
the slave's latency is below max_outstanding bursts; one burst every 3 cycles; back-pressure: yes.
Limits: full beats only; the bits of the address inside a beat are ignored.
Source: AMBA AXI specification, IHI 0022, chapters A3 and A5.
"""

from amaranth import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.bus.axi import ADDRESS_BITS, PAGE_BYTES, Axi4ReadSignature
from nearflash.gateware.bus.split import BurstSplitter, block_beats, queue_places
from nearflash.gateware.bus.transfer import BusError, TransferCommand, drive_address, latch_error, subtract_beats
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["BurstReader", "ReadEvents"]


class ReadEvents(data.Struct):
    """Events of this cycle, for counters.

    A beat arrived; AR waits for the slave; a burst is in flight and no beat came; a beat waits for the consumer.
    """

    beat: 1
    wait_address: 1
    wait_data: 1
    wait_consumer: 1


class BurstReader(wiring.Component):
    """AXI4 read master.

    Parameters
    ----------
    data_width_bits : 32, 64, 128, 256 or 512.
    max_outstanding : bursts in flight at most, at least 2.
    max_burst_bytes : longest burst, a power of two up to 4,096; 256 beats limit it too. AXI3 slaves: 16 beats.
    queue_beats : places in the data queue, more than one burst; None: one more than max_outstanding bursts.

    Members
    -------
    i_command : In stream of `TransferCommand`.
    o : Out stream of unsigned(data_width_bits).
    bus : Out `Axi4ReadSignature`.
    clear : In, forgets `error`.
    error : Out `BusError`.
    events : Out `ReadEvents`.
    idle : Out, every beat of every command was taken from o. Falls in the cycle after a command was taken.

    Raises
    ------
    ValueError : a parameter outside its range.
    """

    #: Cycles from a command to `arvalid`.
    LATENCY = BurstSplitter.LATENCY + 1
    #: Cycles from a beat on R to `o`.
    QUEUE_LATENCY = StreamQueue.LATENCY["block"]

    def __init__(
        self,
        data_width_bits: int,
        *,
        max_outstanding: int = 8,
        max_burst_bytes: int = PAGE_BYTES,
        queue_beats: int | None = None,
    ) -> None:
        bus = Axi4ReadSignature(data_width_bits)
        self.data_width_bits = data_width_bits
        self.max_outstanding, self.max_burst_bytes = max_outstanding, max_burst_bytes
        burst_beats = block_beats(data_width_bits, max_burst_bytes)
        self.queue_beats = queue_places(burst_beats, max_outstanding, queue_beats)
        super().__init__(
            {
                "i_command": In(stream.Signature(TransferCommand)),
                "o": Out(stream.Signature(data_width_bits)),
                "bus": Out(bus),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(ReadEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Request bursts that have room; take beats into the queue; follow the bursts in flight by their addresses."""
        m = Module()
        bus = self.bus
        m.submodules.split = split = BurstSplitter(self.data_width_bits, self.max_burst_bytes)
        m.submodules.data = queue = StreamQueue(self.data_width_bits, self.queue_beats, memory="block")
        m.submodules.bursts = bursts = StreamQueue(ADDRESS_BITS, self.max_outstanding)
        free_beats = Signal(range(self.queue_beats + 1), init=self.queue_beats)
        fits = Signal()
        room, requested, popped = Signal(), Signal(), Signal()
        burst = split.o.payload
        wiring.connect(m, wiring.flipped(self.i_command), split.i)

        # AR: a burst goes out when all of its beats have a place; they keep it, so a register may say so.
        drive_address(m, bus, "ar", burst)
        m.d.comb += [
            # AXI's length is one less than the beats.
            room.eq(burst.length < free_beats),
            bus.arvalid.eq(fits & bursts.i.ready),
            requested.eq(bus.arvalid & bus.arready),
            split.o.ready.eq(requested),
            bursts.i.payload.eq(burst.address),
            bursts.i.valid.eq(requested),
        ]

        # R: the beats have their places, so the queue is always ready for them.
        m.d.comb += [
            queue.i.payload.eq(bus.rdata),
            queue.i.valid.eq(bus.rvalid),
            bus.rready.eq(queue.i.ready),
            bursts.o.ready.eq(bus.rvalid & bus.rready & bus.rlast),
        ]
        latch_error(m, self.error, self.clear, bus.rvalid, bus.rresp, bursts.o.payload)

        # The queue and the count of places that are neither full nor promised.
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        m.d.comb += popped.eq(self.o.valid & self.o.ready)
        m.d.sync += [
            # Not right behind a request, whose places are not counted yet.
            fits.eq(split.o.valid & room & ~requested),
            free_beats.eq(subtract_beats(free_beats, requested, burst, popped)),
        ]

        m.d.comb += [
            self.idle.eq(split.idle & (free_beats == self.queue_beats)),
            self.events.beat.eq(bus.rvalid & bus.rready),
            self.events.wait_address.eq(bus.arvalid & ~bus.arready),
            self.events.wait_data.eq(bursts.o.valid & ~bus.rvalid),
            self.events.wait_consumer.eq(self.o.valid & ~self.o.ready),
        ]
        return m
