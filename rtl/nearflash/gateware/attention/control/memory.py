"""Page source in memory: reads the wanted sealed codewords of a page, and nothing else.

Contract: of every request first its header leaves, then 66 beats for each wanted codeword, numbers ascending. A page
lies as sealed codewords one behind the other (docs/contracts/attention.md, 2), a separate group's V page directly
behind its K page, so codeword n is at address + 528·n. Codewords that follow each other are one transfer.

Timing: about 3 cycles and one for each codeword number up to the last wanted one, while beats of earlier requests flow;
a beat a cycle while the memory keeps up; back-pressure: yes.
Limits: a 64-bit port. After a bus error the beats are whatever came; `error` tells.
"""

from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.interfaces import RoutedHeader, RoutedRequest, header_of
from nearflash.gateware.bus.axi import Axi4ReadSignature
from nearflash.gateware.bus.read import BurstReader, ReadEvents
from nearflash.gateware.bus.transfer import BusError

__all__ = ["MemorySource"]

_BEAT_BYTES = 8


class MemorySource(wiring.Component):
    """Reads pages for all channels.

    Parameters
    ----------
    config : build configuration; its port must be 64 bits wide.

    Members
    -------
    i : In stream of RoutedRequest.
    o_header : Out stream of RoutedHeader.
    o : Out stream of unsigned(64), beats of sealed codewords.
    bus : Out Axi4ReadSignature.
    clear : In, forgets `error`. error : Out BusError. events : Out ReadEvents.
    idle : Out, nothing is under way.

    Raises
    ------
    ValueError : the port is not 64 bits wide.
    """

    def __init__(self, config: AttendConfig) -> None:
        if config.port_bits != 8 * _BEAT_BYTES:
            raise ValueError(f"port_bits must be 64, not {config.port_bits!r}")
        super().__init__(
            {
                "i": In(stream.Signature(RoutedRequest)),
                "o_header": Out(stream.Signature(RoutedHeader)),
                "o": Out(stream.Signature(8 * _BEAT_BYTES)),
                "bus": Out(Axi4ReadSignature(config.port_bits)),
                "clear": In(1),
                "error": Out(BusError),
                "events": Out(ReadEvents),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Header first; then walk over the codewords' bits and ask for each run of ones where it ends."""
        m = Module()
        m.submodules.reader = reader = BurstReader(8 * _BEAT_BYTES, max_burst_bytes=2048)
        request, header = self.i.payload.request, self.o_header.payload
        wanted = Signal(64)
        start, next_codeword = Signal(48), Signal(48)  # byte addresses: of the run, behind the last codeword seen
        run_beats = Signal(13)
        command = reader.i_command

        wiring.connect(m, reader.bus, wiring.flipped(self.bus))
        wiring.connect(m, reader.o, wiring.flipped(self.o))
        m.d.comb += [
            reader.clear.eq(self.clear),
            self.error.eq(reader.error),
            self.events.eq(reader.events),
            header.channel.eq(self.i.payload.channel),
            header.header.eq(header_of(request)),
            command.payload.address.eq(start),
            command.payload.beats.eq(run_beats),
        ]
        with m.FSM():
            with m.State("SEND-HEADER"):
                m.d.comb += [
                    self.o_header.valid.eq(self.i.valid),
                    self.i.ready.eq(self.o_header.ready),
                    self.idle.eq(reader.idle & ~self.i.valid),
                ]
                m.d.sync += [
                    wanted.eq(request.codewords),
                    start.eq(request.address),
                    next_codeword.eq(request.address),
                    run_beats.eq(0),
                ]
                with m.If(self.i.valid & self.o_header.ready):
                    m.next = "WALK"
            with m.State("WALK"):
                # A run is asked for where it ends: adjacent codewords are one burst.
                m.d.comb += command.valid.eq((run_beats != 0) & ~wanted[0])
                with m.If(command.ready | ~command.valid):
                    m.d.sync += [wanted.eq(wanted >> 1), next_codeword.eq(next_codeword + SEALED_BYTES)]
                    with m.If(wanted[0]):
                        m.d.sync += run_beats.eq(run_beats + SEALED_BYTES // _BEAT_BYTES)
                    with m.Else():
                        m.d.sync += [run_beats.eq(0), start.eq(next_codeword + SEALED_BYTES)]
                    # The step behind the last codeword, in which its run is asked for.
                    with m.If(wanted == 0):
                        m.next = "SEND-HEADER"
        return m
