"""Matrices of every format under stalls, and each damage, against what the model reads."""

import numpy as np
import pytest

from nearflash.abi.topk import StreamFault
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.fixtures.matrices import damage, header_of, outcome
from nearflash.verify.units.weights.parser.vectors import ObservedParser, command, commands, sections, words

COLUMNS_MAX = 1024
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


@pytest.fixture(scope="module", params=[64, pytest.param(512, marks=pytest.mark.full)])
def parser(request):
    """Of words of a block; those of eight to a block are the whole kernel's in its own test, too."""
    return StreamUnit(ObservedParser(request.param, COLUMNS_MAX), f"matrix-parser-{request.param}")


@pytest.mark.parametrize("stalls", STALLS)
def test_every_section_goes_its_way(parser, stalls):
    """Command after command: rows of all lengths, groups of one row and of several, empty rows."""
    rng = np.random.default_rng(1)
    shapes = (((3, 70), 0.5), ((3, 1024), 0.9))
    cases = [(shape, density, form, 2) for form in MATRIX_FORMATS for shape, density in shapes]
    cases += [((2, 1), 1.0, MATRIX_FORMATS[0], 1), ((4, 600), 0.0, MATRIX_FORMATS[3], 3)]
    streams = [random_matrix(rng, *case) for case in cases]
    port_bits = parser.sources["i"].width
    parts, rows = zip(*(sections(stream, port_bits, COLUMNS_MAX) for stream in streams), strict=True)
    expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    inputs = {
        "i_command": commands([command(header_of(stream), len(stream)) for stream in streams]),
        "i": np.concatenate([words(stream, port_bits) for stream in streams]),
    }
    counts = {name: len(items) for name, items in expected.items()}
    counts |= {"o_row": sum(map(len, rows)), "o_end": len(cases)}
    found = parser.run(inputs, counts, stalls=stalls, seed=1, timeout_cycles=1 << 17)
    for name, items in expected.items():
        np.testing.assert_array_equal(found[name], items, name)
    assert found["o_row"].tolist() == [row for each in rows for row in each]
    assert found["o_end"].tolist() == [len(each) << 3 for each in rows]


@each_format
@pytest.mark.parametrize("stalls", ["none", "both"])
def test_each_damage_is_named_as_the_model_does_and_the_next_matrix_is_read(parser, form, stalls):
    rng = np.random.default_rng(2)
    good = random_matrix(rng, (3, 130), 0.5, form, 2)
    header = header_of(good)
    streams = [each for bad in damage(good, rng, flips=40) for each in (bad, good)]
    inputs = {
        "i_command": commands([command(header, len(stream), judge=True) for stream in streams]),
        "i": np.concatenate([words(stream, parser.sources["i"].width) for stream in streams]),
    }
    found = parser.run(inputs, {"o_end": len(streams)}, stalls=stalls, seed=2, timeout_cycles=1 << 20)["o_end"]
    ends = [(StreamFault(int(end & 7)), int(end) >> 3) for end in found]
    assert ends == [outcome(stream, header) for stream in streams]
