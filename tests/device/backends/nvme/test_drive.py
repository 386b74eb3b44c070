"""Linux' generic character devices: found, refused, and called as linux/nvme_ioctl.h has it."""

import errno
import os
import struct

import numpy as np
import pytest

from nearflash.abi.errors import DeviceError, DeviceLostError, UnknownDeviceError
from nearflash.device.backends.nvme import drive as module
from nearflash.device.backends.nvme.device import NvmeDevice
from nearflash.device.backends.nvme.drive import CharacterDrive
from nearflash.device.backends.nvme.entries import EXECUTE, LOAD, MEMORY_WRITE


@pytest.mark.parametrize("path", ["/dev/ng99n1", "/dev/null", "/dev/nvme0n1"])
def test_what_is_no_drive_is_named(path):
    with pytest.raises(UnknownDeviceError, match=f"must be named by its generic device .*, not '{path}'"):
        CharacterDrive(path)


def test_the_list_of_devices_names_namespaces(tmp_path, monkeypatch):
    there = [tmp_path / name for name in ("ng0n1", "ng1n2", "nvme0n1")]
    for path in there:
        path.touch()
    assert module.generic_devices(tmp_path) == [str(path) for path in there[:2]]
    monkeypatch.setattr("nearflash.device.backends.nvme.device.generic_devices", list)
    with pytest.raises(UnknownDeviceError, match="must have a generic device, such as /dev/ng0n1; there is none"):
        NvmeDevice.presence()


@pytest.fixture
def opened(monkeypatch):
    """A drive with namespaces 2 and 3, and the calls that reach Linux."""
    calls, answers = [], []

    def ioctl(descriptor, request, call=None):
        calls.append((descriptor, request, bytes(call)))
        answer = answers.pop(0) if answers else 0
        if isinstance(answer, OSError):
            raise answer
        call[72:80] = (0x1122334455).to_bytes(8, "little")
        return answer

    monkeypatch.setattr(module.fcntl, "ioctl", ioctl)
    drive = CharacterDrive.__new__(CharacterDrive)
    drive.namespace, drive._files = 3, {number: os.open("/dev/null", os.O_RDWR) for number in (2, 3)}
    yield drive, calls, answers
    drive.close()
    drive.close()


def test_a_command_is_handed_over_in_its_structure(opened):
    drive, calls, _ = opened
    data = np.arange(8, dtype=np.uint8)
    entry = MEMORY_WRITE.pack(2, address=0x1000, length=8)
    assert drive.submit(entry, data, timeout_s=2.5) == 0x1122334455
    ((descriptor, request, call),) = calls
    assert descriptor == drive._files[2] and request == 0xC0504E48 and len(call) == 80
    assert struct.unpack("<4IQQII6III", call[:72]) == (
        5,
        2,
        0,
        0,
        0,
        data.ctypes.data,
        0,
        8,
        0x1000,
        0,
        8,
        0,
        0,
        0,
        2500,
        0,
    )
    drive.submit(EXECUTE.pack(3, pind=1, rsid=4))
    assert calls[1][2][:16] == EXECUTE.pack(3, pind=1, rsid=4).raw[:16]
    drive.submit(LOAD.pack(3))
    assert calls[2][:2] == (drive._files[3], 0xC0504E47)


def test_statuses_and_errors_of_linux_are_named(opened):
    drive, _, answers = opened
    answers += [0x4002, OSError(errno.ENODEV, "No such device"), OSError(errno.EACCES, "Permission denied")]
    entry = MEMORY_WRITE.pack(2)
    with pytest.raises(DeviceError, match=r"the drive's status is INVALID_FIELD \(0x4002\)"):
        drive.submit(entry)
    with pytest.raises(DeviceLostError, match="the drive of namespace 2 must be there: No such device"):
        drive.submit(entry)
    with pytest.raises(DeviceError, match="Linux must take the command for namespace 2: Permission denied"):
        drive.submit(entry)
    with pytest.raises(DeviceError, match="namespace 5 must have a generic device"):
        drive.submit(MEMORY_WRITE.pack(5))
