from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from nearflash.abi.errors import ConfigError, UnknownDeviceError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device import available_devices, open_device, registry
from nearflash.device.backends.host.update import HostDevice
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.backends.pynq.device import PynqDevice
from nearflash.device.backends.zynq.device import ZynqDevice
from nearflash.device.bitstreams import boards, load_board, load_manifest

BACKENDS = {
    "update": {"bit", "model", "host", "replay", "verilator", "hls", "nvme", "pynq", "xrt", "zynq"},
    "attend": {"bit", "model", "replay", "verilator", "pynq", "xrt", "zynq"},
    "expand": {"bit", "model", "host", "replay", "verilator", "nvme", "pynq", "xrt", "zynq"},
}


def test_backends_are_listed_with_the_configurations_of_the_kernels_that_they_run():
    expected = {f"{backend}:{name}" for name, build in CONFIGS.items() for backend in BACKENDS[build.kernel]}
    assert available_devices() == sorted(expected)


def test_every_bitstream_of_the_repository_has_a_device():
    """A kernel was built for pynq-z2 that `pynq` was not registered for: `deploy` and `selftest` knew no device."""
    classes = {}
    for board in map(load_board, boards()):
        for name in board.kernels:
            kernel = CONFIGS[name].kernel
            if (board.folder / f"{kernel}.json").exists() and load_manifest(board, kernel).files:
                classes[name] = registry.device_class(f"{board.backend}:{name}", kernel)
    assert classes.keys() >= {"update-pynq-z2", "attend-pynq-z2", "expand-pynq-z2", "expand-zynq7010"}
    assert set(classes.values()) == {PynqDevice, ZynqDevice}


def test_a_backend_does_not_open_a_kernel_that_it_does_not_run():
    with pytest.raises(UnknownDeviceError, match="not 'host:attend-tiny'"):
        open_device("host:attend-tiny")


@pytest.mark.parametrize("backend", [HostDevice, ModelDevice])
def test_a_backend_refuses_the_configuration_of_another_kernel(backend):
    known = "update-ku3p, update-pynq-z2, .*update-tiny-split, update-zynq7010"
    with pytest.raises(ConfigError, match=f"must be one of {known}, not 'attend-tiny'"):
        backend.open("attend-tiny")


@pytest.mark.parametrize("spec", ["", "model", "model:", "model:tiny", "nothing:update-tiny", ":update-tiny"])
def test_unknown_names_list_what_exists(spec):
    with pytest.raises(UnknownDeviceError, match=rf"device must be one of {{bit,.*}}:{{attend-.*}}, .*, not '{spec}'"):
        open_device(spec)


def test_a_missing_package_is_named_and_nothing_else_is_opened(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "_backends", lambda kernel: {"verilator": point})
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
    *backends, rest = (
        str(error.value).removeprefix("device must be one of ").removesuffix(f", not {spec!r}").split(", ")
    )
    assert backends == ["bit", "model", "pynq", "replay", "verilator", "xrt", "zynq"]
    again, builds = (part.strip("{}").split(",") for part in rest.split(":"))
    assert again == backends
    assert sorted(f"{backend}:{build}" for backend in backends for build in builds) == available_devices("attend")


def test_a_backend_named_alone_names_its_missing_package(monkeypatch):
    point = EntryPoint("verilator", "nearflash.no_such_package:Device", registry.GROUP)
    monkeypatch.setattr(registry, "_backends", lambda kernel: {"verilator": point})
    with pytest.raises(UnknownDeviceError, match=r"needs the package 'nearflash.no_such_package'; .*nearflash\[sim\]"):
        open_device("verilator", kernel="update")


def test_opening_gives_exactly_the_named_device():
    with open_device("model:update-smartssd") as device:
        assert device.identity.name == "model:update-smartssd"


class Cards(ModelDevice):
    """A backend with cards."""

    @classmethod
    def open_card(cls, config, card):
        device = cls.open(config)
        device.identity = replace(device.identity, backend="cards", card=card)
        return device


@pytest.fixture
def cards(monkeypatch):
    point = EntryPoint("cards", f"{__name__}:Cards", f"{registry.GROUP}.update")
    monkeypatch.setattr(registry, "_backends", lambda kernel: {"cards": point})
    monkeypatch.setattr(registry, "_load", lambda backend, kernel: Cards)


@pytest.mark.parametrize("spec", ["cards:update-tiny@0000:3b:00.1", "cards@0000:3b:00.1"])
def test_a_card_is_named_after_its_device(cards, spec):
    with open_device(spec, "update") as device:
        assert device.identity.card == "0000:3b:00.1"
        assert device.identity.name == f"cards:update-{device.identity.config.name}@0000:3b:00.1"
        assert registry.full_name(device.identity.name) == device.identity.name


def test_without_a_card_the_backend_chooses(cards):
    with open_device("cards:update-tiny") as device:
        assert device.identity.card == ""
    with pytest.raises(UnknownDeviceError, match="not 'card@1'"):
        open_device("card@1", "update")


def test_a_card_of_a_backend_without_cards():
    with pytest.raises(UnknownDeviceError, match="a backend with cards only, not with update-tiny@1"):
        open_device("model:update-tiny@1")


def test_a_path_is_a_card_of_the_default_configuration():
    assert registry.full_name("nvme:/dev/ng0n1", "update") == "nvme:update-smartssd@/dev/ng0n1"
    assert registry.full_name("nvme:expand-tiny@/dev/ng0n1") == "nvme:expand-tiny@/dev/ng0n1"
    with pytest.raises(UnknownDeviceError, match="not 'nvme:/dev/ng0n1'"):
        registry.full_name("nvme:/dev/ng0n1")
