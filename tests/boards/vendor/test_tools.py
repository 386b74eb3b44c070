"""Vendor tools: which are missing, what is run, what is kept; a program on PATH stands for Vivado."""

import json
import os
import shutil
import stat
import sys
import textwrap
from dataclasses import replace

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.boards.vendor.tools import commands, keep_bitstream, keep_xclbin, run_tools
from nearflash.boards.zynq7.hwh import hwh_text
from nearflash.device.bitstreams import load_board, load_manifest
from nearflash.device.bitstreams.board import Limits
from nearflash.device.bitstreams.header import Label
from nearflash.verify.fixtures.built import DIVIDERS, bit_file
from nearflash.verify.vendor.recording import RECORDER

GIT = "0123456789" * 4
VIVADO = f"""#!{sys.executable}
import pathlib, subprocess, sys, zipfile
script = sys.argv[sys.argv.index("-source") + 1]
print("running", script)
done = subprocess.run(["tclsh", {str(RECORDER)!r}, script, script + ".calls"])
if script == "system.tcl":
    pathlib.Path("attend.bit").write_bytes(pathlib.Path("given.bit").read_bytes())
    with zipfile.ZipFile("attend.xsa", "w") as archive:
        archive.write("given.hwh", "system.hwh")
sys.exit(done.returncode)
"""
VPP = f"""#!{sys.executable}
import pathlib, sys
assert sys.argv[1:7] == ["-l", "-t", "hw", "--config", "connectivity.cfg", "-o"], sys.argv
pathlib.Path(sys.argv[7]).write_bytes(b"xclbin2" + " ".join(sys.argv[8:]).encode())
"""
needs_tclsh = pytest.mark.skipif(shutil.which("tclsh") is None, reason="tclsh is not installed (apt install tcl)")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder first on PATH, and a function that puts a program there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("NEARFLASH_NAND_PHY", raising=False)

    def put(name, text):
        path = folder / name
        path.write_text(textwrap.dedent(text))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


@pytest.fixture
def work(packages, tmp_path, monkeypatch):
    """A function that copies a board's package and its folder: board, designs, package."""

    def copy(name):
        monkeypatch.delenv("NEARFLASH_BITSTREAMS", raising=False)
        _, designs, folder, _ = packages[name]
        source = load_board(name).folder
        shutil.copytree(folder, tmp_path / "package")
        shutil.copytree(source, tmp_path / "bitstreams" / name)
        for manifest in (tmp_path / "bitstreams" / name).glob("*.json"):
            manifest.unlink()
        monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(tmp_path / "bitstreams"))
        board = load_board(name)
        if board.flow == "vivado":
            label = Label("system_wrapper", "", "", "")
            (tmp_path / "package" / "given.bit").write_bytes(bit_file(label, "7z045ffg900", code=0x3731093))
            (tmp_path / "package" / "given.hwh").write_text(hwh_text(board, designs[0].build, DIVIDERS))
        return board, designs, tmp_path / "package"

    return copy


