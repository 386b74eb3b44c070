"""The command on the open flow: every kernel of a board, or the one that is named; exit code 2 with a reason."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.boards import build as subject
from nearflash.boards.open.packages import ToolsError
from nearflash.cli.main import main
from nearflash.device.bitstreams.board import Resources


@pytest.fixture
def built(monkeypatch):
    """The kernels that were built, in order, and the folders for what comes between; building costs nothing."""
    calls = []
    cells = Resources(10, 20, 3, 1.5)
    made = SimpleNamespace(kernel="update", fmax_hz=101_500_000, clock_hz=100_000_000, utilisation=cells)
    made.check_limits = lambda board: None

    def build(board, kernel, work):
        calls.append((board.name, kernel, work))
        return made

    monkeypatch.setattr(subject, "build_open", build)
    return calls


def test_all_kernels_of_a_board_are_built(built, capsys):
    assert main(["bitstream", "build", "pynq-z2"]) == 0
    assert [(board, kernel) for board, kernel, _ in built] == [
        ("pynq-z2", "update"),
        ("pynq-z2", "expand"),
        ("pynq-z2", "attend"),
    ]
    assert all(work.parts[-4:] == ("build", "boards", "pynq-z2", kernel) for _, kernel, work in built)
    expected = "pynq-z2/update: Fmax 101.5 MHz, runs at 100.0 MHz; 10 LUT, 20 FF, 3 DSP, 1.5 BRAM36; 0 bits differ\n"
    assert capsys.readouterr().out.startswith(expected)


def test_one_kernel_is_built(built):
    assert main(["bitstream", "build", "pynq-z2", "--kernel", "attend"]) == 0
    assert [kernel for _, kernel, _ in built] == ["attend"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["desk"], "board must be one of "),
        (["pynq-z2", "--kernel", "sort"], "kernel of pynq-z2 must be one of update, expand, attend"),
    ],
)
def test_what_does_not_exist_is_named(built, capsys, arguments, message):
    assert main(["bitstream", "build", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"nearflash: {message}")


@pytest.mark.parametrize("error", [ToolsError("the open flow needs a network"), BitstreamError("2 bits differ")])
def test_a_build_that_cannot_be_made_states_why(monkeypatch, capsys, error):
    def fail(board, kernel, work):
        raise error

    monkeypatch.setattr(subject, "build_open", fail)
    assert main(["bitstream", "build", "pynq-z2", "--kernel", "update"]) == 2
    assert capsys.readouterr().err == f"nearflash: {error}\n"


def test_a_build_beyond_the_boards_limits_is_an_error(built, monkeypatch, capsys):
    def check(board):
        raise BitstreamError("lut must be at most 9, not 10")

    build = subject.build_open

    def slower(board, kernel, work):
        return SimpleNamespace(**{**vars(build(replace(board), kernel, work)), "check_limits": check})

    monkeypatch.setattr(subject, "build_open", slower)
    assert main(["bitstream", "build", "pynq-z2", "--kernel", "update"]) == 2
    assert "lut must be at most 9, not 10" in capsys.readouterr().err
