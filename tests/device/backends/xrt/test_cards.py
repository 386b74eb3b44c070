"""Several cards, and what the list of devices shows of them."""

import pytest

from nearflash.abi.errors import UnknownDeviceError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device.backends.xrt.card import choose_card
from nearflash.device.backends.xrt.device import XrtDevice

xrt = pytest.importorskip("nearflash.verify.fixtures.boards.xrt")


@pytest.fixture
def second(machine, sysfs):
    address = sysfs.add("pci0000:3a/0000:3a:01.0/0000:60:00.1", "xocl")
    machine.cards[address] = xrt.SimulatedCard(CONFIGS["update-tiny"])
    return address


def test_one_of_several_must_be_named(second):
    with pytest.raises(UnknownDeviceError, match=r"must be named \(device@0000:3e:00.1\): 0000:3e:00.1, 0000:60:00.1"):
        XrtDevice.open("update-tiny")
    with pytest.raises(UnknownDeviceError, match=r"card must be one of 0000:3e:00.1, 0000:60:00.1, not '0000:61:00.1'"):
        choose_card("0000:61:00.1")


def test_a_named_card_is_opened_and_its_name_opens_it_again(machine, second):
    with XrtDevice.open_card("update-tiny", second) as device:
        assert device.identity.name == f"xrt:update-tiny@{second}" and device.drives == []
        assert machine.cards[second].holder and not machine.cards["0000:3e:00.1"].holder


def test_two_cards_at_once(machine, second):
    with XrtDevice.open_card("update-tiny", second) as one, XrtDevice.open_card("update-tiny", "0000:3e:00.1") as other:
        assert [str(drive) for drive in other.drives] == ["nvme1n1"]
        buffers = [each.allocate(4096) for each in (one, other)]
        buffers[0].host[:] = 1
        buffers[0].sync_to_device()
        buffers[1].sync_from_device()
        assert not buffers[1].host.any()


def test_cards_are_listed_with_the_drives_beside_them(second):
    assert XrtDevice.presence() == (
        "card 0000:3e:00.1, nvme1n1 under its switch; card 0000:60:00.1, no drive under its switch"
    )


def test_a_machine_without_cards(sysfs, machine, monkeypatch):
    monkeypatch.setattr("nearflash.device.topology.cards", lambda driver: [])
    for call in (XrtDevice.presence, lambda: XrtDevice.open("update-tiny")):
        with pytest.raises(UnknownDeviceError, match="needs a card: no PCI function has driver xocl"):
            call()
