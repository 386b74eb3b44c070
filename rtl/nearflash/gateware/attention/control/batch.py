"""Batch: runs one command of the attend kernel from `start` to `done`.

Contract: a batch that is empty, misaligned or of a kind that the build does not have ends at once, nothing read or
written. Any other gives the numbers of all its descriptors (or page operations) on `o` and ends when as many heads (or
operations) have ended. Their faults are their own affair; status is not OK where a completion could not be written.
`contexts` is rounded down to a power of two that the build has.

Timing: `done` comes at the earliest 2 cycles after `start`; a descriptor a cycle; back-pressure: yes.
"""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES
from nearflash.abi.kernel.commands import AttendCommand, Status
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.interfaces import CONTEXT_BITS
from nearflash.gateware.bus.command import await_start, command_members, finish, reject, report
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.nand.operation import NUMBER_BITS

__all__ = ["Batch"]


class Batch(wiring.Component):
    """Control of the attend kernel.

    Parameters
    ----------
    config : build configuration.
    arguments : layout of the kernel's read-write registers; `values` has it.

    Members
    -------
    values : In, arguments; must stay as they are until `done`.
    start : In, pulse. done : Out, pulse. begin : Out, pulse: a batch begins; forgets the errors of the one before.
    pages : Out, it is one of page operations; changes only with `begin`, and only in builds with LUNs.
    contexts_log2 : Out, contexts in use, as a power of two; constant over a batch.
    o : Out stream of descriptor numbers. ended : In, pulse: a head or an operation has ended.
    lost, error : In, a completion could not be written, and where.
    status : Out, Status code. fault_address : Out, byte address of the first fault that is no head's.
    """

    def __init__(self, config: AttendConfig, arguments: Any) -> None:
        self.config = config
        super().__init__(
            {
                **command_members(arguments),
                "begin": Out(1),
                "pages": Out(1),
                "contexts_log2": Out(range(CONTEXT_BITS + 1)),
                "o": Out(stream.Signature(32)),
                "ended": In(1),
                "lost": In(1),
                "error": In(BusError),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Count what goes out and what has ended."""
        m = Module()
        values, sent, ended = self.values, Signal(32), Signal(32)
        m.d.comb += self.o.payload.eq(sent)
        with m.FSM():
            with m.State("WAIT-START"):
                m.d.sync += [sent.eq(0), ended.eq(0), self.contexts_log2.eq(0)]
                # The last that holds wins: the power of two not above `contexts`.
                for log2 in range(1, self.config.contexts.bit_length()):
                    with m.If(values.contexts >> log2 != 0):
                        m.d.sync += self.contexts_log2.eq(log2)
                await_start(m, self)
            with m.State("CHECK"):
                m.d.comb += self.begin.eq(1)
                m.next = "RUN"
                # Of several reasons the last one named is reported.
                for name, unit in (("completions", COMPLETION_BYTES), ("descriptors", DESCRIPTOR_BYTES)):
                    address = values[f"{name}_address"]
                    reject(m, self, address[: (unit - 1).bit_length()].any(), Status.MISALIGNED, address)
                reject(m, self, (values.count == 0) | (values.contexts == 0), Status.EMPTY)
                pages = (values.command == AttendCommand.PAGES) & bool(self.config.luns)
                too_many = values.count[NUMBER_BITS:].any()
                m.d.sync += self.pages.eq(pages)
                reject(m, self, Mux(pages, too_many, values.command != AttendCommand.HEADS), Status.UNSUPPORTED)
            with m.State("RUN"):
                m.d.comb += self.o.valid.eq(sent != values.count)
                with m.If(self.o.valid & self.o.ready):
                    m.d.sync += sent.eq(sent + 1)
                with m.If(self.ended):
                    m.d.sync += ended.eq(ended + 1)
                with m.If(ended == values.count):
                    m.next = "REPORT"
            with m.State("REPORT"):
                report(m, self, self.lost, Status.WRITE_ERROR, self.error.address)
                m.next = "FINISH"
            with m.State("FINISH"):
                finish(m, self)
        return m
