"""The `expand` kernel: one bitmap matrix, or coded weights, in device memory to dense rows.

    s_axi_control ─ RegisterFile ─ ExpandSequencer
                         │               │
    m_axi_gmem0 ──► BurstReader ─► MatrixParser ─► RowExpander ─► BurstWriter ──► m_axi_gmem1
                         └─────── counters ───────────┴───────────────┘

Contract: the registers of nearflash.abi.registers.EXPAND, started as an XRT kernel (ap_ctrl_chain). The rows of a good
matrix are written, row-major, each padded with zeros to a multiple of 64 bytes. A fault ends writing at the row where
it was met: whole rows before it may have been written, nothing of it or behind it. Builds with LevelFormats take coded
weights, too: each of their blocks is a row.

Timing: W elements a cycle while matrix and memory keep up; a row has a write burst of its own, so that short rows cost
more. What comes before a row's values takes time that only the values of the row before hide.
Numerics: equals nearflash.model.weights.bitmap.expand to the bit.
"""

from amaranth import Module, Mux, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from nearflash.abi.bitmap import SECTION_BYTES, ElementFormat, RowFormat
from nearflash.abi.kernel.config import ExpandConfig
from nearflash.abi.registers import EXPAND
from nearflash.gateware.bus.axi import Axi4Signature, connect_channels
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.gateware.bus.write import BurstWriter
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.stream.skid import SkidBuffer
from nearflash.gateware.top.control import connect_control, connect_counters, control_members
from nearflash.gateware.weights.matrix import is_levels
from nearflash.gateware.weights.parser import MatrixParser
from nearflash.gateware.weights.rows import RowExpander
from nearflash.gateware.weights.sequencer import ExpandSequencer

__all__ = ["ExpandKernel"]


