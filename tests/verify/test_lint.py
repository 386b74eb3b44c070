"""Lint of emitted Verilog: waived warnings have reasons, others are complaints, and faults are found."""

import re

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.abi.errors import ConfigError
from nearflash.boards.vendor.kernel import convert_kernel
from nearflash.verify.lint import WAIVERS, LintReport, lint, lint_configs, verilator_warnings, yosys_problems

GOOD = """module good(input clk, input [3:0] a, output reg [3:0] q);
  always @(posedge clk) q <= a + 4'd1;
endmodule
"""
FAULTS = {
    "two drivers": ("input b, output y);\n  assign y = a & b;\n  assign y = a | b;\n", "multiple conflicting drivers"),
    "undriven": ("output y);\n  wire inner;\n  assign y = a & inner;\n", "used but has no driver"),
    "loop": ("output y);\n  wire inner;\n  assign inner = a ^ y;\n  assign y = ~inner;\n", "found logic loop"),
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


def test_a_good_module_has_neither_warning_nor_problem(tmp_path):
    path = write(tmp_path / "good.v", GOOD)
    assert verilator_warnings(path, "good") == ({}, [])
    assert yosys_problems(path, "good") == []


@pytest.mark.parametrize("fault", FAULTS)
def test_yosys_finds_a_fault(tmp_path, fault):
    body, message = FAULTS[fault]
    path = write(tmp_path / "bad.v", f"module bad(input a, {body}endmodule\n")
    assert any(message in problem for problem in yosys_problems(path, "bad"))


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
    path = write(tmp_path / "bad.v", "module bad(\n")
    assert yosys_problems(path, "bad")[0].startswith("bad.v: yosys must finish its check:")


def test_unknown_configurations_are_rejected_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"configuration must be one of .*, not 'expand-huge'"):
        next(lint_configs(["expand-tiny", "expand-huge"]))


def test_without_names_what_stands_for_a_phy_comes_first(monkeypatch):
    monkeypatch.setattr("nearflash.verify.lint.CONFIGS", {})
    (found,) = lint_configs()
    assert (found.name, found.complaints) == ("nand_phy", ())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kernel_is_clean(name):
    """Minutes each, up to half an hour for the largest."""
    (found,) = lint_configs([name])
    assert found.complaints == ()
