"""Vectors of the matrix parser: good matrices of every format, with all their words, and damaged ones between them.

Of damaged matrices the fault and the rows are looked at alone: words of a row that is not reported mean nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.bitmap import (
    CODEBOOK_ENTRIES,
    GROUP_END,
    HEADER_BYTES,
    SECTION_BYTES,
    SECTIONS,
    BitmapHeader,
    Coding,
    Section,
    section_bytes,
)
from nearflash.abi.crc import crc32c
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.gateware.weights.matrix import CODED, MatrixCommand
from nearflash.gateware.weights.parser import MatrixParser
from nearflash.model.weights.bitmap import read_rows
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.fixtures.matrices import damage, header_of, odd, outcome, seal
from nearflash.verify.mutants.observed import gate
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedParser", "command", "commands", "component", "sections", "vectors", "words"]

_PORT_BITS, _COLUMNS_MAX = 64, 512
_MATRICES, _DAMAGED, _HEADERS = 8, 20, 8
_LONG, _TALL, _RARELY = 1 << 17, 13, 6
"""Words of a command without a header; bits of many rows' number; one batch in so many has them."""
_PADDING = range(32, HEADER_BYTES - 4)
"""Bytes of a header that nobody looks at."""
_COMMAND = data.StructLayout({"command": MatrixCommand, "judge": 1})


class ObservedParser(wiring.Component):
    """MatrixParser as `inner`; `o_end`: fault and reported rows of each command that has ended.

    The words and rows of a command with `judge` are taken as they come, and not shown.
    """

    def __init__(self, port_bits: int, columns_max: int) -> None:
        self.inner = MatrixParser(port_bits, columns_max)
        members = dict(self.inner.signature.members.items())
        self._outputs = [name for name in members if name[:2] == "o_"]
        end = Out(stream.Signature(data.StructLayout({"fault": 3, "rows": 29})))
        kept = {name: members[name] for name in ("i", *self._outputs)}
        super().__init__({"i_command": In(stream.Signature(_COMMAND)), **kept, "o_end": end})

    def elaborate(self, platform: Any) -> Module:
        """Hold the next command back until the end of the one before was reported."""
        m = Module()
        m.submodules.inner = parser = self.inner
        waiting, coded, judge, rows = Signal(), Signal(), Signal(), Signal(29)
        wiring.connect(m, parser.i, wiring.flipped(self.i))

        def row(payload: Any) -> Any:
            """Only coded rows have escapes and a codebook."""
            bits = len(payload.values)
            rest = Mux(coded, payload.as_value()[bits:], Const(0, payload.shape().size - bits))
            return Cat(payload.values, rest)

        for name in self._outputs:
            o, shown = getattr(parser, name), stream.Signature(getattr(parser, name).payload.shape()).create()
            gate(m, o, shown, row if name == "o_row" else None)
            port = getattr(self, name)
            m.d.comb += [
                port.payload.eq(Mux(judge, 0, _bits(shown))),
                port.valid.eq(shown.valid & ~judge),
                shown.ready.eq(port.ready | judge),
            ]
        m.d.comb += [
            parser.i_command.payload.eq(self.i_command.payload.command),
            parser.i_command.valid.eq(self.i_command.valid & ~waiting),
            self.i_command.ready.eq(parser.i_command.ready & ~waiting),
            self.o_end.valid.eq(waiting & parser.idle),
            self.o_end.payload.eq(Mux(self.o_end.valid, Cat(parser.fault, rows), 0)),
        ]
        with m.If(parser.o_row.valid & parser.o_row.ready):
            m.d.sync += rows.eq(rows + 1)
        with m.If(self.i_command.valid & self.i_command.ready):
            form = self.i_command.payload.command.row_format
            m.d.sync += [waiting.eq(1), judge.eq(self.i_command.payload.judge)]
            m.d.sync += [coded.eq(Cat(form == each for each in CODED).any())]
        with m.Elif(self.o_end.ready & self.o_end.valid):
            m.d.sync += [waiting.eq(0), rows.eq(0)]
        return m


def _bits(source: Any) -> Any:
    return Value.cast(source.payload)


def component() -> ObservedParser:
    """The smallest one."""
    return ObservedParser(_PORT_BITS, _COLUMNS_MAX)


