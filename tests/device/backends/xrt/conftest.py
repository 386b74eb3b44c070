"""Machines with cards whose kernels are simulated."""

import pytest

from nearflash.abi.kernel.config import CONFIGS

PLATFORM = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"


@pytest.fixture
def machine(sysfs, tmp_path, monkeypatch):
    """A runtime with one card. The xclbins of tiny builds are there."""
    xrt = pytest.importorskip("nearflash.verify.fixtures.boards.xrt")
    folder = pytest.importorskip("nearflash.verify.fixtures.boards.folder")
    files = {kernel: {".xclbin": kernel.encode()} for kernel in ("update", "expand")}
    board = folder.write_board(tmp_path / "bitstreams", "tiny", "xrt", files)
    paths = {str(path): PLATFORM for path in board.glob("*.xclbin")}
    runtime = xrt.XrtRuntime({sysfs.smartssd(): xrt.SimulatedCard(CONFIGS["update-tiny"])}, paths)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(board.parent))
    monkeypatch.setattr("nearflash.device.backends.xrt.device.load_library", lambda: runtime)
    yield runtime
    for card in runtime.cards.values():
        if card.kernel:
            card.kernel.close()


@pytest.fixture
def card(machine):
    (only,) = machine.cards.values()
    return only
