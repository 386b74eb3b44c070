"""A machine's PCI functions as a folder, in the form of /sys."""

import pytest

from nearflash.device import topology

#: Where functions lie: a SmartSSD's card and drive under one switch, another drive at a root port, a network card.
SMARTSSD = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
CARD = f"{SMARTSSD}/0000:3c:01.0/0000:3e:00.1"
OWN_DRIVE = f"{SMARTSSD}/0000:3c:00.0/0000:3d:00.0"
OTHER_DRIVE = "pci0000:00/0000:00:1c.0/0000:01:00.0"
OTHER_CARD = "pci0000:3a/0000:3a:01.0/0000:60:00.1"


class FakeSysfs:
    def __init__(self, root):
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def add(self, way, driver=None, nvme=None, drm=None):
        """A function, and the bridges that it lies under."""
        folder = self.root / "devices" / way
        folder.mkdir(parents=True)
        address = folder.name
        (self.root / "bus/pci/devices" / address).symlink_to(folder)
        if driver:
            (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)
        if nvme is not None:
            (folder / "nvme" / nvme / f"{nvme}n1").mkdir(parents=True)
        if drm:
            (folder / "drm" / drm).mkdir(parents=True)
        return address

    def smartssd(self, drm=None):
        """A SmartSSD, and a drive elsewhere; the card's address."""
        self.add(OWN_DRIVE, "nvme", "nvme1")
        self.add(OTHER_DRIVE, "nvme", "nvme0")
        return self.add(CARD, "xocl", drm=drm)


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    machine = FakeSysfs(tmp_path / "sys")
    monkeypatch.setattr(topology, "SYSFS", machine.root)
    return machine
