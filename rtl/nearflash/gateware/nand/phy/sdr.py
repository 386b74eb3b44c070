"""PHY of ONFI's asynchronous (SDR) interface: bus cycles of a NAND link to WE#, RE#, CLE, ALE, CE# and DQ.

    link.cycles ─► states ─► registers in the pads ─► CE#, CLE, ALE, WE#, RE#, DQ
    link.write  ─────────────────────────────────────────────────────────► DQ
    link.read   ◄── queue ◄── bytes of a beat ◄── registers in the pads ◄─ DQ

Contract: that of nearflash.gateware.nand.link. Bytes of a beat go lowest first. A bus cycle ends when WE# has been high
as long as it must; a READ when its last beat was taken. A chip enable stays low until another LUN has a cycle; no two
are low together. A status READ pulses RE# eight times: each gives the status. Waits between cycles (tWHR, tADL, tCCS,
tRHW, tWB) are the controller's, counted from the end of a cycle, which is at or behind the edge that ONFI counts from.
R/B# is not looked at: the controller asks for the status. Reset releases the bus.

Timing: all edges on this clock, outputs and DQ registered in the pads (two clocks more to data). A byte takes
ceil(tWC), ceil(tRC) clocks, and a clock more before each beat that is written: 20 ns at 100 MHz in mode 5.
Limits: data are taken where tREA has passed, which must be before the next byte's come: checked when it is made. Delays
of board and pads within `board_ns`. Registers of pads begin low on a 7-series part: FFh must come first, as after any
power on. Not on a board yet, not timed by a vendor's tool; no NV-DDR, and `nand_phy.v` of a package does not use it.
Source: ONFI 4.2, "SDR Timing Parameters"; cells: amaranth.lib.io (7 series: IOBUF, OBUF and flip-flops in the pad).
"""

from dataclasses import dataclass

from amaranth import Cat, Module, Signal
from amaranth.lib import io, wiring
from amaranth.lib.wiring import In

from nearflash.abi.nand import NandTiming
from nearflash.abi.onfi import SdrTiming
from nearflash.gateware.nand.link import BEATS_BITS, CycleKind, NandLinkSignature
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["NandPads", "SdrClocks", "SdrPhy"]

_BEAT_BYTES = 8
_QUEUED_BEATS = 4


@dataclass(frozen=True)
class NandPads:
    """Ports of one channel, as amaranth.lib.io has them: WE#, RE# and CE# are inverted, so they begin high."""

    dq: io.PortLike
    """8 bits."""
    cle: io.PortLike
    ale: io.PortLike
    we_n: io.PortLike
    re_n: io.PortLike
    ce_n: io.PortLike
    """A bit for each LUN."""

    def __post_init__(self) -> None:
        for name in ("we_n", "re_n", "ce_n"):
            if not all(getattr(self, name).invert):
                raise ValueError(f"{name} must be an inverted port")


@dataclass(frozen=True)
class SdrClocks:
    """Clocks of each part of a cycle."""

    select: int
    """From CE# low to WE# or RE# low."""
    low: int
    high: int
    turn: int
    """From the last command to RE# low."""
    strobe: int
    recover: int
    access: int
    """From RE# low to the clock edge that takes data."""

    @classmethod
    def of(cls, timing: SdrTiming, clock_hz: int, board_ns: int = 0) -> "SdrClocks":
        """The fewest that keep `timing`. Raises ValueError where data would be gone when they are taken."""

        def clocks(*times_ns: int) -> int:
            return max(NandTiming.cycles(time_ns, clock_hz) for time_ns in times_ns)

        low = clocks(timing.wp_ns, timing.cls_ns, timing.als_ns, timing.ds_ns)
        high = clocks(timing.wh_ns, timing.clh_ns, timing.alh_ns, timing.dh_ns, timing.ch_ns)
        access = clocks(timing.rea_ns + board_ns)
        # Data are there until RE# has risen, or until the next byte, whichever the mode promises.
        strobe = clocks(timing.rp_ns) if timing.rloh_ns else clocks(timing.rp_ns, timing.rea_ns + board_ns)
        recover = max(clocks(timing.reh_ns), clocks(timing.rc_ns) - strobe)
        clock_ns = 10**9 / clock_hz
        gone_ns = min(strobe * clock_ns + timing.rhoh_ns, (strobe + recover) * clock_ns + timing.rloh_ns)
        if access * clock_ns > gone_ns:
            raise ValueError(f"clock_hz must be one at which data are there {access} clocks after RE#, not {clock_hz}")
        select = max(clocks(timing.cs_ns) - low, clocks(timing.cea_ns) - access, 1)
        turn = clocks(timing.clr_ns, timing.ar_ns, timing.rr_ns)
        return cls(select, low, max(high, clocks(timing.wc_ns) - low), turn, strobe, recover, access)


