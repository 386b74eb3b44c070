"""A kernel as a computational program of a drive: the host's bits, and what goes wrong by name."""

import threading
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.errors import (
    AddressError,
    CommandError,
    DeviceError,
    DigestError,
    UnknownDeviceError,
    WaitTimeoutError,
)
from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.cli import main as cli
from nearflash.device import open_device
from nearflash.device.backends.nvme.entries import Statuses
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.selftest.update import UpdateVector, random_state, run_update
from nearflash.weights.pack import pack

NAME = "nvme:update-tiny@/dev/ng0n3"
GOLDEN = Path(__file__).parent / "commands.txt"
_HEAD = (
    "nearflash nvme commands 1: queue, entry, bytes of data, CRC32C of those that go to the drive (test_device.py)\n"
)


def update(device):
    vector = UpdateVector(AdamStep(1e-3, 3, weight_decay=0.1), 40)
    return run_update(device, vector, random_state(np.random.default_rng(1), 40))


def test_an_update_has_the_bits_of_the_host(drive_of):
    drive = drive_of()
    with open_device(NAME) as device, open_device("host:update-tiny") as host:
        assert device.identity.name == NAME and device.memory_bytes == drive._end
        (found, counters), (expected, _) = update(device), update(host)
    assert found == expected and counters["params_done"] == 40
    assert drive.closed and not drive._images and not drive._active and not drive._ranges


def test_commands_are_those_of_the_log(drive_of):
    """Byte by byte: open, an update, a copy of blocks, close. Written anew where it is removed."""
    drive = drive_of(blocks=bytes(4096))
    with open_device(NAME) as device:
        update(device)
        device.allocate(4096).copy_from(1, {0: 2, 4: 1}, 512, offset=8)
    log = _HEAD + "".join(f"{line}\n" for line in drive.log)
    if not GOLDEN.exists():
        GOLDEN.write_text(log)
        pytest.fail(f"{GOLDEN} was written")
    assert log == GOLDEN.read_text()


def test_training_has_the_bits_of_the_host(drive_of, tmp_path):
    torch = pytest.importorskip("torch")
    from nearflash.training import NearStorageAdamW

    drive_of()
    bits = []
    for device in ("host:update-tiny", NAME):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 200))
        path = tmp_path / device.partition(":")[0]
        with NearStorageAdamW([parameter], path=path, device=device, lr=1e-2) as optimizer:
            for _ in range(2):
                parameter.grad = torch.linspace(1, -2, 200)
                optimizer.step()
        bits.append(parameter.detach().numpy().tobytes())
    assert bits[0] == bits[1] != torch.linspace(-1, 1, 200).numpy().tobytes()


