from importlib.metadata import EntryPoint

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.abi.errors import ConfigError, UnknownDeviceError
from nearflash.device import available_devices, open_device, registry
from nearflash.device.backends.host.update import HostDevice
from nearflash.device.backends.model.update import ModelDevice

BACKENDS = {
    "update": {"model", "host", "replay", "verilator", "hls"},
    "attend": {"model", "replay", "verilator"},
    "expand": {"model", "host", "replay", "verilator"},
}


def test_backends_are_listed_with_the_configurations_of_the_kernels_that_they_run():
    expected = {f"{backend}:{name}" for name, build in CONFIGS.items() for backend in BACKENDS[build.kernel]}
    assert available_devices() == sorted(expected)


def test_a_backend_does_not_open_a_kernel_that_it_does_not_run():
    with pytest.raises(UnknownDeviceError, match="not 'host:attend-tiny'"):
        open_device("host:attend-tiny")


@pytest.mark.parametrize("backend", [HostDevice, ModelDevice])
def test_a_backend_refuses_the_configuration_of_another_kernel(backend):
    with pytest.raises(ConfigError, match="must be one of update-smartssd, update-tiny, not 'attend-tiny'"):
        backend.open("attend-tiny")


@pytest.mark.parametrize("spec", ["", "model", "model:", "model:tiny", "nothing:update-tiny", ":update-tiny"])
def test_unknown_names_list_what_exists(spec):
    with pytest.raises(UnknownDeviceError, match=rf"device must be one of hls:update-smartssd, .*, not '{spec}'"):
        open_device(spec)


def test_a_missing_package_is_named_and_nothing_else_is_opened(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(UnknownDeviceError, match=r"needs the package 'nearflash.no_such_package'; .*nearflash\[sim\]"):
        open_device("verilator:update-tiny")


def test_opening_gives_exactly_the_named_device():
    with open_device("model:update-smartssd") as device:
        assert device.identity.name == "model:update-smartssd"