def command(header: BitmapHeader, in_bytes: int, *, judge: bool = False) -> int:
    """The command for the matrix of this header, in so many bytes."""
    fields = MatrixCommand.const(
        {
            "in_bytes": in_bytes,
            "rows": header.rows,
            "columns": header.columns,
            "stated": {"element": header.element, "coding": header.coding, "output": header.output or 0},
            "row_format": header.row_format,
        }
    )
    return int(fields.as_value().value) | judge << MatrixCommand.as_shape().size


def commands(numbers: Sequence[int]) -> NDArray[np.uint32]:
    """As the port takes them."""
    return words_from_integers(numbers, _COMMAND.size)


def words(text: bytes, port_bits: int) -> NDArray[Any]:
    """Whole words of bytes, as a port takes them."""
    size = port_bits // 8
    text = text[: len(text) // size * size]
    return np.frombuffer(text, np.uint64 if size == 8 else np.uint32).reshape((-1,) if size == 8 else (-1, size // 4))


def sections(stream: bytes, port_bits: int, columns_max: int) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Words of each section's stream, without those of padding, and payloads of rows."""
    size, header, count_bits = port_bits // 8, header_of(stream), columns_max.bit_length()
    payloads, rows, at = {section: b"" for section in Section}, [], HEADER_BYTES
    for row in read_rows(stream):
        begins = row.number % header.group_rows == 0
        at += SECTION_BYTES * (begins * (row.number > 0) + begins * bool(row.codebook))
        for section, bits in SECTIONS[header.row_format].items():
            count = bits * row.fields[section].size
            payloads[section] += stream[at : at + -(-count // (8 * size)) * size]
            at += section_bytes(count)
        rows.append(row.fields[Section.VALUES].size)
        if row.codebook:
            escapes = row.fields[Section.ESCAPES].size
            rows[-1] |= escapes << count_bits | int.from_bytes(row.codebook, "little") << 2 * count_bits
    return {f"o_{section.name.lower()}": words(text, port_bits) for section, text in payloads.items()}, rows


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Half of the matrices are damaged; the last command has more than a run could bring.

    The first ones move the upper bits of counts, by many rows of every size of groups, and now and then by many words
    without a header.
    """
    given, texts, ends = [], list[bytes](), list[int]()
    parts, rows = list[dict[str, NDArray[Any]]](), list[int]()
    heights = [int(rng.integers(3, 1 << 8))]
    if rng.integers(_RARELY) == 0:
        text, header = rng.bytes(8 * (_LONG + int(rng.integers(_LONG)))), header_of(_random(rng, 1))
        given.append(command(header, len(text), judge=True))
        texts.append(text)
        ends.append(outcome(text, header)[0])
        heights.append((1 << _TALL) + int(rng.integers(1 << _TALL)))
    for height in heights:
        tall = _make_tall(rng, height)
        given.append(command(header_of(tall), len(tall), judge=True))
        texts.append(tall)
        ends.append(height << 3)
    for _ in range(_MATRICES):
        for text, header in _judge(rng):
            fault, count = outcome(text, header)
            given.append(command(header, len(text), judge=True))
            texts.append(text)
            ends.append(fault | count << 3)
        good = _random(rng, int(rng.integers(1, 4)))
        words_of, rows_of = sections(good, _PORT_BITS, _COLUMNS_MAX)
        given.append(command(header_of(good), len(good)))
        texts.append(good)
        ends.append(len(rows_of) << 3)
        parts.append(words_of)
        rows += rows_of
    endless = _random(rng, 4)
    words_of, rows_of = sections(endless, _PORT_BITS, _COLUMNS_MAX)
    header = header_of(endless)
    header = replace(
        header,
        rows=header.rows + int(rng.integers(1, 1 << 31)),
        group_rows=header.rows + int(rng.integers(1, 1 << 31)),
        stream_bytes=int(rng.integers(1, 1 << 15)) << 17,
    )
    given.append(command(header, header.stream_bytes))
    texts.append(header.pack() + endless[HEADER_BYTES:-SECTION_BYTES])
    parts.append(words_of)
    inputs = {"i_command": commands(given), "i": np.concatenate([words(text, _PORT_BITS) for text in texts])}
    expected: dict[str, NDArray[Any]] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    expected["o_row"] = np.array(rows + rows_of, np.uint64)
    return inputs, expected | {"o_end": np.array(ends, np.uint32)}


def _columns(rng: np.random.Generator) -> int:
    """Any number, or one about a word's or the longest."""
    return int(rng.choice([1, 64, 65, 511, _COLUMNS_MAX]) if rng.integers(2) else rng.integers(1, _COLUMNS_MAX + 1))


def _random(rng: np.random.Generator, group_rows: int) -> bytes:
    shape = int(rng.integers(1, 5)), _columns(rng)
    density, form = rng.choice([0, 0.1, 0.5, 0.9, 1]), MATRIX_FORMATS[int(rng.integers(len(MATRIX_FORMATS)))]
    made = random_matrix(rng, shape, density, form, group_rows)
    header = header_of(made)
    if header.coding is Coding.PLAIN or header.groups > 1:
        return made
    body = rng.bytes(CODEBOOK_ENTRIES) + made[HEADER_BYTES + CODEBOOK_ENTRIES : -SECTION_BYTES]
    return made[:HEADER_BYTES] + body + GROUP_END.pack(0, crc32c(body))


def _make_tall(rng: np.random.Generator, rows: int) -> bytes:
    """Empty rows: each a group, groups of any number of them, or two of them in a second group."""
    group_rows = [1, rows - 2, *rng.integers(2, 1 << 7, 2).tolist()][int(rng.integers(4))]
    return random_matrix(rng, (rows, 1), 0, MATRIX_FORMATS[int(rng.integers(len(MATRIX_FORMATS)))], group_rows)


def _judge(rng: np.random.Generator) -> list[tuple[bytes, BitmapHeader]]:
    """Damaged matrices, and the headers that they were to have."""
    first, second = (MATRIX_FORMATS[int(rng.integers(len(MATRIX_FORMATS)))] for _ in range(2))
    good = random_matrix(rng, (3, int(rng.integers(2, 200))), 0.5, first, 2)
    whole = random_matrix(rng, (2, int(rng.integers(2, 300))), 0.5, second, 9)
    bad = [*damage(good, rng, flips=20)]
    judged = [(bad[index], header_of(good)) for index in rng.choice(len(bad), _DAMAGED, replace=False)]
    judged += [(text, header_of(whole)) for text in (*_other_headers(whole, rng), *odd(whole, rng, 5))]
    judged += [(text, header_of(whole)) for text in _beyond(whole, rng)]
    header = header_of(good)
    others = (header.rows + (1 << bit) for bit in rng.choice(32, 2, replace=False).tolist())
    return judged + [(good, replace(header, rows=rows % (1 << 32))) for rows in others]


def _beyond(stream: bytes, rng: np.random.Generator) -> list[bytes]:
    """A one behind the columns of the first row, most often among the next ones."""
    header = header_of(stream)
    at = HEADER_BYTES + SECTION_BYTES * (header.coding is not Coding.PLAIN)
    changed, behind = [], np.arange(header.columns, 8 * section_bytes(header.columns))
    for bit in {*behind[:1].tolist(), *rng.permutation(behind[:64])[:6].tolist(), *behind[-1:].tolist()}:
        body = bytearray(stream[HEADER_BYTES:-SECTION_BYTES])
        body[at - HEADER_BYTES + bit // 8] |= 1 << bit % 8
        changed.append(stream[:HEADER_BYTES] + body + GROUP_END.pack(0, crc32c(bytes(body))))
    return changed


def _other_headers(stream: bytes, rng: np.random.Generator) -> list[bytes]:
    """Change headers of a matrix of one group: other rows a group, other padding, often a bit wrong; checksums fit."""
    changed = []
    for bit in rng.choice(8 * _PADDING.start, _HEADERS, replace=False):
        header = replace(header_of(stream), group_rows=int(rng.integers(2, 1 << 32))).pack()
        text = bytearray(header[: _PADDING.start] + rng.bytes(len(_PADDING)) + stream[_PADDING.stop :])
        text[bit // 8] ^= int(rng.integers(4) > 0) << bit % 8
        changed.append(seal(bytes(text)))
    return changed


TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=24, cut_cycles=(9, 20, 33, 300))
