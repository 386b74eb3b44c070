"""Lint of emitted Verilog: waived warnings have reasons, others are complaints, and faults are found."""

import re

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.boards.vendor.kernel import convert_kernel
from nearflash.verify.lint import WAIVERS, LintReport, lint, lint_configs, verilator_warnings, yosys_problems

GOOD = """module good(input clk, input [3:0] a, output reg [3:0] q);
  always @(posedge clk) q <= a + 4'd1;
endmodule
"""
FAULTS = {
    "two drivers": (("aby", "aay"), "multiple conflicting drivers"),
    "undriven": (("acy",), "used but has no driver"),
    "loop": (("acy", "byc"), "found logic loop"),
}


@pytest.fixture(scope="module")
def report():
    """Of a whole small kernel."""
    return lint(convert_kernel(CONFIGS["expand-tiny"]), "expand-tiny")


def write(path, text):
    path.write_text(text)
    return path


def test_a_kernel_is_clean(report):
    assert isinstance(report, LintReport) and report.name == "expand-tiny" and report.complaints == ()
    assert report.waived["SYMRSVDWORD"] == 1, "the interrupt alone"


def test_every_waiver_is_needed_and_has_its_reason(report):
    assert {waiver.rule for waiver in WAIVERS} - report.waived.keys() == {"UNSIGNED"}, "only attend compares so"
    assert all(len(waiver.reason.split()) >= 4 and re.compile(waiver.text) for waiver in WAIVERS)


def gates(path, names):
    """RTLIL of AND gates whose names are those of two operands and the result: inputs a and b, output y, wire c."""
    widths = "".join(f"parameter \\{port}_WIDTH 1\n" for port in "ABY")
    cells = (
        f"cell $and \\{name}\nparameter \\A_SIGNED 0\nparameter \\B_SIGNED 0\n{widths}"
        + "".join(f"connect \\{port} \\{wire}\n" for port, wire in zip("ABY", name, strict=True))
        + "end\n"
        for name in names
    )
    wires = "wire input 1 \\a\nwire input 2 \\b\nwire output 3 \\y\nwire \\c\n"
    return write(path, f"module \\gates\n{wires}{''.join(cells)}end\n")


def test_a_good_module_has_neither_warning_nor_problem(tmp_path):
    assert verilator_warnings(write(tmp_path / "good.v", GOOD), "good") == ({}, [])
    assert yosys_problems(gates(tmp_path / "good.il", ("abc", "bcy")), "gates") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_yosys_finds_a_fault(tmp_path, fault):
    names, message = FAULTS[fault]
    assert any(message in problem for problem in yosys_problems(gates(tmp_path / "bad.il", names), "gates"))


def test_verilator_complains_about_a_latch_and_an_unknown_module(tmp_path):
    latch = "module bad(input a, input b, output reg q);\n  always @* if (a) q = b;\nendmodule\n"
    _, complaints = verilator_warnings(write(tmp_path / "bad.v", latch), "bad")
    assert len(complaints) == 1 and complaints[0].startswith("bad.v:2: LATCH: ")
    _, complaints = verilator_warnings(write(tmp_path / "bad.v", "module bad;\n  other o();\nendmodule\n"), "bad")
    assert any("MODMISSING" in each or "other" in each for each in complaints)


def test_another_reserved_word_is_not_waived(tmp_path):
    path = write(tmp_path / "bad.v", "module bad(input new, output q);\n  assign q = new;\nendmodule\n")
    _, complaints = verilator_warnings(path, "bad")
    assert complaints


def test_what_yosys_cannot_read_is_a_problem(tmp_path):
    path = write(tmp_path / "bad.il", "module bad(\n")
    assert yosys_problems(path, "bad")[0].startswith("bad.il: yosys must finish its check:")


def test_unknown_configurations_are_rejected_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"configuration must be one of .*, not 'expand-huge'"):
        next(lint_configs(["expand-tiny", "expand-huge"]))


def test_without_names_what_stands_for_a_phy_comes_first(monkeypatch):
    monkeypatch.setattr("nearflash.verify.lint.CONFIGS", {})
    (found,) = lint_configs()
    assert (found.name, found.complaints) == ("nand_phy", ())


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kernel_is_clean(name):
    """A minute or several each."""
    (found,) = lint_configs([name])
    assert found.complaints == ()
