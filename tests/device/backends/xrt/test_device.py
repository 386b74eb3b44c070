"""The driver of XRT cards on the Verilated kernel: equal bits, and everything that can be wrong, by its name."""

import errno
import os

import numpy as np
import pytest

from nearflash.abi.errors import (
    AddressError,
    BitstreamError,
    ConfigError,
    DeviceError,
    DeviceLostError,
    DigestError,
    WaitTimeoutError,
)
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.abi.registers import REGISTER_MAPS
from nearflash.device import open_device
from nearflash.device.backends.xrt.device import XrtDevice, first_pointer
from nearflash.device.base import LinkBytes
from nearflash.device.selftest.expand import compare_matrices
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update

ADDRESS = "0000:3e:00.1"
STATE = random_state(np.random.default_rng(1), 200)
VECTOR = UpdateVector(AdamStep(1e-3, 3, weight_decay=0.1), 200)


@pytest.fixture
def device(machine):
    with XrtDevice.open("update-tiny") as opened:
        yield opened


def held(machine):
    """Handles that nobody gave back."""
    return [one for one in machine.handles.values() if one is not None]


def test_an_update_equals_the_model_and_its_counters(device):
    found, counters = run_update(device, VECTOR, STATE)
    with open_device("model:update-tiny") as model:
        expected, expected_counters = run_update(model, VECTOR, STATE)
    words, wrong = differing_words(found, expected)
    assert words == 600 and not wrong
    assert counters["params_done"] == 200 and counters["read_beats"] == expected_counters["read_beats"]
    assert counters["cycles"] > 200
    assert (device.identity.backend, device.identity.name) == ("xrt", "xrt:update-tiny")


def test_without_p2p_the_bits_are_the_same_and_dma_moves_them(machine, card):
    card.p2p = False
    with XrtDevice.open("update-tiny") as device, open_device("model:update-tiny") as model:
        assert not device.p2p and device.allocate(1).p2p is None
        found, expected = (run_update(one, VECTOR, STATE)[0] for one in (device, model))
    assert not differing_words(found, expected)[1] and "xrtBOSync" in machine.calls


def test_matrices_of_the_expand_kernel(machine, card):
    card.config = CONFIGS["expand-tiny"]
    with XrtDevice.open("expand-tiny") as device:
        rows = list(compare_matrices(device, columns=20, seed=1))
    assert rows and not any(row.mismatches for row in rows)


def test_the_window_is_the_cards_memory_and_takes_direct_io(device, card, tmp_path):
    data = np.random.default_rng(2).integers(0, 256, 8192, np.uint8)
    (tmp_path / "page").write_bytes(data.tobytes())
    buffer = device.allocate(8192)
    assert device.p2p and buffer.p2p.ctypes.data % 4096 == 0 and buffer.address % 4096 == 0
    file = os.open(tmp_path / "page", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    try:
        assert os.preadv(file, [buffer.p2p], 0) == 8192
    finally:
        os.close(file)
    assert (card.kernel.view(buffer.address, 8192) == data).all()
    assert not buffer.host.any() and device.links == LinkBytes()
    buffer.sync_from_device(4096)
    assert (buffer.host[4096:] == data[4096:]).all() and not buffer.host[:4096].any()
    assert device.links == LinkBytes(from_device=4096)


@pytest.mark.parametrize("p2p", ["1", "0"])
def test_syncs_move_the_bytes_that_they_name(machine, monkeypatch, p2p):
    monkeypatch.setenv("NEARFLASH_P2P", p2p)
    with XrtDevice.open("update-tiny") as device:
        assert device.p2p is (p2p == "1")
        buffer = device.allocate(5000)
        buffer.host[:] = 7
        buffer.sync_to_device(100, 200)
        buffer.host[:] = 0
        buffer.sync_from_device()
        assert buffer.host.sum() == 7 * 200 and buffer.host[100:300].all()
        assert device.links == LinkBytes(to_device=200, from_device=5000)
        buffer.sync_to_device(0, 0)
        for offset, size in ((0, 5001), (-1, 2)):
            with pytest.raises(AddressError, match="must lie in the buffer's 5000 bytes"):
                buffer.sync_to_device(offset, size)
        device.free(buffer)
        with pytest.raises(AddressError, match="must be allocated to be freed"):
            device.free(buffer)
        with pytest.raises(AddressError, match="at least 1 byte, not 0"):
            device.allocate(0)
        with pytest.raises(AddressError, match="a buffer of 8589934592 bytes must fit the card's memory"):
            device.allocate(1 << 33)


def test_closing_gives_everything_back(machine, card):
    device = XrtDevice.open("update-tiny")
    device.allocate(100)
    device.close()
    device.close()
    assert not held(machine) and not card.holder
    with XrtDevice.open("update-tiny"):
        assert card.holder
    assert card.kernel.memory.allocate(1, LinkBytes()).address == card.kernel.memory.base


def test_a_kernel_is_held_by_one_process(machine, device):
    with pytest.raises(
        DeviceError, match=r"hold kernel 'update' .* exclusively, not fail .* errno 16\): another process"
    ):
        XrtDevice.open("update-tiny")
    assert run_update(device, VECTOR, STATE)[1]["params_done"] == 200


def test_an_xclbin_for_another_platform(machine, card):
    card.platform = "xilinx_u200_gen3x16_xdma_2_202110_1"
    with pytest.raises(
        DeviceError, match=r"platform xilinx_u2_gen3x4_xdma_gc_2_202110_1, to card .* errno 95\): the xclbin"
    ):
        XrtDevice.open("update-tiny")
    assert not held(machine)


def test_a_kernel_of_another_digest(machine, card):
    card.config = CONFIGS["update-tiny"]
    first = XrtDevice.open("update-tiny")
    first.close()
    word = REGISTER_MAPS["update"]["config_digest"].offset
    read = card.kernel.read
    card.kernel.read = lambda offset: read(offset) ^ (offset == word)
    with pytest.raises(DigestError, match="config digest of xrt:update-tiny must be"):
        XrtDevice.open("update-tiny")
    assert not held(machine) and not card.holder


def test_an_xclbin_without_the_kernel(machine, card):
    card.config = CONFIGS["expand-tiny"]
    with pytest.raises(
        DeviceError, match=r"hold kernel 'update' .* errno 22\): the runtime found nothing of that name"
    ):
        XrtDevice.open("update-tiny")
    assert not held(machine)


def test_an_xclbin_that_was_not_built_or_was_changed(machine, tmp_path):
    path = tmp_path / "bitstreams/tiny/update-tiny.xclbin"
    path.write_bytes(b"other")
    with pytest.raises(BitstreamError, match=r"update-tiny.xclbin must have the SHA-256 of its manifest"):
        XrtDevice.open("update-tiny")
    with pytest.raises(ConfigError, match="board must be one of tiny, not 'smartssd'"):
        XrtDevice.open("update-smartssd")
    assert not machine.calls


def test_no_permission(machine, sysfs, monkeypatch):
    (sysfs.root / "bus/pci/devices" / ADDRESS / "drm/renderD128").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DeviceError, match=r"/dev/dri/renderD128 of card 0000:3e:00.1 must be readable .*`render`"):
        XrtDevice.open("update-tiny")


