"""`nearflash hls analyze`: operations counted by running the struct, rates by hand, synthesis reports."""

import math

import pytest

from nearflash.abi.errors import FormatError
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep, LionStep, Profile, SgdStep
from nearflash.cli.main import main
from nearflash.sim.hls.analyze import LATENCY_CYCLES, KernelHost, count_operations, estimate
from nearflash.sim.hls.kernels import call_of
from nearflash.sim.hls.report import Loop, read_report

SMARTSSD = update_config("update-smartssd")
CSYNTH = """<?xml version="1.0"?>
<profile>
  <ReportVersion><Version>2023.2</Version></ReportVersion>
  <UserAssignments>
    <unit>ns</unit><Part>xcku15p-ffva1156-2LV-e</Part><TopModelName>update_adamw</TopModelName>
    <TargetClockPeriod>3.33</TargetClockPeriod>
  </UserAssignments>
  <PerformanceEstimates>
    <SummaryOfTimingAnalysis><unit>ns</unit><EstimatedClockPeriod>4.000</EstimatedClockPeriod></SummaryOfTimingAnalysis>
    <SummaryOfLoopLatency>
      <VITIS_LOOP_88_1>
        <TripCount>undef</TripCount><PipelineII>2</PipelineII><PipelineDepth>151</PipelineDepth>
      </VITIS_LOOP_88_1>
      <VITIS_LOOP_90_2><PipelineII>undef</PipelineII></VITIS_LOOP_90_2>
    </SummaryOfLoopLatency>
  </PerformanceEstimates>
  <AreaEstimates><Resources><BRAM_18K>48</BRAM_18K><DSP>96</DSP><LUT>61234</LUT></Resources></AreaEstimates>
</profile>
"""


def call(rule):
    return [call_of(rule)]


def test_operations_are_those_of_the_formulas():
    """docs/contracts/numerics.md, counted by hand; the longest path of AdamW goes through v, root, quotient and p."""
    options = {"lr": 1e-3, "step": 2, "weight_decay": 0.1}
    none = dict.fromkeys(LATENCY_CYCLES, 0)
    counts, depth = count_operations(call(AdamStep(**options)))
    assert counts == none | {"add": 4, "mul": 7, "div": 2, "sqrt": 1, "compare": 1}
    path = ("mul", "mul", "add", "sqrt", "div", "add", "div", "mul", "add")
    assert depth == sum(LATENCY_CYCLES[name] for name in path)
    counts, _ = count_operations(call(AdamStep(**options, profile=Profile.DEEPSPEED)))
    assert counts == none | {"mul": 3, "fma": 5, "div": 1, "sqrt": 1, "compare": 1}
    counts, depth = count_operations(call(SgdStep(0.1, 2)))
    assert counts == none | {"mul": 1, "add": 1, "compare": 1}
    assert depth == LATENCY_CYCLES["mul"] + LATENCY_CYCLES["add"]
    counts, _ = count_operations(call(LionStep(1e-3, 2)))
    assert counts["compare"] == 3 and counts["mul"] == 6 and counts["add"] == 3


def test_the_lowest_rate_binds():
    rule = call(AdamStep(1e-3, 2))
    found = estimate(rule, SMARTSSD, KernelHost(flash_bytes_per_s=3.3e9, ddr_bytes_per_s=19.2e9))
    assert found.rates == {"lanes": 1.2e9, "port": 4.8e9, "DDR": 19.2e9 / 60, "flash": 3.3e9 / 12}
    assert found.bound == "flash" and found.ii == 1
    assert estimate(rule, SMARTSSD, KernelHost(flash_bytes_per_s=14e9)).bound == "DDR"
    assert estimate(rule, SMARTSSD, KernelHost(1e12, 1e12)).bound == "lanes"
    assert estimate(rule, SMARTSSD, KernelHost(1e12, 1e12), ii=2, clock_hz=250e6).rates["lanes"] == 0.5e9


def test_a_synthesis_report_gives_clock_ii_and_resources(tmp_path, capsys):
    path = tmp_path / "update_adamw_csynth.xml"
    path.write_text(CSYNTH)
    report = read_report(path)
    assert (report.top, report.part) == ("update_adamw", "xcku15p-ffva1156-2LV-e")
    assert report.clock_hz == 250e6 and report.slowest_ii == 2
    assert report.loops == (Loop("update_adamw", "VITIS_LOOP_88_1", 2, 151),)
    assert report.resources == {"BRAM_18K": 48, "DSP": 96, "LUT": 61234}
    assert main(["hls", "analyze", "adamw", "--report", str(path), "--flash", "1000", "--ddr", "1000"]) == 0
    text = capsys.readouterr().out
    assert main(["hls", "analyze", "--report", str(path), "--flash", "1000", "--ddr", "1000"]) == 0
    assert capsys.readouterr().out == text, "the report names the kernel"
    assert main(["hls", "analyze"]) == 2 and "must be given" in capsys.readouterr().err
    assert "250 MHz, II 2 (of the report)" in text and "500 M parameters/s   <- binds" in text and "DSP 96" in text


def test_a_report_of_a_design_has_loops_by_module(tmp_path):
    path = tmp_path / "csynth.xml"
    module = "<Module><Name>update</Name>{}</Module>".format(
        CSYNTH[CSYNTH.index("<PerformanceEstimates>") : CSYNTH.index("<AreaEstimates>")]
    )
    head = CSYNTH[CSYNTH.index("<UserAssignments>") : CSYNTH.index("<PerformanceEstimates>")]
    path.write_text(f"<profile>{head}<ModuleInformation>{module}</ModuleInformation></profile>")
    report = read_report(path)
    assert report.loops == (Loop("update", "VITIS_LOOP_88_1", 2, 151),)
    assert report.estimated_ns == 4 and report.resources == {}
    path.write_text(f"<profile>{head}</profile>")
    assert math.isnan(read_report(path).estimated_ns) and read_report(path).clock_hz == pytest.approx(1e9 / 3.33)


@pytest.mark.parametrize("text", ["", "not xml", "<profile></profile>"])
def test_another_file_is_no_report(tmp_path, text):
    path = tmp_path / "csynth.xml"
    path.write_text(text)
    with pytest.raises(FormatError, match="must be a Vitis HLS report"):
        read_report(path)
