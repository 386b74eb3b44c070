from importlib.metadata import EntryPoint

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.abi.errors import UnknownDeviceError
from nearflash.device import available_devices, open_device, registry


def test_every_backend_has_every_configuration():
    names = available_devices()
    assert {f"{backend}:{config}" for backend in ("model", "host", "replay", "verilator") for config in CONFIGS} <= set(
        names
    )
    assert names == sorted(names)


@pytest.mark.parametrize("spec", ["", "model", "model:", "model:tiny", "nothing:update-tiny", ":update-tiny"])
def test_unknown_names_list_what_exists(spec):
    with pytest.raises(UnknownDeviceError, match=rf"device must be one of host:update-smartssd, .*, not '{spec}'"):
        open_device(spec)


def test_a_missing_package_is_named_and_nothing_else_is_opened(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(UnknownDeviceError, match=r"needs the package 'nearflash.no_such_package'; .*nearflash\[sim\]"):
        open_device("verilator:update-tiny")


def test_opening_gives_exactly_the_named_device():
    with open_device("model:update-smartssd") as device:
        assert device.identity.name == "model:update-smartssd"
