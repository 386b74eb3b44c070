"""PCI functions of this machine, and which NVMe drives lie beside a card: under one switch.

Traffic between two functions under a switch need not pass the root complex: that is where peer-to-peer reads and writes
are fast, or possible at all. Source: Linux, Documentation/ABI/testing/sysfs-bus-pci; PCI Express base specification,
1.3.3 (switch: one upstream port, downstream ports below it).
"""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["SYSFS", "Drive", "cards", "drives_beside", "render_node"]

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Drive:
    """An NVMe controller."""

    address: str
    """Of its PCI function, for example 0000:3d:00.0."""
    controller: str
    """Linux' name, for example nvme1."""
    namespaces: tuple[str, ...]
    """Its block devices, for example nvme1n1."""

    def __str__(self) -> str:
        return ", ".join(self.namespaces) or self.controller


def cards(driver: str, sysfs: Path | None = None) -> list[str]:
    """Addresses of the PCI functions that this driver of Linux has, ascending."""
    return [function.name for function in _functions(sysfs) if (function / "driver").resolve().name == driver]


def drives_beside(address: str, sysfs: Path | None = None) -> list[Drive]:
    """NVMe drives under the same switch as a card: those that share most of its way to the root complex.

    Empty where a card and the drives meet no earlier than in a root port.
    """
    way = _way(_root(sysfs) / "bus/pci/devices" / address)
    drives: dict[int, list[Drive]] = {}
    for function in _functions(sysfs):
        controllers = sorted(path.name for path in (function / "nvme").glob("nvme*"))
        if controllers and function.name != address:
            shared = _count_shared(way, _way(function))
            spaces = sorted(path.name for path in (function / "nvme" / controllers[0]).glob(f"{controllers[0]}n*"))
            drives.setdefault(shared, []).append(Drive(function.name, controllers[0], tuple(spaces)))
    # The first function of a way is a root port; what shares a second one shares a switch.
    nearest = max(drives, default=0)
    return drives[nearest] if nearest >= 2 else []


def render_node(address: str, sysfs: Path | None = None) -> Path | None:
    """The device file that a process opens to use a card; None where its driver has none."""
    nodes = sorted((_root(sysfs) / "bus/pci/devices" / address / "drm").glob("renderD*"))
    return Path("/dev/dri") / nodes[0].name if nodes else None


def _root(sysfs: Path | None) -> Path:
    return SYSFS if sysfs is None else sysfs


def _functions(sysfs: Path | None) -> list[Path]:
    return sorted((_root(sysfs) / "bus/pci/devices").glob("*:*:*.*"))


def _way(function: Path) -> tuple[str, ...]:
    """PCI functions from the root port down to this one: the parts of its resolved path after pci<domain>:<bus>."""
    parts = function.resolve().parts
    roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1] + 1 :] if roots else ()


def _count_shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