def test_selftest_of_a_drive(drive_of, capsys):
    drive_of()
    assert cli.main(["selftest", "--device", NAME, "--params", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{NAME}, abi" in lines[0] and lines[-1].endswith(", 0 mismatches")


def test_a_matrix_is_expanded(drive_of):
    drive_of("expand-tiny")
    dense = np.arange(24, dtype=np.uint16).reshape(3, 8) * (np.arange(8) % 2).astype(np.uint16)
    stream = pack(dense.view(np.float16))
    with open_device("nvme:expand-tiny@/dev/ng0n3") as device:
        assert (expand_matrix(device, stream).dense == dense).all()


def test_blocks_are_copied_without_the_host(drive_of):
    blocks = np.random.default_rng(1).bytes(8 * 512)
    drive_of(blocks=blocks)
    with open_device(NAME) as device:
        buffer = device.allocate(4096)
        buffer.copy_from(1, {6: 2, 1: 3}, 512, offset=4)
        assert (device.links.to_device, device.links.from_device) == (0, 0)
        buffer.sync_from_device()
        assert buffer.host[4:][: 5 * 512].tobytes() == blocks[6 * 512 :] + blocks[512 : 4 * 512]
        with pytest.raises(AddressError, match="must lie in the buffer's 4096 bytes"):
            buffer.copy_from(1, {0: 9}, 512)
        with pytest.raises(AddressError, match="offset of a copy must be a multiple of 4, not 2"):
            buffer.copy_from(1, {0: 1}, 512, offset=2)
        with pytest.raises(CommandError, match="runs must have at least a block each"):
            buffer.copy_from(1, {0: 0}, 512)
        with pytest.raises(DeviceError, match=r"Memory Copy must succeed, but .* LBA_OUT_OF_RANGE \(0x0080\)"):
            buffer.copy_from(1, {8: 1}, 512)
        with pytest.raises(DeviceError, match="INVALID_NAMESPACE"):
            buffer.copy_from(7, {0: 1}, 512)


def test_bytes_beside_a_range_stay(drive_of):
    drive_of()
    with open_device(NAME) as device:
        buffer = device.allocate(300_001)
        buffer.host[:] = 1
        buffer.sync_to_device()
        buffer.host[:] = 2
        buffer.sync_to_device(7, 150_000)
        buffer.host[:] = 3
        buffer.sync_from_device(3, 299_998)
        assert buffer.host[:3].tolist() == [3] * 3 and (buffer.host[3:7] == 1).all()
        assert (buffer.host[7:150_007] == 2).all() and (buffer.host[150_007:] == 1).all()
        assert (device.links.to_device, device.links.from_device) == (450_001, 299_998)


def test_a_drive_without_what_is_needed_is_named(drive_of, monkeypatch, tmp_path):
    drive = drive_of()
    with pytest.raises(UnknownDeviceError, match="no drive /dev/ng1n1"):
        open_device("nvme:update-tiny@/dev/ng1n1")
    with pytest.raises(UnknownDeviceError, match="a drive must be named"):
        open_device("nvme:update-tiny")
    drive.namespace = 1
    with pytest.raises(DeviceError, match=r"namespace 1 must be one of Computational Programs, .* lists \[3\]"):
        open_device(NAME)
    drive = drive_of()
    drive.sets.clear()
    with pytest.raises(DeviceError, match="of Computational Programs, of which the drive lists none"):
        open_device(NAME)
    drive = drive_of()
    drive.sets.popitem()
    drive.sets = {4: [3]}
    with pytest.raises(DeviceError, match="must have a namespace of Subsystem Local Memory, not none"):
        open_device(NAME)
    monkeypatch.setenv("NEARFLASH_NVME_PROGRAM", str(tmp_path / "none"))
    drive = drive_of()
    with pytest.raises(UnknownDeviceError, match="NEARFLASH_NVME_PROGRAM must name the file of the drive's program"):
        open_device(NAME)
    assert drive.closed


def test_a_program_that_the_drive_refuses_is_named(drive_of):
    drive = drive_of(program=b"another")
    with pytest.raises(DeviceError, match=r"must be loaded under index 1, type 1: Program Activation .*INVALID_FIELD"):
        open_device(NAME)
    assert drive.closed and not drive._images
    drive = drive_of()
    drive.fails["Load Program"] = Statuses.INVALID_OPCODE
    with pytest.raises(DeviceError, match=r"Load Program must succeed, .* INVALID_OPCODE \(0x0001\).*; see NEARFLASH"):
        open_device(NAME)


def test_a_program_of_another_kernel_is_named(drive_of, monkeypatch):
    drive = drive_of()
    monkeypatch.setattr(drive.kernel, "read", lambda offset: 0)
    with pytest.raises(DigestError, match="register magic of nvme:update-tiny must be"):
        open_device(NAME)
    assert drive.closed


def test_a_full_memory_and_a_failed_command_leave_the_device_usable(drive_of):
    drive = drive_of()
    with open_device(NAME) as device:
        with pytest.raises(AddressError, match="must fit the largest free range of the device memory"):
            device.allocate(1 << 30)
        drive.fails["Execute Program"] = Statuses.INTERNAL_ERROR
        with pytest.raises(DeviceError, match=r"Execute Program must succeed, .* INTERNAL_ERROR"):
            update(device)
        assert update(device)[1]["params_done"] == 40


def test_a_program_that_does_not_end_is_a_timeout(drive_of):
    drive, held = drive_of(), threading.Event()
    with open_device(NAME) as device:
        drive.fails["Execute Program"] = Statuses.ABORTED_BY_HOST
        with pytest.raises(WaitTimeoutError, match="Execute Program must end within 3600 s, not be aborted"):
            update(device)
        device.reset()
        execute = drive._calls["Execute Program"]
        drive._calls["Execute Program"] = lambda *given, **fields: (held.wait(), execute(*given, **fields))[1]
        buffer = device.allocate(4096)
        arrays = {name: buffer.address + 1024 * at for at, name in enumerate("pmv")}
        ticket = device.submit(UpdateCommand(AdamStep(1e-3, 1), 8, {"g": buffer.address + 3072, **arrays}, arrays))
        with pytest.raises(WaitTimeoutError, match=r"must finish within 0.1 s; it still runs"):
            device.wait(ticket, 0.1)
        held.set()
        assert device.wait(ticket).counters["params_done"] == 8
