"""Kernel control words: start, done and interrupt as the Xilinx runtime expects them (ap_ctrl_chain, ap_ctrl_hs).

Contract: writing ap_start starts the kernel once it is idle; ap_start reads 1 until the kernel needs its arguments no
more, which is when it is done. ap_done and ap_ready are set by `done` and cleared by reading the control word; writing
ap_continue clears ap_done too. The next start waits until ap_done was cleared, so that no completion is lost; with
auto_restart it does not wait. ap_idle is 1 while the kernel neither runs nor has a start waiting. An interrupt status
bit is set by its event if the mask allows it and toggled by writing 1; `interrupt` is the OR of them while enabled. An
event wins over a simultaneous access.

Timing: `start` pulses in the cycle after the write; reads are combinational; back-pressure: none.
Source: AMD UG1393 and UG1399, "S_AXILITE control register map"; the words are those of `nearflash.abi.registers`.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.fields import Access, RegisterMap
from nearflash.gateware.bus.layout import register_layout

__all__ = ["KernelControl"]


class KernelControl(wiring.Component):
    """The four control words of a kernel.

    Parameters
    ----------
    registers : a map with the control words `control`, `interrupt_enable`, `interrupt_mask` and `interrupt_status`.

    Members
    -------
    write : In, pulse: `write_data` goes to the word at `write_offset`.
    write_offset, read_offset : In, byte offset of one of the four words, 0 to 12.
    write_data : In, low byte of the word: all fields lie there.
    read : In, pulse: the host takes `read_data` of `read_offset`.
    read_data : Out, 32 bits.
    start : Out, pulse: the kernel runs from the next cycle.
    done : In, pulse: the kernel has finished.
    interrupt : Out, level.
    """

    def __init__(self, registers: RegisterMap) -> None:
        self.registers = {register.name: register for register in registers if register.access is Access.CONTROL}
        super().__init__(
            {
                "write": In(1),
                "write_offset": In(4),
                "write_data": In(8),
                "read": In(1),
                "read_offset": In(4),
                "read_data": Out(32),
                "start": Out(1),
                "done": In(1),
                "interrupt": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Later statements win: the host's writes, then its reads that clear, then the kernel's events."""
        m = Module()
        offsets = {name: register.offset for name, register in self.registers.items()}
        words = {name: Signal(register_layout(register), name=name) for name, register in self.registers.items()}
        control, mask, status = words["control"], words["interrupt_mask"], words["interrupt_status"]
        written = Signal.like(control)
        running = Signal()

        m.d.comb += written.as_value().eq(self.write_data)
        with m.If(self.write):
            with m.Switch(self.write_offset):
                with m.Case(offsets["control"]):
                    m.d.sync += [
                        control.auto_restart.eq(written.auto_restart),
                        # Only set, as AMD's kernels do: a host that writes 0 does not stop a kernel.
                        control.ap_start.eq(control.ap_start | written.ap_start),
                        control.ap_done.eq(control.ap_done & ~written.ap_continue),
                    ]
                with m.Case(offsets["interrupt_enable"]):
                    m.d.sync += words["interrupt_enable"].enable.eq(self.write_data[0])
                with m.Case(offsets["interrupt_mask"]):
                    m.d.sync += Cat(mask.done, mask.ready).eq(self.write_data)
                with m.Case(offsets["interrupt_status"]):
                    # Toggle on write, as in AMD's block: a host writes back what it has read.
                    m.d.sync += Cat(status.done, status.ready).eq(Cat(status.done, status.ready) ^ self.write_data)

        shown = Signal.like(control)
        m.d.comb += [shown.eq(control), shown.ap_idle.eq(~running & ~control.ap_start)]
        with m.Switch(self.read_offset):
            for name, word in words.items():
                with m.Case(offsets[name]):
                    m.d.comb += self.read_data.eq(shown if name == "control" else word)
        with m.If(self.read & (self.read_offset == offsets["control"])):
            # Cleared by reading; a command that ends in this cycle is set below, and is not lost.
            m.d.sync += [control.ap_done.eq(0), control.ap_ready.eq(0)]

        m.d.comb += self.start.eq(control.ap_start & ~running & (~control.ap_done | control.auto_restart))
        with m.If(self.start):
            m.d.sync += running.eq(1)
        with m.If(self.done):
            m.d.sync += [
                running.eq(0),
                control.ap_start.eq(control.auto_restart),
                control.ap_done.eq(1),
                control.ap_ready.eq(1),
                Cat(status.done, status.ready).eq(Cat(status.done | mask.done, status.ready | mask.ready)),
            ]
        m.d.comb += self.interrupt.eq(words["interrupt_enable"].enable & (status.done | status.ready))
        return m
