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
Part: Micron MT29F16G08ABACAWP, whose pins in TSOP 48 have no DQS: its modes are those of SDR, 0 to 5 (data sheet
"16Gb, 32Gb, 64Gb Asynchronous/Synchronous NAND": up to asynchronous timing mode 5, tRC and tWC 20 ns, 5 addresses).
Source: ONFI 4.2, "SDR Timing Parameters"; cells: amaranth.lib.io (7 series: IOBUF, OBUF and flip-flops in the pad).
"""

from dataclasses import dataclass

from amaranth import Cat, Module, Signal, Value
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
        bus = _Bus(range(max(vars(self.clocks).values()) + 1))
        lun, is_open = Signal(8), Signal()
        self._connect_pads(m, bus, Cat(is_open & (lun == number) for number in range(len(self.pads.ce_n))))
        room, drained = self._receive(m, bus.dq, bus.falls)
        cycle, valid = self.link.cycles.payload, self.link.cycles.valid
        m.d.comb += bus.over.eq(bus.left == 0)
        with m.If(~bus.over):
            m.d.sync += bus.left.eq(bus.left - 1)
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [bus.byte.eq(0), bus.beat.eq(0)]
                with m.If(valid & (~is_open | (lun != cycle.lun))):
                    m.d.sync += is_open.eq(0)
                    m.next = "SELECT"
                with m.Elif(valid & (cycle.kind == CycleKind.READ)):
                    bus.begin(m, "TURN", self.clocks.turn)
                with m.Elif(valid & ((cycle.kind != CycleKind.WRITE) | self.link.write.valid)):
                    bus.begin(m, "LOW", self.clocks.low)
            with m.State("SELECT"):
                m.d.sync += [is_open.eq(1), lun.eq(cycle.lun)]
                bus.begin(m, "SETTLE", self.clocks.select)
            with m.State("SETTLE"), m.If(bus.over):
                m.next = "IDLE"
            self._write(m, bus)
            self._read(m, bus, room, drained)
        return m

    def _connect_pads(self, m: Module, bus: "_Bus", selected: Value) -> None:
        """Registers in the pads; DQ are the cycle's byte, or one of the beat that is written."""
        outputs = {name: io.FFBuffer("o", getattr(self.pads, name)) for name in ("cle", "ale", "we_n", "re_n", "ce_n")}
        for name, buffer in outputs.items():
            m.submodules[name] = buffer
        m.submodules.dq = dq = io.FFBuffer("io", self.pads.dq)
        cycle = self.link.cycles.payload
        m.d.comb += [
            outputs["cle"].o.eq(bus.writes & (cycle.kind == CycleKind.COMMAND)),
            outputs["ale"].o.eq(bus.writes & (cycle.kind == CycleKind.ADDRESS)),
            outputs["we_n"].o.eq(bus.low),
            outputs["re_n"].o.eq(bus.strobes),
            outputs["ce_n"].o.eq(selected),
            dq.oe.eq(bus.writes),
            bus.dq.eq(dq.i),
            dq.o.eq(cycle.byte),
        ]
        with m.If(cycle.kind == CycleKind.WRITE):
            m.d.comb += dq.o.eq(self.link.write.payload.word_select(bus.byte, 8))

    def _write(self, m: Module, bus: "_Bus") -> None:
        """A pulse of WE# for each byte that goes to the part."""
        cycle, write = self.link.cycles, self.link.write
        data, last = cycle.payload.kind == CycleKind.WRITE, bus.byte == _BEAT_BYTES - 1
        with m.State("LOW"):
            m.d.comb += [bus.writes.eq(1), bus.low.eq(1)]
            with m.If(bus.over):
                bus.begin(m, "HIGH", self.clocks.high)
        with m.State("HIGH"):
            m.d.comb += bus.writes.eq(1)
            with m.If(bus.over):
                m.d.comb += [
                    write.ready.eq(data & last),
                    cycle.ready.eq(~data | (last & (bus.beat == cycle.payload.beats - 1))),
                ]
                m.d.sync += [bus.byte.eq(bus.byte + 1), bus.beat.eq(bus.beat + last)]
                with m.If(cycle.ready):
                    m.next = "IDLE"
                with m.Elif(last):
                    m.next = "NEXT"
                with m.Else():
                    bus.begin(m, "LOW", self.clocks.low)
        with m.State("NEXT"), m.If(write.valid):
            bus.begin(m, "LOW", self.clocks.low)

    def _read(self, m: Module, bus: "_Bus", room: Value, drained: Value) -> None:
        """A pulse of RE# for each byte that comes; a beat begins where there is room for it."""
        goes = (bus.byte != 0) | room
        with m.State("TURN"), m.If(bus.over & goes):
            m.d.comb += bus.falls.eq(1)
            bus.begin(m, "STROBE", self.clocks.strobe)
        with m.State("STROBE"):
            m.d.comb += bus.strobes.eq(1)
            with m.If(bus.over):
                m.d.sync += [bus.byte.eq(bus.byte + 1), bus.beat.eq(bus.beat + (bus.byte == _BEAT_BYTES - 1))]
                bus.begin(m, "RECOVER", self.clocks.recover)
        with m.State("RECOVER"), m.If(bus.over):
            with m.If((bus.byte == 0) & (bus.beat == self.link.cycles.payload.beats)):
                m.next = "DRAIN"
            with m.Elif(goes):
                m.d.comb += bus.falls.eq(1)
                bus.begin(m, "STROBE", self.clocks.strobe)
        with m.State("DRAIN"), m.If(drained):
            m.d.comb += self.link.cycles.ready.eq(1)
            m.next = "IDLE"

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


class _Bus:
    """Signals of the states: where a cycle is, and what the pads do."""

    def __init__(self, clocks: range) -> None:
        self.writes, self.low, self.strobes = Signal(), Signal(), Signal()  # WE# low or just high; low; RE# low
        self.falls = Signal()  # RE# is low from the next clock on
        self.byte, self.beat = Signal(range(_BEAT_BYTES)), Signal(BEATS_BITS)
        self.left, self.over = Signal(clocks), Signal()
        self.dq = Signal(8)

    def begin(self, m: Module, state: str, clocks: int) -> None:
        """Be in a state for so many clocks."""
        m.d.sync += self.left.eq(clocks - 1)
        m.next = state
