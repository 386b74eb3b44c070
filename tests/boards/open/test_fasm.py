"""FASM lines: what they set, and what is none."""

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.fasm import Feature, parse


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("CLB_X0Y0.AFF.ZINI", [("AFF.ZINI", None)]),
        ("CLB_X0Y0.AFF.ZINI = 1", [("AFF.ZINI", None)]),
        ("CLB_X0Y0.AFF.ZINI = 1'b1", [("AFF.ZINI", None)]),
        ("CLB_X0Y0.AFF.ZINI = 0", []),
        ("CLB_X0Y0.INIT[7]", [("INIT", 7)]),
        ("CLB_X0Y0.INIT[7] = 0", []),
        ("CLB_X0Y0.INIT[7:4] = 4'b1010", [("INIT", 5), ("INIT", 7)]),
        ("CLB_X0Y0.INIT[7:4]=4'hA", [("INIT", 5), ("INIT", 7)]),
        ("CLB_X0Y0.INIT[15:12] = 'o12", [("INIT", 13), ("INIT", 15)]),
        ("CLB_X0Y0.INIT[3:0] = 4'd9", [("INIT", 0), ("INIT", 3)]),
        ("CLB_X0Y0.INIT[63:0] = 64'b" + "0" * 31 + "_1" + "0" * 32, [("INIT", 32)]),
        ("  CLB_X0Y0.A.B.C  # why", [("A.B.C", None)]),
        ('CLB_X0Y0.A.B { note = "x" }', [("A.B", None)]),
        ("# a comment", []),
        ("", []),
        ("{ .tool = 'x' }", []),
    ],
)
def test_lines(line, expected):
    assert list(parse([line])) == [Feature("CLB_X0Y0", name, index) for name, index in expected]


@pytest.mark.parametrize("line", ["CLB_X0Y0", "CLB_X0Y0.", ".A", "A.B[", "A.B[x]", "A.B = ", "A.B = z", "A.B C.D",
                                  "A.B[1:0] = 2'b12", "A.B = 1'q1"])  # fmt: skip
def test_what_is_no_fasm_is_named_with_its_line(line):
    with pytest.raises(FormatError, match=r"line 2 must be a FASM feature, not ['\"]"):
        list(parse(["# first", line]))


@pytest.mark.parametrize("line", ["A.B = 2", "A.B[1] = 2", "A.B[3:0] = 16", "A.B[3:0] = 5'h10", "A.B[0:3] = 0"])
def test_a_value_must_fit_its_bits(line):
    with pytest.raises(FormatError, match=r"line 1 must have a value of -?\d+ bits, not ['\"]"):
        list(parse([line]))


def test_a_feature_is_written_as_in_fasm():
    assert str(Feature("T", "A.B")) == "T.A.B"
    assert str(Feature("T", "A.B", 3)) == "T.A.B[3]"
