"""Machines with cards whose kernels are simulated."""

from pathlib import Path

import pytest

from nearflash.abi.config import CONFIGS

xrt = pytest.importorskip("nearflash.sim.boards.xrt")

PLATFORM = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"


@pytest.fixture
def machine(sysfs, tmp_path, monkeypatch):
    """A runtime with one card; `add` puts another in. The xclbins of tiny builds are there."""
    folder = tmp_path / "bitstreams/tiny"
    folder.mkdir(parents=True)
    paths = {str(folder / f"{kernel}-tiny.xclbin"): PLATFORM for kernel in ("update", "expand")}
    for path in paths:
        Path(path).touch()
    runtime = xrt.XrtRuntime({sysfs.smartssd(): xrt.SimulatedCard(CONFIGS["update-tiny"])}, paths)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(folder.parent))
    monkeypatch.setattr("nearflash.device.backends.xrt.device.load_library", lambda: runtime)
    yield runtime
    for card in runtime.cards.values():
        if card.kernel:
            card.kernel.close()


@pytest.fixture
def card(machine):
    (only,) = machine.cards.values()
    return only
