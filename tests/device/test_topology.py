"""Which drives lie beside a card, on machines that are folders."""

from pathlib import Path

from nearflash.device.topology import cards, drives_beside, render_node


def shown(address):
    return [str(drive) for drive in drives_beside(address)]


def test_the_drive_under_the_cards_switch_is_its_own(sysfs):
    card = sysfs.smartssd()
    (drive,) = drives_beside(card)
    assert (drive.address, drive.controller, drive.namespaces) == ("0000:3d:00.0", "nvme1", ("nvme1n1",))


def test_two_cards_of_one_enclosure_have_each_their_own(sysfs):
    switch = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    for place in (0, 1):
        inner = f"{switch}/0000:3c:0{place}.0/0000:4{place}:00.0"
        sysfs.add(f"{inner}/0000:5{place}:00.0/0000:6{place}:00.0", "nvme", f"nvme{place}")
        sysfs.add(f"{inner}/0000:5{place}:01.0/0000:7{place}:00.1", "xocl")
    assert cards("xocl") == ["0000:70:00.1", "0000:71:00.1"]
    assert [shown(card) for card in cards("xocl")] == [["nvme0n1"], ["nvme1n1"]]


def test_several_drives_under_one_switch_are_all_beside(sysfs):
    card = sysfs.smartssd()
    sysfs.add("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:02.0/0000:3f:00.0", "nvme", "nvme2")
    assert shown(card) == ["nvme1n1", "nvme2n1"]


def test_a_root_port_is_no_switch(sysfs):
    """Two functions of one root port share nothing that peers' traffic could stay below."""
    sysfs.add("pci0000:00/0000:00:1c.0/0000:01:00.0", "nvme", "nvme0")
    assert shown(sysfs.add("pci0000:00/0000:00:1c.0/0000:02:00.1", "xocl")) == []
    assert shown(sysfs.add("pci0000:00/0000:00:1d.0/0000:03:00.1", "xocl")) == []


def test_a_controller_without_namespaces_is_shown_by_itself(sysfs):
    card = sysfs.smartssd()
    (sysfs.root / "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0/nvme/nvme1/nvme1n1").rmdir()
    assert shown(card) == ["nvme1"]


def test_only_functions_of_the_driver_are_cards(sysfs):
    sysfs.add("pci0000:3a/0000:3a:01.0/0000:60:00.0", "xclmgmt")
    sysfs.add("pci0000:3a/0000:3a:02.0/0000:61:00.0")
    assert cards("xocl") == [] and cards("xclmgmt") == ["0000:60:00.0"]


def test_a_cards_device_file(sysfs):
    assert render_node(sysfs.smartssd(drm="renderD129")) == Path("/dev/dri/renderD129")
    assert render_node(sysfs.add("pci0000:3a/0000:3a:02.0/0000:61:00.0")) is None


def test_a_machine_without_pci(tmp_path):
    assert cards("xocl", tmp_path) == [] and drives_beside("0000:3e:00.1", tmp_path) == []
