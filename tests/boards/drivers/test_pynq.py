"""The driver of PYNQ on PYNQ's own Overlay, MMIO, allocate and clocks."""

import os
import re

import numpy as np
import pytest

from nearflash.abi.errors import (
    AddressError,
    BitstreamError,
    DeviceError,
    DeviceLostError,
    DigestError,
)
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.device import open_device
from nearflash.device.backends.pynq.clock import SLCR_ADDRESS
from nearflash.device.backends.pynq.device import PynqDevice
from nearflash.device.base import LinkBytes
from nearflash.device.bitstreams import load_board, load_manifest
from nearflash.device.selftest.bringup import bring_up
from nearflash.device.selftest.expand import compare_matrices
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update

pytestmark = pytest.mark.filterwarnings("ignore")
STATE = random_state(np.random.default_rng(1), 200)
VECTOR = UpdateVector(AdamStep(1e-3, 3, weight_decay=0.1), 200)


@pytest.fixture
def board(bitstreams, pynq_board):
    made = pynq_board(CONFIGS["update-tiny"])
    yield made
    made.close()


def fclk0_divisor(board):
    """Of the I/O PLL's clock: both divisors in the processing system's register (UG585, FPGA0_CLK_CTRL)."""
    control = board.words[0xF800_0170]
    return (control >> 8 & 0x3F) * (control >> 20 & 0x3F)


def test_an_update_through_pynqs_own_calls(board):
    with PynqDevice.open("update-tiny") as device:
        found, counters = run_update(device, VECTOR, STATE)
        assert type(device._mmio).__module__ == "pynq.mmio"
    with open_device("model:update-tiny") as model:
        expected, _ = run_update(model, VECTOR, STATE)
    assert differing_words(found, expected) == (600, 0) and counters["params_done"] == 200
    assert device.identity.name == "pynq:update-tiny"


def differing_matrices(device):
    """Matrices that the device expands otherwise than the model, of all formats."""
    rows = list(compare_matrices(device, columns=2000, seed=1))
    assert rows
    return sum(row.mismatches for row in rows)


def differing_parameters(device):
    """Words of p, m, v that the device's step makes otherwise than the model's."""
    found, _ = run_update(device, VECTOR, STATE)
    with open_device(f"model:{device.identity.config.full_name}") as model:
        expected, _ = run_update(model, VECTOR, STATE)
    words, differing = differing_words(found, expected)
    assert words == 600
    return differing


@pytest.mark.parametrize(("kernel", "differing"), [("expand", differing_matrices), ("update", differing_parameters)])
def test_the_bitstream_in_the_repository_runs_as_its_manifest_states(pynq_board, kernel, differing):
    """Its .bit, .hwh and manifest, on a board whose logic is the Verilated kernel of that configuration."""
    manifest = load_manifest(load_board("pynq-z2"), kernel)
    made = pynq_board(CONFIGS[manifest.config])
    with open_device(f"pynq:{manifest.config}", kernel) as device:
        assert type(device) is PynqDevice and differing(device) == 0
    made.close()
    assert 1e9 / fclk0_divisor(made) == pytest.approx(manifest.clock_hz, abs=1)


def test_the_clock_of_the_handoff_is_set(board):
    """FCLK0's divisors in the processing system's register, which PYNQ writes: 1 GHz / 10."""
    PynqDevice.open("update-tiny").close()
    assert fclk0_divisor(board) == 10


def test_buffers_are_pynqs_and_are_given_back(board, tmp_path):
    with PynqDevice.open("update-tiny") as device:
        buffer = device.allocate(5000)
        assert type(buffer.array).__module__ == "pynq.buffer" and buffer.array.device_address == buffer.address
        data = np.random.default_rng(2).integers(0, 256, 4096, np.uint8)
        (tmp_path / "page").write_bytes(data.tobytes())
        file = os.open(tmp_path / "page", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        assert os.preadv(file, [buffer.p2p[:4096]], 0) == 4096
        os.close(file)
        assert (board.kernel.view(buffer.address, 4096) == data).all() and device.links == LinkBytes()
        buffer.sync_from_device(0, 4096)
        assert (buffer.host[:4096] == data).all()
        with pytest.raises(AddressError, match="must fit what is left of the contiguous memory"):
            device.allocate(1 << 31)
    assert board.kernel.memory.allocate(1, LinkBytes()).address == board.kernel.memory.base


def test_a_board_of_another_architecture(board):
    board.arch = "aarch64"
    with pytest.raises(
        DeviceError, match=r"not for a processing_system7 \(armv7l\): this is Simulated-Z2, aarch64; name"
    ):
        PynqDevice.open("update-tiny")
    assert board.kernel is None, "nothing was loaded"


def test_what_is_loaded_is_not_loaded_again(board, bitstreams):
    for config in ("update-tiny", "update-tiny"):
        open_device(f"pynq:{config}").close()
    assert board.downloads == 1
    PynqDevice.load("update-tiny").close()
    assert board.downloads == 2, "deploy loads in any case"
    board.bitfile_name = "another program's.bit"
    open_device("pynq:update-tiny").close()
    assert board.downloads == 3
    manifest = load_manifest(load_board("tiny"), "update")
    PynqDevice.LOCK.write_text(f"1\n{'0' * 64} {manifest.file('.bit')}\n")
    open_device("pynq:update-tiny").close()
    assert board.downloads == 4, "the file was another one when it was loaded"
    allocate, download = board.default_memory.allocate, board.download
    board.default_memory.allocate = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("Allocate failed"))
    board.download = lambda *given: setattr(board.default_memory, "allocate", allocate) or download(*given)
    open_device("pynq:update-tiny").close()
    assert board.downloads == 5, "PYNQ gave no memory before"


