"""What nextpnr is called with, and what its report states."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.nextpnr.timing import BlockDelays
from nearflash.boards.open.packages import SidPrograms
from nearflash.boards.open.routing import constraints, count_unresolvable, parse_report, route
from nearflash.device.bitstreams.board import Routing


def step(kind, delay, cell, net=None):
    ends = {"from": {"cell": "before", "loc": "X1Y1", "port": "Q"}, "to": {"cell": cell, "loc": "X1Y2", "port": "D"}}
    return {"type": kind, "delay": delay, **ends, **({"net": net} if net else {})}


REPORT = {
    "fmax": {"clk": {"achieved": 101.239, "constraint": 100.0}, "slow": {"achieved": 90.5, "constraint": 100.0}},
    "critical_paths": [
        {"from": "async", "to": "posedge slow", "path": [step("routing", 30.0, "pad", "led")]},
        {"from": "posedge clk", "to": "posedge clk", "path": [step("logic", 1.0, "other")]},
        {"from": "posedge slow", "to": "posedge slow", "path": [
            step("clk-to-q", 0.34, "sum_reg"), step("routing", 1.234, "lut", "lane.sum"),
            step("setup", 0.05, "quotient")]},
    ],
    "utilization": {"SLICE_LUTX": {"available": 100, "used": 7}, "PAD": {"available": 9, "used": 0}},
}  # fmt: skip


def test_the_slowest_clock_and_its_own_path_count():
    routed = parse_report(REPORT)
    assert routed.fmax_hz == 90_500_000
    assert routed.critical_path == ("0.34 ns clk-to-q sum_reg", "1.23 ns routing lane.sum", "0.05 ns setup quotient")
    assert routed.sites == {"SLICE_LUTX": 7}


def test_a_design_without_a_clock_is_an_error():
    with pytest.raises(FormatError, match="report must have the fmax of a clock"):
        parse_report({"fmax": {}})


class Recorder(SidPrograms):
    """Programs that write down how they are called, and a report; they reroute late connections for ever if told so."""

    late = 0

    def run(self, program, *arguments, log, stop=None):
        options = [str(argument) for argument in arguments]
        (self.root / "call.json").write_text(json.dumps([program, *options]))
        report = options[options.index("--report") + 1]
        (self.root / report).write_text(json.dumps(REPORT))
        return router_log([(0, self.late)] * 60) if stop and self.late else ""

    def chip_database(self, device):
        return self.root / f"{device}.bin"


def routed_call(folder, **delays):
    """What `route` returns, and the options that nextpnr got."""
    made = route(Recorder(folder, {}), "xc7z020clg400-1", "xc7z020", folder / "top.json", folder / "top.xdc", delays,
                 (), Routing(freq_hz=83_300_000, seed=7))  # fmt: skip
    return made, json.loads((folder / "call.json").read_text())


def test_nextpnr_gets_part_constraints_aim_and_a_fixed_seed(tmp_path, chip_file):
    (tmp_path / "xc7z020.bin").write_bytes(chip_file({}))
    (routed, fasm), (program, *options) = routed_call(tmp_path)
    assert routed == parse_report(REPORT) and fasm == tmp_path / "top.fasm"
    assert program == "nextpnr-himbaechel-xilinx"
    pairs = dict(zip(options[::2], options[1::2], strict=False))
    assert (pairs["--device"], pairs["--freq"], pairs["--seed"]) == ("xc7z020clg400-1", "83.3", "7")
    assert f"xdc={tmp_path}/top.xdc" in options and f"fasm={tmp_path}/top.fasm" in options
    assert "--randomize-seed" not in options
    # Regression: with several threads the placer sometimes gave another result for the same design and seed.
    assert pairs["--threads"] == "1"


def test_nextpnr_gets_the_corrected_chip_database(tmp_path, chip_file):
    (tmp_path / "xc7z020.bin").write_bytes(chip_file({"INT_L": {"IMUX_L0": 1}}))
    _, options = routed_call(tmp_path)
    assert options[options.index("--chipdb") + 1] == f"{tmp_path}/top.chipdb.bin"
    assert (tmp_path / "top.chipdb.bin").read_bytes() == (tmp_path / "xc7z020.bin").read_bytes()


def test_nextpnr_packs_cells_of_their_blocks_own_types(tmp_path, chip_file):
    (tmp_path / "xc7z020.bin").write_bytes(chip_file({}))
    _, options = routed_call(tmp_path, DSP48E1_0=BlockDelays(), DSP48E1_12=BlockDelays(), PS7_0=BlockDelays())
    kinds = ["DSP48E1_0", "DSP48E1_12", "PS7_0", "FDRE", "DSP48E1_3"]
    cells = {kind: SimpleNamespace(type=kind) for kind in kinds}
    hook = Path(options[options.index("--pre-pack") + 1]).read_text()
    exec(hook, {"ctx": SimpleNamespace(cells=cells.items())})
    assert [cell.type for cell in cells.values()] == ["DSP48E1", "DSP48E1", "PS7", "FDRE", "DSP48E1_3"]


def test_a_chip_database_of_another_version_is_used_as_it_is_with_a_warning(tmp_path, chip_file):
    (tmp_path / "xc7z020.bin").write_bytes(chip_file({}, version=7))
    message = (
        "nets of the processor block take seconds each to route, and Fmax leaves out DSP slices and the processor "
        "block: .* of version 6, not 0xca7ca7, 7"
    )
    with pytest.warns(match=message):
        _, options = routed_call(tmp_path)
    assert options[options.index("--chipdb") + 1] == f"{tmp_path}/xc7z020.bin"


def router_log(iterations):
    """nextpnr's log: overused wires and late connections of each iteration."""
    line = "Info:     iter={} wires=647837 overused={} overuse={} tmgfail={} archfail=NA"
    return "\n".join(line.format(at, wires, wires, late) for at, (wires, late) in enumerate(iterations, 1))


