"""The driver of Zynq boards without PYNQ, on files of Linux with a Verilated kernel behind."""

import os
import re
import struct

import numpy as np
import pytest

from nearflash.abi.errors import AddressError, DeviceError, UnknownDeviceError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.device import open_device
from nearflash.device.backends.zynq.device import ZynqDevice
from nearflash.device.base import LinkBytes
from nearflash.device.bitstreams.header import split_bit
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update

fixture = pytest.importorskip("nearflash.verify.fixtures.boards.zynq")
BUILD = "update-tiny"
VECTOR, STATE = UpdateVector(AdamStep(1e-3, 3), 100), random_state(np.random.default_rng(1), 100)


@pytest.fixture
def bitstreams(tmp_path, monkeypatch):
    from nearflash.verify.fixtures.boards.folder import bit_file, write_board

    files = {"update": {".bit": bit_file(fixture.CODES["xc7z010"])}}
    folder = write_board(tmp_path / "bitstreams", "tiny", "zynq", files)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(folder.parent))
    return folder


@pytest.fixture
def board(bitstreams, tmp_path, monkeypatch):
    made = fixture.SimulatedZynq(tmp_path / "board", CONFIGS[BUILD])
    made.install(monkeypatch.setattr)
    yield made
    made.close()


def test_an_update_through_the_files_of_linux(board, bitstreams):
    with open_device(f"zynq:{BUILD}") as device:
        found, counters = run_update(device, VECTOR, STATE)
        assert (device.identity.name, device.clock_hz) == (f"zynq:{BUILD}", 99_999_999)
    with open_device(f"model:{BUILD}") as model:
        expected, _ = run_update(model, VECTOR, STATE)
    assert differing_words(found, expected) == (300, 0) and counters["params_done"] == 100
    payload = split_bit(bitstreams / f"{BUILD}.bit")[1]
    loaded = (board.files.firmware / "nearflash-logic.bin").read_bytes()
    assert struct.unpack(f"<{len(payload) // 4}I", loaded) == struct.unpack(f">{len(payload) // 4}I", payload)


def test_a_loaded_bitstream_is_loaded_again_only_where_asked(board):
    for opened, loads in ((ZynqDevice.open, True), (ZynqDevice.open, False), (ZynqDevice.load, True)):
        (board.files.manager / "flags").write_text("0")
        before = (
            board.files.firmware.joinpath("nearflash-logic.bin").stat().st_ino if board.files.firmware.exists() else 0
        )
        opened(BUILD).close()
        assert (board.files.firmware.joinpath("nearflash-logic.bin").stat().st_ino != before) == loads


def test_without_an_fpga_manager_nothing_is_touched(board):
    (board.files.manager / "firmware").unlink()
    for call in (ZynqDevice.presence, lambda: ZynqDevice.open(BUILD)):
        with pytest.raises(
            UnknownDeviceError, match=r"'zynq' needs the attribute `firmware` of its FPGA manager, .*boot"
        ):
            call()
    assert not board.files.lock.exists()


def test_a_bitstream_of_another_device_is_not_loaded(board):
    board.slcr.write(0x530, 0x1372_7093)
    with pytest.raises(DeviceError, match=r"device, of code 0x3727093 \(PSS_IDCODE\), not for one of 0x3722093: name"):
        ZynqDevice.open(BUILD)
    assert not board.files.firmware.exists() and (board.files.manager / "firmware").read_text() == ""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("size", "4096", "memory for buffers must be at least 1048576 bytes, not 4096: load u-dma-buf"),
        ("phys_addr", "0x10000800", "must be whole pages of 4096 bytes below 0x40000000, .* at 0x10000800"),
        ("phys_addr", "0x3f000000", "must be whole pages of 4096 bytes below 0x40000000"),
    ],
    ids=["small", "no page", "beyond"],
)
def test_memory_that_is_too_small_or_elsewhere(board, name, text, message):
    (board.files.buffers / "udmabuf0" / name).write_text(text)
    with pytest.raises(DeviceError, match=message):
        ZynqDevice.open(BUILD)
    assert not board.files.lock.exists()


def test_memory_that_the_device_tree_sets_apart(board):
    for path in (*(board.files.buffers / "udmabuf0").iterdir(), board.files.buffers / "udmabuf0"):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(
        DeviceError, match=r"memory for buffers must be there, .*reserved-memory/nearflash@\*/reg: load"
    ):
        ZynqDevice.open(BUILD)
    node = board.files.tree / "reserved-memory/nearflash@10000000"
    node.mkdir(parents=True)
    (node / "reg").write_bytes(struct.pack(">2I", board.kernel.memory.base, 1 << 21))
    with ZynqDevice.open(BUILD) as device:
        assert run_update(device, VECTOR, STATE)[1]["params_done"] == 100
        with pytest.raises(AddressError, match="must fit the largest free range of the device memory"):
            device.memory.allocate((1 << 21) + 1, LinkBytes())


def test_a_user_that_is_not_root(board, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("nearflash.device.backends.zynq.manager.write_durably", refuse)
        with pytest.raises(
            DeviceError, match=r"nearflash-logic.bin must be written by root to load .*Permission denied\): use"
        ):
            ZynqDevice.open(BUILD)
    opened = os.open
    memory = str(board.files.memory)
    monkeypatch.setattr(os, "open", lambda path, *rest: refuse(path) if str(path) == memory else opened(path, *rest))
    with pytest.raises(DeviceError, match=rf"{re.escape(memory)} must be opened by root, .*\(Permission denied\): use"):
        ZynqDevice.open(BUILD)


def test_a_load_that_fails_names_the_state(board):
    (board.files.manager / "state").write_text("write error\n")
    with pytest.raises(DeviceError, match="state must be 'operating' behind a load, not 'write error': see `dmesg`"):
        ZynqDevice.open(BUILD)
    assert board.files.lock.read_text().splitlines()[1:] == [""]


def test_a_pll_that_is_off_is_named_before_the_kernel_is_read(board):
    board.slcr.write(0x108, 30 << 12 | 2)
    with pytest.raises(DeviceError, match="the I/O PLL must run, and give 100000000 Hz by two dividers, not 0 Hz"):
        ZynqDevice.open(BUILD)


def test_shifters_that_are_off(board):
    board.slcr.write(0x900, 0)
    with pytest.raises(DeviceError, match=r"the level shifters .* an AXI read of register 0 at 0x40000000 would hang"):
        ZynqDevice.open(BUILD)


def test_buffers_have_no_window_and_are_freed_once(board):
    with ZynqDevice.open(BUILD) as device:
        buffer = device.memory.allocate(100, LinkBytes())
        assert buffer.p2p is None and buffer.address == board.kernel.memory.base
        device.memory.free(buffer)
        with pytest.raises(AddressError, match="must be allocated to be freed"):
            device.memory.free(buffer)