def test_one_process_has_the_board(board):
    with PynqDevice.open("update-tiny"):
        with pytest.raises(DeviceError, match=rf"held by one process, and process {os.getpid()} has it: end that one"):
            PynqDevice.open("update-tiny")
    PynqDevice.open("update-tiny").close()


def test_a_port_whose_clock_is_off_is_not_read(board):
    """The simulated board asserts that nobody reads it."""
    board.words[SLCR_ADDRESS + 0x178] = 1
    with pytest.raises(DeviceError, match=r"FPGA0_THR_CNT\) must be 0x0, not 0x1: an AXI read of register 0 at 0x4000"):
        PynqDevice.open("update-tiny")


def test_bring_up_measures_the_clock_by_the_boards_time(board):
    sizes = {"params": 40, "tokens": 20, "columns": 20, "seed": 1}
    with PynqDevice.open("update-tiny") as device:
        found = {stage.name: stage for stage in bring_up(device, device, **sizes)}
        assert all(stage.passed for stage in found.values())
        assert list(found)[:2] == ["identity", "clock"] and found["clock"].found.endswith("for 100.0 MHz")
        board.words[SLCR_ADDRESS + 0x170] = 1 << 20 | 14 << 8
        *_, last = bring_up(device, device, **sizes)
    assert (last.name, last.passed) == ("clock", False)
    assert re.match(r"the clock must be 100.0 MHz, not (70|71)\.\d MHz", last.found)


def test_no_permission(board):
    board.denied = True
    with pytest.raises(
        DeviceError, match=r"update-tiny.bit must be loaded by root, .*: Root permissions required.; use"
    ):
        PynqDevice.open("update-tiny")


def test_a_board_of_another_name_with_the_same_device(board):
    """A PYNQ-Z1 has the PYNQ-Z2's device: its bitstreams load there."""
    board.name = "Pynq-Z1"
    PynqDevice.open("update-tiny").close()
    assert board.downloads == 1


def test_a_board_with_another_device(board):
    board.words[SLCR_ADDRESS + 0x530] = 0x1372_2093
    with pytest.raises(
        DeviceError, match=r"of code 0x3722093 \(PSS_IDCODE\), not for one of 0x3727093: name the build"
    ):
        PynqDevice.open("update-tiny")
    assert board.downloads == 0


def test_a_bitstream_of_another_digest(board, bitstreams):
    original = (bitstreams / "update-tiny.bit").read_bytes()
    (bitstreams / "update-tiny.bit").write_bytes(b"other")
    with pytest.raises(BitstreamError, match=r"update-tiny\.bit must have the SHA-256 of its manifest"):
        PynqDevice.open("update-tiny")
    (bitstreams / "update-tiny.bit").write_bytes(original)
    device = PynqDevice.open("update-tiny")
    word, read = REGISTER_MAPS["update"]["config_digest"].offset, board.kernel.read
    board.kernel.read = lambda offset: read(offset) ^ (offset == word)
    device.close()
    with pytest.raises(DigestError, match="config digest of pynq:update-tiny must be"):
        PynqDevice.open("update-tiny")


def test_a_handoff_without_the_kernel(board, bitstreams):
    written = bitstreams / "update-tiny.hwh"
    text = written.read_text().replace("nearflash:kernel:update", "nearflash:kernel:other")
    from nearflash.verify.fixtures.boards.folder import bit_file, write_board

    write_board(bitstreams.parent, "tiny", "pynq", {"update": {".bit": bit_file(0x3727093), ".hwh": text.encode()}})
    with pytest.raises(
        DeviceError, match=r"\.hwh must have one core nearflash:kernel:update, not 0 among .*build it again"
    ):
        PynqDevice.open("update-tiny")


def test_unplugged_in_mid_run(board):
    device = PynqDevice.open("update-tiny")
    places = {name: device.allocate(4096).address for name in "gpmv"}
    ticket = device.submit(UpdateCommand(AdamStep(1e-3, 1), 100, places, {name: places[name] for name in "pmv"}))
    board.kernel.unplugged = True
    with pytest.raises(DeviceLostError, match="pynq:update-tiny must answer register reads"):
        device.wait(ticket)
    device.close()


def test_what_is_here(board):
    assert PynqDevice.presence() == "board Simulated-Z2"
