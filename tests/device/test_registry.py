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
    with pytest.raises(
        ConfigError, match="must be one of update-pynq-z2, update-smartssd, update-tiny, not 'attend-tiny'"
    ):
        backend.open("attend-tiny")


@pytest.mark.parametrize("spec", ["", "model", "model:", "model:tiny", "nothing:update-tiny", ":update-tiny"])
def test_unknown_names_list_what_exists(spec):
    with pytest.raises(UnknownDeviceError, match=rf"device must be one of hls:update-pynq-z2, .*, not '{spec}'"):
        open_device(spec)


def test_a_missing_package_is_named_and_nothing_else_is_opened(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(UnknownDeviceError, match=r"needs the package 'nearflash.no_such_package'; .*nearflash\[sim\]"):
        open_device("verilator:update-tiny")


@pytest.mark.parametrize(
    ("backend", "kernel", "name"),
    [
        ("host", "update", "host:update-smartssd"),
        ("host", "expand", "host:expand-smartssd"),
        ("model", "attend", "model:attend-tiny"),
        ("verilator", "update", "verilator:update-tiny"),
        ("verilator", "expand", "verilator:expand-tiny"),
        ("hls", "update", "hls:update-tiny"),
    ],
)
def test_a_backends_name_alone_means_its_default_build_of_the_kernel(backend, kernel, name):
    assert registry.full_name(backend, kernel) == name == registry.full_name(name, kernel)


def test_every_backend_has_a_default_build_for_every_kernel_that_it_runs():
    for kernel, backends in BACKENDS.items():
        for backend in backends:
            assert registry.full_name(backend, kernel) in available_devices(kernel)


def test_a_backend_alone_opens_its_default_build():
    with open_device("host", kernel="update") as device:
        assert device.identity.name == "host:update-smartssd"


@pytest.mark.parametrize("spec", ["host", "host:update-tiny", "host:attend-tiny", "", "modell", "model:attend-huge"])
def test_a_name_that_does_not_run_the_kernel_lists_those_that_do(spec):
    with pytest.raises(UnknownDeviceError) as error:
        open_device(spec, kernel="attend")
    listed = str(error.value).removeprefix("device must be one of ").removesuffix(f", not {spec!r}").split(", ")
    assert listed == ["model", "replay", "verilator", *available_devices("attend")]


def test_a_backend_named_alone_names_its_missing_package(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    with pytest.raises(UnknownDeviceError, match=r"needs the package 'nearflash.no_such_package'; .*nearflash\[sim\]"):
        open_device("verilator", kernel="update")


def test_opening_gives_exactly_the_named_device():
    with open_device("model:update-smartssd") as device:
        assert device.identity.name == "model:update-smartssd"
