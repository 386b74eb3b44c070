"""Matrices of every format under stalls, and each damage, against what the model reads."""

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.bitmap import HEADER_BYTES, SECTION_BYTES, SECTIONS, Section, section_bytes
from nearflash.abi.topk import StreamFault
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.gateware.expand.matrix import MatrixCommand
from nearflash.gateware.expand.parser import MatrixParser
from nearflash.model.expand.bitmap import read_rows
from nearflash.sim.matrices import damaged, header_of, outcome
from nearflash.sim.stalls import STALLS
from nearflash.sim.streams import StreamUnit

COLUMNS_MAX = 1024
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


class Reporting(wiring.Component):
    """The parser; when a command has ended, its fault and the rows that were said, as an item of `o_end`.

    With `judge`, words and rows are taken as they come, and not shown.
    """

    def __init__(self, port_bits):
        self.parser = MatrixParser(port_bits, COLUMNS_MAX)
        members = dict(self.parser.signature.members.items())
        self.outputs = [name for name in members if name[:2] == "o_"]
        end = Out(stream.Signature(data.StructLayout({"fault": 3, "rows": 29})))
        super().__init__(
            {name: members[name] for name in ("i_command", "i", *self.outputs)} | {"o_end": end, "judge": In(1)}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.parser = parser = self.parser
        waiting, rows = Signal(), Signal(29)
        wiring.connect(m, parser.i, wiring.flipped(self.i))
        for o, shown in ((getattr(parser, name), getattr(self, name)) for name in self.outputs):
            m.d.comb += [
                shown.payload.eq(o.payload),
                shown.valid.eq(o.valid & ~self.judge),
                o.ready.eq(shown.ready | self.judge),
            ]
        m.d.comb += [
            parser.i_command.payload.eq(self.i_command.payload),
            parser.i_command.valid.eq(self.i_command.valid & ~waiting),
            self.i_command.ready.eq(parser.i_command.ready & ~waiting),
            self.o_end.valid.eq(waiting & parser.idle),
            self.o_end.payload.eq(Cat(parser.fault, rows)),
        ]
        with m.If(parser.o_row.valid & parser.o_row.ready):
            m.d.sync += rows.eq(rows + 1)
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += waiting.eq(1)
        with m.Elif(self.o_end.ready & self.o_end.valid):
            m.d.sync += [waiting.eq(0), rows.eq(0)]
        return m


@pytest.fixture(scope="module", params=[512, pytest.param(64, marks=pytest.mark.slow)])
def parser(request):
    """Of words of a block; those of eight to a block are the whole kernel's in its own test, too."""
    return StreamUnit(Reporting(request.param), f"matrix-parser-{request.param}")


def command(header, in_bytes):
    fields = MatrixCommand.const(
        {
            "in_bytes": in_bytes,
            "rows": header.rows,
            "columns": header.columns,
            "stated": {"element": header.element, "coding": header.coding, "output": header.output or 0},
            "row_format": header.row_format,
        }
    )
    return np.frombuffer(fields.as_value().value.to_bytes(16, "little"), np.uint32)


def words(unit, text):
    """Whole words of bytes, as the unit's ports take them."""
    size = unit.sources["i"].width // 8
    text = text[: len(text) // size * size]
    return np.frombuffer(text, np.uint64 if size == 8 else np.uint32).reshape((-1,) if size == 8 else (-1, size // 4))


def sections(unit, stream):
    """Words of each section's stream, without those of padding, and (values, escapes, codebook) of rows."""
    size, header = unit.sources["i"].width // 8, header_of(stream)
    found, rows, at = {section: b"" for section in Section}, [], HEADER_BYTES
    for row in read_rows(stream):
        begins = row.number % header.group_rows == 0
        at += SECTION_BYTES * (begins * (row.number > 0) + begins * bool(row.codebook))
        for section, bits in SECTIONS[header.row_format].items():
            count = bits * row.fields[section].size
            found[section] += stream[at : at + -(-count // (8 * size)) * size]
            at += section_bytes(count)
        escapes = row.fields.get(Section.ESCAPES, np.zeros(0)).size
        rows.append((row.fields[Section.VALUES].size, escapes, int.from_bytes(row.codebook, "little")))
    return {f"o_{section.name.lower()}": words(unit, text) for section, text in found.items()}, rows


@pytest.mark.parametrize("stalls", STALLS)
def test_every_section_goes_its_way(parser, stalls):
    """Command after command: rows of all lengths, groups of one row and of several, empty rows."""
    rng = np.random.default_rng(1)
    shapes = (((3, 70), 0.5), ((3, 1024), 0.9))
    cases = [(shape, density, form, 2) for form in MATRIX_FORMATS for shape, density in shapes]
    cases += [((2, 1), 1.0, MATRIX_FORMATS[0], 1), ((4, 600), 0.0, MATRIX_FORMATS[3], 3)]
    streams = [random_matrix(rng, *case) for case in cases]
    parts, rows = zip(*(sections(parser, stream) for stream in streams), strict=True)
    expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    inputs = {
        "i_command": np.array([command(header_of(stream), len(stream)) for stream in streams]),
        "i": np.concatenate([words(parser, stream) for stream in streams]),
    }
    counts = {name: len(items) for name, items in expected.items()}
    counts |= {"o_row": sum(map(len, rows)), "o_end": len(cases)}
    found = parser.run(inputs, counts, stalls=stalls, seed=1, timeout_cycles=1 << 17)
    for name, items in expected.items():
        np.testing.assert_array_equal(found[name], items, name)
    bits = COLUMNS_MAX.bit_length()
    for (values, escapes, codebook), said in zip((row for each in rows for row in each), found["o_row"], strict=True):
        assert int(said) & ((1 << bits) - 1) == values
        if codebook:
            assert int(said) >> bits == escapes | codebook << bits
    assert found["o_end"].tolist() == [len(each) << 3 for each in rows]


@each_format
@pytest.mark.parametrize("stalls", ["none", "both"])
def test_each_damage_is_named_as_the_model_does_and_the_next_matrix_is_read(parser, form, stalls):
    rng = np.random.default_rng(2)
    good = random_matrix(rng, (3, 130), 0.5, form, 2)
    header = header_of(good)
    streams = [each for bad in damaged(good, rng, flips=40) for each in (bad, good)]
    inputs = {
        "i_command": np.array([command(header, len(stream)) for stream in streams]),
        "i": np.concatenate([words(parser, stream) for stream in streams]),
    }
    found = parser.run(
        inputs, {"o_end": len(streams)}, stalls=stalls, seed=2, hold={"judge": 1}, timeout_cycles=1 << 20
    )["o_end"]
    ends = [(StreamFault(int(end & 7)), int(end) >> 3) for end in found]
    assert ends == [outcome(stream, header) for stream in streams]
