"""`build` by a board's flow: the open one kernel by kernel, a vendor's package first, then its tools."""

import subprocess
from types import SimpleNamespace

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError
from nearflash.boards import build as subject
from nearflash.device.bitstreams import load_board

GIT = "89abcdef" * 5


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What was called, by name; nothing is elaborated or run."""
    seen = []
    design = type("Design", (), {"top": "attend", "digest": "d", "build": load_board("zynq7045").build("attend")})
    monkeypatch.setattr(subject, "convert_board", lambda board: [design] * len(board.kernels))
    monkeypatch.setattr(subject, "revision_of", lambda board, kernel, digest: GIT)
    monkeypatch.setattr(subject, "tool_version", lambda program: f"{program} 1")

    def record(name, result=None):
        monkeypatch.setattr(subject, name, lambda *given: (seen.append((name, given)), result)[1])

    manifest = SimpleNamespace(config="attend-x", kernel="attend", fmax_hz=123_400_000, clock_hz=1,
                               check_limits=lambda _: None, utilisation=load_board("zynq7045").resources)  # fmt: skip
    for name, result in (("write_package", [tmp_path / "a.tcl"]), ("run_tools", None), ("keep_bitstream", manifest),
                         ("keep_xclbin", None), ("build_open", manifest)):  # fmt: skip
        record(name, result)
    return seen


def test_a_vivado_board(calls, tmp_path):
    lines = list(subject.build_board(load_board("zynq7045")))
    assert lines[0] == str(tmp_path / "a.tcl") and lines[1].startswith("attend-x: 123.4 MHz, in ")
    assert [name for name, _ in calls] == ["write_package", "run_tools", "keep_bitstream"]
    assert calls[0][1][3] == 0x89ABCDEF and calls[2][1][3:] == (GIT, {"vivado": "vivado 1"})
    assert calls[0][1][2].parts[-3:] == ("build", "bitstreams", "zynq7045")


def test_a_vitis_board(calls):
    lines = list(subject.build_board(load_board("smartssd")))
    assert [name for name, _ in calls] == ["write_package", "run_tools", "keep_xclbin"]
    assert calls[2][1][4] == {"vivado": "vivado 1", "v++": "v++ 1"} and "in " in lines[-1]


def test_the_package_alone(calls):
    assert len(list(subject.build_board(load_board("smartssd"), package_only=True))) == 1
    assert [name for name, _ in calls] == ["write_package"]


def test_a_board_without_a_design_around_its_kernel_states_so(calls):
    lines = subject.build_board(load_board("ku3p"))
    next(lines)
    with pytest.raises(BitstreamError, match=r"ku3p must have a design around its kernel .*ku3p/README.md states what"):
        next(lines)
    assert [name for name, _ in calls] == ["write_package"]


def test_the_package_stays_where_tools_are_missing(calls, monkeypatch, tmp_path):
    def missing(*_):
        raise BitstreamError("zynq7045 must be built by vivado")

    monkeypatch.setattr(subject, "run_tools", missing)
    lines = subject.build_board(load_board("zynq7045"))
    assert next(lines) == str(tmp_path / "a.tcl")
    with pytest.raises(BitstreamError, match="must be built by vivado"):
        next(lines)


def test_the_open_flow_builds_one_kernel_or_all(calls):
    board = load_board("pynq-z2")
    assert len(list(subject.build_board(board))) == len(board.kernels)
    assert [given[1] for _, given in calls] == ["update", "expand", "attend"]
    assert len(list(subject.build_board(board, "attend"))) == 1 and calls[-1][1][1] == "attend"


def test_one_kernel_of_a_vendor_board_must_be_one_of_its_own(calls):
    board = load_board("ku3p")
    with pytest.raises(ConfigError, match=r"kernel of ku3p must be one of update, not 'attend'"):
        list(subject.build_board(board, "attend"))
    assert not calls


@pytest.mark.parametrize(
    ("output", "version"), [("\n\nVivado v2024.1 (64-bit)\n", "Vivado v2024.1 (64-bit)"), ("", "unknown")]
)
def test_versions_of_tools(monkeypatch, output, version):
    def run(command, **_):
        assert command == ["vivado", "-version"]
        return subprocess.CompletedProcess(command, 0, output)

    monkeypatch.setattr(subprocess, "run", run)
    assert subject.tool_version("vivado") == version