def test_missing_tools_are_listed_with_what_they_need(packages, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    board, designs, folder, _ = packages["smartssd"]
    needs = (
        r"smartssd must be built by vivado \(AMD Vivado 2021.1 .*the part xcku15p-.* and v\+\+ \(AMD Vitis .*platform "
        r"xilinx_u2_gen3x4_xdma_gc_2_202110_1 .*not found on PATH; the package is in "
    )
    with pytest.raises(BitstreamError, match=needs):
        run_tools(board, designs, folder)
    board, designs, folder, _ = packages["zu17eg"]
    with pytest.raises(BitstreamError, match=r"zu17eg must be built by vivado \(.*xczu17eg-ffvc1760-2-e; source its"):
        run_tools(board, designs, folder)


def test_order_of_what_is_run(packages):
    board, designs, *_ = packages["smartssd"]
    assert [run[0] for run in commands(board, designs)] == ["vivado"] * 3 + ["v++"]
    assert commands(board, designs)[-1][-3:] == ["update.xo", "expand.xo", "attend.xo"]
    board, designs, *_ = packages["zynq7045"]
    assert [run[-1] for run in commands(board, designs)] == ["package_attend.tcl", "system.tcl"]


@needs_tclsh
def test_a_vivado_build_is_kept_with_its_figures(work, programs):
    board, designs, folder = work("zynq7045")
    programs("vivado", VIVADO)
    run_tools(board, designs, folder)
    manifest = keep_bitstream(board, designs[0], folder, GIT, {"vivado": "2024.1"})
    assert manifest == load_manifest(board, "attend")
    manifest.verify()
    assert sorted(manifest.files) == ["attend.bit", "attend.hwh"] and manifest.evidence == "routed"
    # The stubs count three cells for each of nine patterns and leave 0.25 ns of 3.509.
    used = manifest.utilisation
    assert (used.lut, used.ff, used.dsp, used.bram36) == (12, 3, 3, 4.5)
    assert manifest.fmax_hz == int(1e9 / (1e9 / 285e6 - 0.25)) and manifest.critical_path == ("first/C", "last/D")
    assert (board.folder / "attend.hwh").read_text() == (folder / "given.hwh").read_text()


@needs_tclsh
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("slack 0.25", "slack -0.5", r"attend-zynq7045 must meet timing at 285000000 Hz, not miss it by 0.5 ns"),
     ("lut 12", "lut 900000", r"zynq7045/attend: lut must be at most 200000, not 900000")],
)  # fmt: skip
def test_a_build_that_is_too_slow_or_too_large_is_not_kept(work, programs, old, new, message):
    board, designs, folder = work("zynq7045")
    board = replace(board, limits={"attend": Limits(200_000, 400_000, 900, 545)})
    programs("vivado", VIVADO)
    run_tools(board, designs, folder)
    figures = folder / "attend.figures"
    assert old in figures.read_text()
    figures.write_text(figures.read_text().replace(old, new))
    before = sorted(board.folder.iterdir())
    with pytest.raises(BitstreamError, match=message):
        keep_bitstream(board, designs[0], folder, GIT, {})
    assert sorted(board.folder.iterdir()) == before


def test_a_tool_that_fails_is_named_with_its_output(work, programs):
    board, designs, folder = work("zynq7045")
    programs("vivado", f"#!{sys.executable}\nprint('ERROR: no licence')\nraise SystemExit(3)\n")
    with pytest.raises(BitstreamError, match=r"(?s)`vivado .*package_attend.tcl` must succeed .*with 3:\n.*no licence"):
        run_tools(board, designs, folder)


def test_files_that_vivado_did_not_write_are_named(work):
    board, designs, folder = work("zynq7045")
    for name in ("attend.bit", "attend.figures"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(BitstreamError, match=r"system.tcl must write attend.bit, attend.xsa, attend.figures into "):
        keep_bitstream(board, designs[0], folder, GIT, {})


@needs_tclsh
def test_a_vitis_build_is_kept_for_every_kernel(work, programs):
    board, designs, folder = work("smartssd")
    programs("vivado", VIVADO)
    programs("v++", VPP)
    run_tools(board, designs, folder)
    with pytest.raises(BitstreamError, match=r"update.json must exist"):
        keep_xclbin(board, designs, folder, GIT, {})
    synthesised = {
        "board": "smartssd", "digest": "0" * 64, "design": "0" * 64, "git": "0" * 40, "tools": {}, "files": {},
        "utilisation": {"lut": 5, "ff": 6, "dsp": 7, "bram36": 8}, "clock_hz": 300_000_000, "fmax_hz": 0,
        "critical_path": ["LUT6 a"], "evidence": "synthesised", "logic_depth": 8,
    }  # fmt: skip
    for design in designs:
        body = synthesised | {"config": design.build.full_name}
        (board.folder / f"{design.top}.json").write_text(json.dumps(body))
    keep_xclbin(board, designs, folder, GIT, {"v++": "2024.1"})
    for design in designs:
        manifest = load_manifest(board, design.top)
        manifest.verify()
        assert manifest.file(".xclbin").read_bytes() == b"xclbin2update.xo expand.xo attend.xo"
        assert (manifest.evidence, manifest.utilisation.lut, manifest.git) == ("synthesised", 5, GIT)


def test_an_xclbin_that_was_not_linked_is_an_error(work):
    board, designs, folder = work("smartssd")
    with pytest.raises(BitstreamError, match=r"nearflash.xclbin must exist after v\+\+ linked memory DDR\[0\]"):
        keep_xclbin(board, designs, folder, GIT, {})


@needs_tclsh
def test_a_design_that_was_not_routed_ends_the_script(work, programs):
    board, designs, folder = work("zynq7045")
    script = folder / "system.tcl"
    script.write_text(script.read_text().replace("route_design Complete*", "write_bitstream Complete*"))
    programs("vivado", VIVADO)
    with pytest.raises(BitstreamError, match=r"(?s)`vivado .*system.tcl` must succeed .*impl_1 must route the design"):
        run_tools(board, designs, folder)
