"""Estimates as manifests: written with their evidence level, within the board's limits, or not at all."""

import dataclasses
from types import SimpleNamespace

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError
from nearflash.abi.kernel.config import CONFIGS, config
from nearflash.boards.vendor.kernel import convert_kernel
from nearflash.device.bitstreams import boards, load_board, load_manifest
from nearflash.device.bitstreams.board import Limits
from nearflash.verify import estimate as subject
from nearflash.verify.synth import UnitResources, kernel_resources


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The SmartSSD without manifests, its synthesis replaced by known figures."""
    text = (load_board("smartssd").folder / "board.toml").read_text()
    folder = tmp_path / "smartssd"
    folder.mkdir()
    (folder / "board.toml").write_text(text)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(tmp_path))
    found = UnitResources(lut=1000, ff=2000, dsp=30, bram36=4.5, logic_depth=8.25, path=("LUT6 a", "CARRY4 b"))
    monkeypatch.setattr(subject, "kernel_resources", lambda build, family: found)
    monkeypatch.setattr(subject, "convert_kernel", lambda build: SimpleNamespace(digest="5" * 64))
    return dataclasses.replace(load_board("smartssd"), limits={})


def test_the_clock_is_the_boards(board):
    # Regression: ku3p, whose card has 125 MHz, got the 300 MHz of the configuration that it shares with the SmartSSD.
    assert subject.estimate(dataclasses.replace(board, clock_hz=125_000_000), "update").clock_hz == 125_000_000


def test_an_estimate_is_a_manifest_without_files(board):
    manifest = subject.estimate(board, "update")
    assert manifest == load_manifest(board, "update")
    manifest.verify()
    assert (manifest.evidence, manifest.files, manifest.fmax_hz) == ("synthesised", {}, 0)
    assert (manifest.utilisation.lut, manifest.utilisation.bram36, manifest.logic_depth) == (1000, 4.5, 8.25)
    assert manifest.critical_path == ("LUT6 a", "CARRY4 b") and manifest.design == "5" * 64
    assert manifest.tools.keys() == {"amaranth", "pyosys"} and len(manifest.git) == 40


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(999, 2000, 30, 5), r"smartssd/update: lut must be at most 999, not 1000"),
        (Limits(1000, 2000, 30, 5, logic_depth=8),
         r"smartssd/update: logic_depth must be at most 8, not 8.25: LUT6 a > CARRY4 b"),
    ],
)  # fmt: skip
def test_a_kernel_past_its_limits_is_not_written(board, limits, message):
    board = dataclasses.replace(board, limits={"update": limits})
    with pytest.raises(BitstreamError, match=message):
        subject.estimate(board, "update")
    assert not (board.folder / "update.json").exists()


def test_the_revision_is_zeros_outside_a_checkout(monkeypatch):
    monkeypatch.setattr(subject.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=128, stdout=""))
    assert subject._revision() == "0" * 40


def test_a_kernel_that_the_board_does_not_have(board):
    with pytest.raises(ConfigError, match=r"kernel of smartssd must be one of update, expand, attend, not 'other'"):
        subject.estimate(board, "other")


def test_a_kernel_is_its_rest_and_its_equal_parts(monkeypatch):
    """The parts are synthesised once."""
    asked = []

    def resources(component, family, box=None):
        asked.append((type(component).__name__, family, box and box.__name__))
        component._MustUse__used = True
        return UnitResources(10, 20, 3, 0.5, 7.0 if box else 8.0, ("rest" if box else "part",))

    monkeypatch.setattr("nearflash.verify.synth.resources", resources)
    found = kernel_resources(CONFIGS["update-smartssd"], "xcup")
    assert asked == [("Lane", "xcup", None), ("UpdateKernel", "xcup", "Lane")]
    assert found == UnitResources(50, 100, 15, 2.5, 8.0, ("part",))


def kept():
    """Board and kernel of every manifest of this checkout, of boards that vendor tools build."""
    every = (board for board in map(load_board, boards()) if board.flow != "open")
    pairs = ((board, config(build).kernel) for board in every for build in board.kernels)
    return [(board, kernel) for board, kernel in pairs if (board.folder / f"{kernel}.json").exists()]


@pytest.mark.parametrize(("board_", "kernel"), kept(), ids=lambda value: getattr(value, "name", value))
def test_what_is_kept_is_of_this_contract_and_within_limits(board_, kernel):
    manifest = load_manifest(board_, kernel)
    manifest.verify()
    assert kernel in board_.limits, "a kernel with figures has limits that later figures must keep"
    manifest.check_limits(board_)
    limits, there = board_.limits[kernel], board_.resources
    for name in ("lut", "ff", "dsp", "bram36"):
        used = getattr(manifest.utilisation, name)
        assert used <= getattr(limits, name) <= 1.2 * used + 1, f"{name}: a limit far above what is used guards nothing"
        assert getattr(limits, name) <= getattr(there, name)


@pytest.mark.full
@pytest.mark.parametrize(("board_", "kernel"), kept(), ids=lambda value: getattr(value, "name", value))
def test_what_is_kept_is_of_this_checkouts_gateware(board_, kernel):
    again = f"run `nearflash bitstream estimate {board_.name} --kernel {kernel}`"
    digest = convert_kernel(board_.build(kernel)).digest
    assert digest == load_manifest(board_, kernel).design, f"the gateware changed since: {again}"