def test_no_permission_as_the_runtime_reports_it(machine, card):
    card.refuses = {"xrtDeviceOpenByBDF": errno.EACCES}
    with pytest.raises(
        DeviceError, match=r"open card 0000:3e:00.1, not fail in xrtDeviceOpenByBDF .* errno 13\): this user"
    ):
        XrtDevice.open("update-tiny")


@pytest.mark.parametrize("name", ["xrtBOAddress", "xrtBOMap"])
def test_a_buffer_that_cannot_be_used_is_freed(device, machine, card, name):
    before = len(held(machine))
    card.refuses = {name: errno.ENOMEM}
    with pytest.raises(AddressError, match="the memory is full"):
        device.allocate(100)
    assert len(held(machine)) == before


def test_unplugged_in_mid_run(machine, card):
    device = XrtDevice.open("update-tiny")
    buffers = {name: device.allocate(4096) for name in "gpmv"}
    inputs = {name: buffer.address for name, buffer in buffers.items()}
    ticket = device.submit(UpdateCommand(AdamStep(1e-3, 1), 100, inputs, {name: inputs[name] for name in "pmv"}))
    card.kernel.unplugged = True
    with pytest.raises(
        DeviceLostError, match="xrt:update-tiny must answer register reads, not read 0xffffffff everywhere"
    ):
        device.wait(ticket)
    with pytest.raises(DeviceLostError):
        device.reset()
    device.close()
    assert not held(machine)
    with pytest.raises(DeviceLostError):
        XrtDevice.open("update-tiny")


def test_a_register_may_be_all_ones(device):
    offset = REGISTER_MAPS["update"]["params"].offset
    device.write_register(offset, 0xFFFF_FFFF)
    assert device.read_register(offset) == 0xFFFF_FFFF


def test_a_kernel_that_never_ends_is_named_at_reset(device, card, monkeypatch):
    monkeypatch.setattr(device, "IDLE_S", 0.01)
    control = card.kernel.read
    monkeypatch.setattr(card.kernel, "read", lambda offset: 0 if offset == 0 else control(offset))
    with pytest.raises(DeviceError, match=r"must become idle within 0\.01 s, not wait for nothing that it names: load"):
        device.reset()


def test_a_timeout_then_the_command_ends(device, card, monkeypatch):
    control = card.kernel.read
    monkeypatch.setattr(card.kernel, "read", lambda offset: 0 if offset == 0 else control(offset))
    buffers = {name: device.allocate(4096).address for name in "gpmv"}
    ticket = device.submit(UpdateCommand(AdamStep(1e-3, 1), 100, buffers, {name: buffers[name] for name in "pmv"}))
    with pytest.raises(WaitTimeoutError, match=r"must finish within 0\.01 s"):
        device.wait(ticket, 0.01)
    monkeypatch.setattr(card.kernel, "read", control)
    assert device.wait(ticket).counters["params_done"] == 100


def test_the_first_pointer_of_each_kernel():
    assert {name: first_pointer(CONFIGS[f"{name}-tiny"]) for name in ("update", "attend", "expand")} == {
        "update": 3,
        "attend": 1,
        "expand": 1,
    }
