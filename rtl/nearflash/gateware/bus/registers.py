"""Register file: the AXI4-Lite slave of a kernel, made from its `nearflash.abi` register map.

Contract: the host sees each register of the map at its offset, 64-bit ones low word first. Read-write registers drive
`values`; read-only ones show `status`, or their constant where the map gives a reset value. Write strobes hold byte by
byte. A read or write of an offset that the map lacks, and a write to a read-only register, give SLVERR, change
nothing and read 0. The control words behave as `KernelControl` says; a write without strobe 0 leaves them alone.

Timing: one read and one write every cycle, each done in the cycle after its address (and data) came; back-pressure:
yes.
Limits: 32-bit accesses; the two lowest address bits are ignored. A 64-bit register is two accesses, so the kernel keeps
`status` still while it is read.
Source: AMBA AXI specification, IHI 0022, chapter B1.
"""

from collections.abc import Iterator

from amaranth import Const, Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.fields import Access, Register, RegisterMap
from nearflash.gateware.bus.axi import AxiLiteSignature, AxiResponse
from nearflash.gateware.bus.control import KernelControl
from nearflash.gateware.bus.layout import register_layout

__all__ = ["RegisterFile"]


class RegisterFile(wiring.Component):
    """AXI4-Lite register block of one kernel.

    Parameters
    ----------
    registers : the kernel's map, with the four control words.

    Members
    -------
    bus : In `AxiLiteSignature`, byte addresses from the map's start.
    values : Out, struct of the read-write registers by name; a register with fields is itself a struct.
    status : In, struct of the read-only registers that are not constants.
    start : Out, pulse: the kernel runs from the next cycle.
    done : In, pulse: the kernel has finished.
    interrupt : Out, level.
    """

    def __init__(self, registers: RegisterMap) -> None:
        self.registers = registers
        self._writable = [register for register in registers if register.access is Access.RW]
        self._readable = [register for register in registers if register.access is Access.RO]
        inputs = [register for register in self._readable if not register.reset]
        reset = {r.name: r.unpack(r.reset) if r.fields else r.reset for r in self._writable}
        super().__init__(
            {
                "bus": In(AxiLiteSignature((registers.size_bytes - 1).bit_length())),
                "values": Out(data.StructLayout({r.name: register_layout(r) for r in self._writable}), init=reset),
                "status": In(data.StructLayout({r.name: register_layout(r) for r in inputs})),
                "start": Out(1),
                "done": In(1),
                "interrupt": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A write needs its address and its data; a read only its address."""
        m = Module()
        bus = self.bus
        m.submodules.control = control = KernelControl(self.registers)
        write, read = Signal(), Signal()
        m.d.comb += [
            # Both channels at once, so that no half of a write has to be kept; and not over a response that waits.
            write.eq(bus.awvalid & bus.wvalid & (~bus.bvalid | bus.bready)),
            bus.awready.eq(write),
            bus.wready.eq(write),
            # A read may come as the one before leaves: a word a cycle.
            bus.arready.eq(~bus.rvalid | bus.rready),
            read.eq(bus.arvalid & bus.arready),
        ]
        # A new response in this cycle is written below and wins.
        with m.If(bus.bready):
            m.d.sync += bus.bvalid.eq(0)
        with m.If(write):
            m.d.sync += bus.bvalid.eq(1)
            self._write(m, control)
        with m.If(bus.rready):
            m.d.sync += bus.rvalid.eq(0)
        with m.If(read):
            m.d.sync += bus.rvalid.eq(1)
            self._read(m, control)
        m.d.comb += [
            control.write_offset.eq(bus.awaddr),
            control.write_data.eq(bus.wdata),
            control.read_offset.eq(bus.araddr),
            control.done.eq(self.done),
            self.start.eq(control.start),
            self.interrupt.eq(control.interrupt),
        ]
        return m

    def _write(self, m: Module, control: KernelControl) -> None:
        """The addressed word takes the bytes that have their strobe."""
        bus = self.bus
        m.d.sync += bus.bresp.eq(AxiResponse.OKAY)
        with m.Switch(bus.awaddr[2:]):
            with m.Case(*self._control_indices()):
                m.d.comb += control.write.eq(bus.wstrb[0])
            for register in self._writable:
                for index, word in _words(register, Value.cast(self.values[register.name])):
                    with m.Case(index):
                        for byte, strobe in enumerate(bus.wstrb):
                            with m.If(strobe):
                                m.d.sync += word.word_select(byte, 8).eq(bus.wdata.word_select(byte, 8))
            with m.Default():
                m.d.sync += bus.bresp.eq(AxiResponse.SLVERR)

    def _read(self, m: Module, control: KernelControl) -> None:
        """The addressed word goes to the data register."""
        bus = self.bus
        m.d.sync += bus.rresp.eq(AxiResponse.OKAY)
        with m.Switch(bus.araddr[2:]):
            with m.Case(*self._control_indices()):
                # Reading has an effect here (done is cleared on read): once, in the cycle in which it is taken.
                m.d.comb += control.read.eq(1)
                m.d.sync += bus.rdata.eq(control.read_data)
            for register in (*self._writable, *self._readable):
                for index, word in _words(register, self._show(register)):
                    with m.Case(index):
                        m.d.sync += bus.rdata.eq(word)
            with m.Default():
                m.d.sync += [bus.rdata.eq(0), bus.rresp.eq(AxiResponse.SLVERR)]

    def _show(self, register: Register) -> Value:
        """Choose what the host reads in a register that is not a control word."""
        if register.access is Access.RW:
            return Value.cast(self.values[register.name])
        if register.reset:
            return Const(register.reset, register.width_bits)
        return Value.cast(self.status[register.name])

    def _control_indices(self) -> list[int]:
        return [register.offset // 4 for register in self.registers if register.access is Access.CONTROL]


def _words(register: Register, value: Value) -> Iterator[tuple[int, Value]]:
    """Index in the map and value of each 32-bit word of a register."""
    for lsb in range(0, register.width_bits, 32):
        yield (register.offset + lsb // 8) // 4, value[lsb : lsb + 32]