class ExpandKernel(wiring.Component):
    """Top of the expand kernel.

    Parameters
    ----------
    config : build configuration.

    Members
    -------
    s_axi_control : In AxiLiteSignature, the register block.
    m_axi_gmem0, m_axi_gmem1 : Out Axi4Signature, `config.port_bits` wide; the first only reads, the second only writes.
    interrupt : Out, level.
    git_revision : In, first 32 bits of the git revision; tied by the board's wrapper, 0 in simulation.
    """

    def __init__(self, config: ExpandConfig) -> None:
        self.config = config
        ports = {f"m_axi_gmem{index}": Out(Axi4Signature(config.port_bits)) for index in range(config.ports)}
        super().__init__(control_members(EXPAND, ports))

    def elaborate(self, platform: object) -> Module:
        """Control on one side, data on the other; counters look at both."""
        m = Module()
        config, bursts = self.config, {
            "max_outstanding": self.config.outstanding_bursts, "max_burst_bytes": self.config.burst_bytes
        }  # fmt: skip
        formats = [form for form in RowFormat if form.name.lower() in config.formats]
        m.submodules.registers = registers = RegisterFile(EXPAND)
        m.submodules.sequencer = sequencer = ExpandSequencer(config, registers.values.shape())
        m.submodules.reader = reader = BurstReader(config.port_bits, **bursts)
        # Words come from block RAM, whose output is slow: a checksum of one in the same cycle is the longest path.
        m.submodules.words = words = SkidBuffer(reader.o.payload.shape())
        m.submodules.parser = parser = MatrixParser(config.port_bits, config.columns_max, config.levels)
        rows = RowExpander(config.width, config.port_bits, config.columns_max, formats, config.levels)
        m.submodules.rows = ResetInserter(sequencer.clear)(rows)
        m.submodules.writer = writer = BurstWriter(config.port_bits, **bursts)

        # Control.
        connect_control(m, self, registers, sequencer)
        m.d.comb += [
            sequencer.stream_fault.eq(parser.fault),
            sequencer.idle.eq(reader.idle & ~words.o.valid & parser.idle & rows.idle & writer.idle),
            sequencer.read_error.eq(reader.error),
            sequencer.write_error.eq(writer.error),
            reader.clear.eq(sequencer.clear),
            writer.clear.eq(sequencer.clear),
        ]

        # Data.
        for source, sink in (
            (sequencer.read, reader.i_command),
            (sequencer.matrix, parser.i_command),
            (reader.o, words.i),
            (words.o, parser.i),
            (parser.o_row, rows.i_row),
            *((getattr(parser, f"o_{name}"), getattr(rows, f"i_{name}")) for name in rows.streams),
        ):
            wiring.connect(m, source, sink)
        for name in parser.sections:
            if name not in rows.streams:
                m.d.comb += getattr(parser, f"o_{name}").ready.eq(1)
        connect_channels(m, reader.bus, self.m_axi_gmem0)
        connect_channels(m, writer.bus, self.m_axi_gmem1)
        m.d.comb += [
            rows.columns.eq(sequencer.matrix.payload.columns),
            rows.row_format.eq(sequencer.matrix.payload.row_format),
            rows.bf16.eq(sequencer.matrix.payload.stated.output == ElementFormat.BF16),
            writer.i.payload.data.eq(rows.o.payload),
            writer.i.payload.strb.eq(-1),
            writer.i.valid.eq(rows.o.valid),
            rows.o.ready.eq(writer.i.ready),
        ]
        if config.levels:
            m.d.comb += [rows.has_bitmap.eq(parser.has_bitmap), rows.wide.eq(parser.wide)]
        self._store(m, sequencer, rows, writer)
        self._count(m, registers, sequencer, reader, parser, rows, writer)
        return m

    def _store(self, m: Module, sequencer: ExpandSequencer, rows: RowExpander, writer: BurstWriter) -> None:
        """A write command for each row that is said."""
        matrix = sequencer.matrix.payload
        address, blocks = Signal(64), Signal(32)
        block_elements = [pieces(matrix.columns, SECTION_BYTES // size) for size in (1, 2)]
        row_blocks = Signal(32) if self.config.levels else blocks
        m.d.sync += row_blocks.eq(Mux(matrix.row_format == RowFormat.PLAIN8, *block_elements))  # stands before a row
        if self.config.levels:
            own = pieces(rows.o_row.payload.columns, SECTION_BYTES // 2)
            m.d.comb += blocks.eq(Mux(is_levels(matrix.row_format), own, row_blocks))
        m.d.comb += [
            writer.i_command.payload.address.eq(address),
            writer.i_command.payload.beats.eq(blocks * (SECTION_BYTES // self.config.port_bytes)),
            writer.i_command.valid.eq(rows.o_row.valid),
            rows.o_row.ready.eq(writer.i_command.ready),
        ]
        with m.If(rows.o_row.valid & rows.o_row.ready):
            m.d.sync += address.eq(address + blocks * SECTION_BYTES)
        with m.If(sequencer.clear):
            m.d.sync += address.eq(sequencer.values.out_address)

    def _count(
        self,
        m: Module,
        registers: RegisterFile,
        sequencer: ExpandSequencer,
        reader: BurstReader,
        parser: MatrixParser,
        rows: RowExpander,
        writer: BurstWriter,
    ) -> None:
        row = Signal()
        m.d.comb += row.eq(rows.o_row.valid & rows.o_row.ready)
        elements = rows.columns
        if self.config.levels:
            elements = Mux(is_levels(rows.row_format), rows.o_row.payload.columns, rows.columns)
        events = {
            "cycles": 1,
            "rows_done": row,
            "elements_done": Mux(row, elements, 0),
            "values_done": Mux(row, rows.o_row.payload.values, 0),
            "read_beats": reader.events.beat,
            "write_beats": writer.events.beat,
            "wait_read_cycles": parser.wait,
            "wait_write_cycles": rows.o.valid & ~rows.o.ready,
        }
        wide = dict.fromkeys(("elements_done", "values_done"), self.config.columns_max.bit_length())
        connect_counters(m, registers, sequencer, events, wide)
