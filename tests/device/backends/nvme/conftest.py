"""Machines with a drive whose program is simulated."""

import pytest

from nearflash.abi.errors import UnknownDeviceError
from nearflash.abi.kernel.config import CONFIGS

PROGRAM = b"a kernel as the drive's program"
DEVICE = "/dev/ng0n3"


@pytest.fixture
def drive_of(tmp_path, monkeypatch):
    """Makes the machine's only drive, with the kernel of a build."""
    fixture = pytest.importorskip("nearflash.verify.fixtures.boards.nvme")
    file = tmp_path / "program"
    file.write_bytes(PROGRAM)
    monkeypatch.setenv("NEARFLASH_NVME_PROGRAM", str(file))
    drives = []

    def open_drive(path):
        if path != DEVICE:
            raise UnknownDeviceError(f"no drive {path}")
        return drives[-1]

    def make(build="update-tiny", **options):
        drives.append(fixture.SimulatedDrive(CONFIGS[build], options.pop("program", PROGRAM), **options))
        monkeypatch.setattr("nearflash.device.backends.nvme.device.open_drive", open_drive)
        return drives[-1]

    yield make
    for drive in drives:
        drive.close()
