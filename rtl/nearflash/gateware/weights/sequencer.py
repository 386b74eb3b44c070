"""Sequencer: runs one expand command from `start` to `done`.

Contract: a command that is misaligned, empty, or more than the build can do ends at once, nothing read or written; any
other goes to the parser and the reader and ends when all is idle. A bus error becomes status and fault address, reads
before writes; without one, a fault of the matrix does, with the matrix's address. Status and fault address stand still
from `done` to the next `start`.

Timing: `done` comes at the earliest 2 cycles after `start`; back-pressure: waits for reader, parser, rows and writer.
"""

from typing import Any

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import SECTION_BYTES, Coding, ElementFormat, RowFormat, row_format
from nearflash.abi.coded import LevelFormat
from nearflash.abi.errors import FormatError
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import ExpandConfig
from nearflash.abi.topk import StreamFault
from nearflash.gateware.bus.command import await_start, command_members, finish, reject, report
from nearflash.gateware.bus.transfer import BusError, TransferCommand
from nearflash.gateware.weights.matrix import MatrixCommand

__all__ = ["ExpandSequencer"]


class ExpandSequencer(wiring.Component):
    """Control of the expand kernel.

    Parameters
    ----------
    config : build configuration.
    arguments : layout of the kernel's read-write registers; `values` has it.

    Members
    -------
    values : In, arguments; must stay as they are until `done`.
    start : In, pulse. done : Out, pulse.
    read : Out stream of TransferCommand. matrix : Out stream of MatrixCommand, which stands until `done`.
    stream_fault : In, StreamFault of the parser.
    idle : In, nothing is in flight. read_error, write_error : In, BusError.
    clear : Out, forgets the bus errors of the command before, and rows that were not reported.
    status : Out, Status code. fault_address : Out, byte address of the first fault.
    """

    def __init__(self, config: ExpandConfig, arguments: Any) -> None:
        self.config = config
        super().__init__(
            {
                **command_members(arguments),
                "read": Out(stream.Signature(TransferCommand)),
                "matrix": Out(stream.Signature(MatrixCommand)),
                "stream_fault": In(StreamFault),
                "idle": In(1),
                "read_error": In(BusError),
                "write_error": In(BusError),
                "clear": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Arguments to commands; then the states of a command."""
        m = Module()
        values, known = self.values, Signal()
        m.d.comb += [
            self.read.payload.address.eq(values.in_address),
            self.read.payload.beats.eq(values.in_bytes >> (self.config.port_bytes.bit_length() - 1)),
            self.matrix.payload.in_bytes.eq(values.in_bytes),
            self.matrix.payload.rows.eq(values.rows),
            self.matrix.payload.columns.eq(values.columns),
            *(self.matrix.payload.stated[name].eq(values.format[name]) for name in ("element", "coding", "output")),
        ]
        self._format(m, known)
        checks = self._checks(m, known)

        with m.FSM():
            with m.State("WAIT-START"):
                m.d.comb += self.clear.eq(1)
                await_start(m, self)
            with m.State("CHECK"):
                m.next = "COMMAND-PARSER"
                for check in checks:
                    reject(m, self, *check)
            with m.State("COMMAND-PARSER"):
                m.d.comb += self.matrix.valid.eq(1)
                with m.If(self.matrix.ready):
                    m.next = "COMMAND-READER"
            with m.State("COMMAND-READER"):
                m.d.comb += self.read.valid.eq(1)
                with m.If(self.read.ready):
                    m.next = "WAIT-IDLE"
            with m.State("WAIT-IDLE"):
                with m.If(self.idle):
                    m.next = "REPORT"
            with m.State("REPORT"):
                self._report(m)
                m.next = "FINISH"
            with m.State("FINISH"):
                finish(m, self)
        return m

    def _format(self, m: Module, known: Signal) -> None:
        """Row format of the arguments, where the build has it; registers, as arguments stand before `start`."""
        form = self.values.format
        # Argument registers stand long before `start`: a register here costs no cycle.
        m.d.sync += known.eq(0)
        with m.Switch(Cat(form.element, form.coding, form.output)):
            for element in ElementFormat:
                for coding in Coding:
                    for output in (None, ElementFormat.FP16, ElementFormat.BF16):
                        found = _row_format(element, coding, output)
                        if found is None or found.name.lower() not in self.config.formats:
                            continue
                        with m.Case(element | coding << 8 | (output or 0) << 16):
                            m.d.sync += [known.eq(1), self.matrix.payload.row_format.eq(found)]
            for levels in LevelFormat:
                if levels.name.lower() in self.config.formats:
                    with m.Case(levels.element | Coding.LEVELS << 8):
                        m.d.sync += [known.eq(1), self.matrix.payload.row_format.eq(levels)]

    def _checks(self, m: Module, known: Signal) -> list[tuple[Any, ...]]:
        """List reasons to reject a command: condition, status and perhaps an address; registers, as arguments stand."""
        values, offset_bits = self.values, SECTION_BYTES.bit_length() - 1
        wide, empty = Signal(), Signal()
        m.d.sync += [
            wide.eq(values.columns > self.config.columns_max),
            empty.eq((values.rows == 0) | (values.columns == 0) | (values.in_bytes == 0)),
        ]
        checks: list[tuple[Any, ...]] = []
        for name in ("out_address", "in_address"):
            address, misaligned = getattr(values, name), Signal(name=f"{name}_misaligned")
            m.d.sync += misaligned.eq(address[:offset_bits].any())
            checks.append((misaligned, Status.MISALIGNED, address))
        return [*checks, (~known | wide, Status.UNSUPPORTED), (empty, Status.EMPTY)]

    def _report(self, m: Module) -> None:
        stream_status = Status.STREAM_HEADER - StreamFault.HEADER + self.stream_fault
        # Before bus errors: the last one wins, and a read that failed explains a broken stream.
        report(m, self, self.stream_fault != StreamFault.NONE, stream_status, self.values.in_address)
        for error, status in ((self.write_error, Status.WRITE_ERROR), (self.read_error, Status.READ_ERROR)):
            report(m, self, error.seen, status, error.address)


def _row_format(element: ElementFormat, coding: Coding, output: ElementFormat | None) -> RowFormat | None:
    try:
        return row_format(element, coding, output)
    except FormatError:
        return None