class SdrPhy(wiring.Component):
    """Pads of one channel.

    Parameters
    ----------
    pads : its ports. clocks : of this clock (`SdrClocks.of`).

    Members
    -------
    link : In NandLinkSignature, the controller's.
    """

    link: In(NandLinkSignature)

    def __init__(self, pads: NandPads, clocks: SdrClocks) -> None:
        self.pads, self.clocks = pads, clocks
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """Pads, what is read, then one bus cycle after the other."""
        m = Module()
        buffers = {name: io.FFBuffer("o", getattr(self.pads, name)) for name in ("cle", "ale", "we_n", "re_n", "ce_n")}
        for name, buffer in buffers.items():
            m.submodules[name] = buffer
        m.submodules.dq = dq = io.FFBuffer("io", self.pads.dq)
        cycle, valid = self.link.cycles.payload, self.link.cycles.valid
        writes, low, strobes = Signal(), Signal(), Signal()  # WE# low or just high; low; RE# low
        falls, byte, beat = Signal(), Signal(range(_BEAT_BYTES)), Signal(BEATS_BITS)
        lun, is_open = Signal(8), Signal()
        data = cycle.kind == CycleKind.WRITE
        m.d.comb += [
            buffers["cle"].o.eq(writes & (cycle.kind == CycleKind.COMMAND)),
            buffers["ale"].o.eq(writes & (cycle.kind == CycleKind.ADDRESS)),
            buffers["we_n"].o.eq(low),
            buffers["re_n"].o.eq(strobes),
            buffers["ce_n"].o.eq(Cat(is_open & (lun == number) for number in range(len(self.pads.ce_n)))),
            dq.oe.eq(writes),
            dq.o.eq(cycle.byte),
        ]
        with m.If(data):
            m.d.comb += dq.o.eq(self.link.write.payload.word_select(byte, 8))
        room, drained = self._receive(m, dq.i, falls)
        left = Signal(range(max(vars(self.clocks).values()) + 1))
        over = left == 0
        with m.If(~over):
            m.d.sync += left.eq(left - 1)

        def begin(state: str, clocks: int) -> None:
            m.d.sync += left.eq(clocks - 1)
            m.next = state

        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [byte.eq(0), beat.eq(0)]
                with m.If(valid & (~is_open | (lun != cycle.lun))):
                    m.d.sync += is_open.eq(0)
                    m.next = "SELECT"
                with m.Elif(valid & (cycle.kind == CycleKind.READ)):
                    begin("TURN", self.clocks.turn)
                with m.Elif(valid & (~data | self.link.write.valid)):
                    begin("LOW", self.clocks.low)
            with m.State("SELECT"):
                m.d.sync += [is_open.eq(1), lun.eq(cycle.lun)]
                begin("SETTLE", self.clocks.select)
            with m.State("SETTLE"), m.If(over):
                m.next = "IDLE"
            with m.State("LOW"):
                m.d.comb += [writes.eq(1), low.eq(1)]
                with m.If(over):
                    begin("HIGH", self.clocks.high)
            with m.State("HIGH"):
                m.d.comb += writes.eq(1)
                last = byte == _BEAT_BYTES - 1
                with m.If(over):
                    m.d.comb += self.link.write.ready.eq(data & last)
                    m.d.sync += [byte.eq(byte + 1), beat.eq(beat + last)]
                    m.d.comb += self.link.cycles.ready.eq(~data | (last & (beat == cycle.beats - 1)))
                    with m.If(self.link.cycles.ready):
                        m.next = "IDLE"
                    with m.Elif(last):
                        m.next = "NEXT"
                    with m.Else():
                        begin("LOW", self.clocks.low)
            with m.State("NEXT"), m.If(self.link.write.valid):
                begin("LOW", self.clocks.low)
            with m.State("TURN"), m.If(over & ((byte != 0) | room)):
                m.d.comb += falls.eq(1)
                begin("STROBE", self.clocks.strobe)
            with m.State("STROBE"):
                m.d.comb += strobes.eq(1)
                with m.If(over):
                    m.d.sync += [byte.eq(byte + 1), beat.eq(beat + (byte == _BEAT_BYTES - 1))]
                    begin("RECOVER", self.clocks.recover)
            with m.State("RECOVER"), m.If(over):
                with m.If((byte == 0) & (beat == cycle.beats)):
                    m.next = "DRAIN"
                with m.Elif((byte != 0) | room):
                    m.d.comb += falls.eq(1)
                    begin("STROBE", self.clocks.strobe)
            with m.State("DRAIN"), m.If(drained):
                m.d.comb += self.link.cycles.ready.eq(1)
                m.next = "IDLE"
        return m

    def _receive(self, m: Module, dq: Signal, falls: Signal) -> tuple[Signal, Signal]:
        """Bytes from the pads to beats: whether there is room for another beat, and whether all were taken."""
        m.submodules.queue = queue = StreamQueue(64, _QUEUED_BEATS)
        wiring.connect(m, queue.o, wiring.flipped(self.link.read))
        # RE# falls a clock after `falls` at the register of the pad, another one later data are in that of DQ.
        taken = Signal(self.clocks.access + 2)
        word, place = Signal(64, reset_less=True), Signal(range(_BEAT_BYTES))
        promised, begun = Signal(range(_QUEUED_BEATS + 1)), Signal(range(_BEAT_BYTES))
        starts, moves = falls & (begun == 0), queue.o.valid & queue.o.ready
        m.d.sync += [taken.eq((taken << 1) | falls), promised.eq(promised + starts - moves)]
        m.d.comb += [
            queue.i.payload.eq(Cat(word[8:], dq)),
            queue.i.valid.eq(taken[-1] & (place == _BEAT_BYTES - 1)),
        ]
        with m.If(falls):
            m.d.sync += begun.eq(begun + 1)
        with m.If(taken[-1]):
            m.d.sync += [word.eq(queue.i.payload), place.eq(place + 1)]
        room, drained = Signal(), Signal()
        m.d.comb += [room.eq(promised != _QUEUED_BEATS), drained.eq(promised == 0)]
        return room, drained
