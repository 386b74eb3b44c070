"""The drivers of boards, each on what its vendor's runtime shows of Verilated kernels."""

import warnings
from contextlib import contextmanager

import pytest

from nearflash.abi.kernel.config import CONFIGS
from nearflash.device import open_device

KERNELS = ("update", "attend", "expand")
PLATFORM, ADDRESS = "xilinx_u2_gen3x4_xdma_gc_2_202110_1", "0000:3e:00.1"


@pytest.fixture
def pynq_board(tmp_path, monkeypatch):
    """PYNQ with a simulated board of a configuration. Skips where PYNQ is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pynq", reason="needs PYNQ in .venv-pynq: make drivers")
        from nearflash.verify.fixtures.boards.pynq import SimulatedBoard

    def installed(config):
        board = SimulatedBoard(config)
        board.install(tmp_path / "board.lock", monkeypatch.setattr)
        return board

    return installed


@contextmanager
def opened_xrt(full_name):
    from nearflash.device.backends.xrt.device import XrtDevice

    with XrtDevice.open(full_name) as device:
        yield device


@pytest.fixture
def bitstreams(tmp_path, monkeypatch):
    """Folder of a board `tiny` for PYNQ: the handoff is that of pynq-z2, with the registers of each kernel."""
    pytest.importorskip("amaranth")
    from nearflash.boards.zynq7.hwh import dividers, hwh_text
    from nearflash.device.bitstreams import load_board
    from nearflash.verify.fixtures.boards.folder import bit_file, write_board

    board = load_board("pynq-z2")
    files = {}
    for kernel in KERNELS:
        handoff = hwh_text(board, CONFIGS[f"{kernel}-tiny"], dividers(100_000_000))
        files[kernel] = {".bit": bit_file(0x3727093), ".hwh": handoff.encode()}
    written = write_board(tmp_path / "bitstreams", "tiny", "pynq", files)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(written.parent))
    return written


@pytest.fixture(params=["pynq", "xrt"])
def open_tiny(request, tmp_path, monkeypatch):
    """Opens a tiny build with one driver."""
    if request.param == "pynq":
        request.getfixturevalue("bitstreams")
        installed_board = request.getfixturevalue("pynq_board")

        @contextmanager
        def opened_pynq(full_name):
            board = installed_board(CONFIGS[full_name])
            with open_device(f"pynq:{full_name}") as device:
                yield device
            board.close()

        return opened_pynq
    pytest.importorskip("amaranth")
    from nearflash.verify.fixtures.boards.folder import write_board
    from nearflash.verify.fixtures.boards.xrt import SimulatedCard, XrtRuntime

    files = {kernel: {".xclbin": kernel.encode()} for kernel in KERNELS}
    written = write_board(tmp_path / "bitstreams", "tiny", "xrt", files)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(written.parent))
    paths = {str(path): PLATFORM for path in written.glob("*.xclbin")}

    @contextmanager
    def opened(full_name):
        runtime = XrtRuntime({ADDRESS: SimulatedCard(CONFIGS[full_name])}, paths)
        monkeypatch.setattr("nearflash.device.backends.xrt.device.load_library", lambda: runtime)
        monkeypatch.setattr("nearflash.device.topology.cards", lambda driver: [ADDRESS])
        with opened_xrt(full_name) as device:
            yield device
        runtime.cards[ADDRESS].kernel.close()

    return opened