def test_the_router_is_ended_where_it_repeats_itself():
    # Regression: with connections that no detour makes fast enough, nextpnr's --tmg-ripup never ended.
    settling = [(max(0, 400 - 4 * at), 15) for at in range(120)]
    assert count_unresolvable(router_log(settling)) == 0
    assert count_unresolvable(router_log(settling + [(0, 15)] * 30)) == 15
    assert count_unresolvable(router_log(settling + [(0, 15 + at % 2) for at in range(50)])) == 16
    assert count_unresolvable(router_log([(0, 90 - at) for at in range(60)])) == 0
    assert count_unresolvable(router_log([(200 - at, 15) for at in range(200)])) == 0
    assert count_unresolvable(router_log([(0, 0)] * 50)) == 0


def test_the_router_is_ended_where_late_connections_keep_wires_overused():
    # Regression: `update` stood at 59 late connections and 80 to 99 overused wires, and only no overuse ended it.
    standing = [(80 + 7 * at % 20, 59) for at in range(60)]
    assert count_unresolvable(router_log(standing)) == 59
    assert count_unresolvable(router_log([(3, 15)] * 200)) == 15  # this too went on for ever
    assert count_unresolvable(router_log([(overused, 0) for overused, _ in standing])) == 0


def test_a_late_design_is_routed_without_rerouting_and_with_a_warning(tmp_path, chip_file, monkeypatch):
    (tmp_path / "xc7z020.bin").write_bytes(chip_file({}))
    _, options = routed_call(tmp_path)
    assert options[-1] == "--tmg-ripup"
    monkeypatch.setattr(Recorder, "late", 15)
    with pytest.warns(match="15 connections stay later than 83.3 MHz allow: a lower freq_hz or another seed"):
        (routed, _), options = routed_call(tmp_path)
    assert routed == parse_report(REPORT) and "--tmg-ripup" not in options


def test_constraints_place_each_port():
    assert constraints({"led": "R14", "clk": "H16"}).splitlines() == [
        "set_property PACKAGE_PIN R14 [get_ports led]", "set_property IOSTANDARD LVCMOS33 [get_ports led]",
        "set_property PACKAGE_PIN H16 [get_ports clk]", "set_property IOSTANDARD LVCMOS33 [get_ports clk]",
    ]  # fmt: skip
