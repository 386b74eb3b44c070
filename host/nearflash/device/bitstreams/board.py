"""Boards: `bitstreams/<board>/board.toml`, with what a build and a driver need to know of each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import KernelConfig, config
from nearflash.support.tables import TableReader, at_least_zero, read_toml

__all__ = ["FLOWS", "Board", "Limits", "PortMemory", "Resources", "Routing", "bitstreams_root", "boards", "load_board"]

FLOWS = {
    "open": "yosys, nextpnr and our own frames: a bitstream without vendor tools",
    "vivado": "AMD Vivado: a bitstream",
    "vitis": "AMD Vitis: an xclbin for a platform",
}
"""How a board's bitstreams are made."""

_FORMAT, _VERSION = "nearflash board", 1


@dataclass(frozen=True)
class PortMemory:
    """Memory that the kernels' ports reach."""

    base_address: int
    """First address, bytes."""
    size_bytes: int
    bandwidth_bytes_per_s: int
    """Peak of the memory, bytes a second."""


@dataclass(frozen=True)
class Resources:
    """Cells of the part; an 18 Kb block RAM is half a BRAM36."""

    lut: int
    ff: int
    dsp: int
    bram36: float


@dataclass(frozen=True)
class Limits:
    """Limits of a build of a kernel: its resources, its longest path in LUT levels, the Fmax that it must reach, Hz."""

    lut: int
    ff: int
    dsp: int
    bram36: float
    fmax_hz: int = 0
    logic_depth: float = 0.0


@dataclass(frozen=True)
class Routing:
    """Start of a kernel's place and route, found by trying: its aim, Hz, and its seed.

    Raises ConfigError for a width of sums that DSP slices do not have.
    """

    freq_hz: int
    seed: int
    dsp_adder_bits: int = 0
    """Sums and differences of so many bits (to 48) take DSP slices in place of carry chains; 0: none."""
    slice_delays: bool = False
    """Place and route with prjxray's delays of slices and LUT pins in place of nextpnr's stubs."""

    def __post_init__(self) -> None:
        if not 0 <= self.dsp_adder_bits <= 48:
            raise ConfigError(f"dsp_adder_bits must be between 0 and 48, not {self.dsp_adder_bits}")


@dataclass(frozen=True)
class Board:
    """One board. Raises ConfigError for a flow or a build configuration that does not exist."""

    name: str
    title: str
    """Maker and product."""
    part: str
    """FPGA with package and speed grade, as the tools spell it."""
    family: str
    """Yosys family: xc7 or xcup."""
    flow: str
    """A name of FLOWS."""
    backend: str
    """Device backend that runs its bitstreams: pynq, zynq or xrt; none where there is no driver yet."""
    clock_hz: int
    """Clock that builds aim at, Hz."""
    kernels: tuple[str, ...]
    """Build configurations that the board has, by full name."""
    memory: PortMemory
    resources: Resources
    sources: tuple[str, ...]
    """Documents that the figures are from."""
    platform: str = "none"
    """Vitis platform, where the flow is vitis."""
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """By kernel."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Package pins by port of the whole design, where the flow is open."""
    routing: Mapping[str, Routing] = field(default_factory=dict)
    """By kernel, where the flow is open."""

    def __post_init__(self) -> None:
        if self.flow not in FLOWS:
            raise ConfigError(f"flow must be one of {', '.join(FLOWS)}, not {self.flow!r}")
        for name in self.kernels:
            config(name)
        built = {config(name).kernel for name in self.kernels}
        for what, given in (("limits", self.limits.keys()), ("routing", self.routing.keys())):
            if unbuilt := sorted(given - built):
                raise ConfigError(f"{what} must be of kernels that {self.name} has, not of {', '.join(unbuilt)}")

    @property
    def folder(self) -> Path:
        """Folder of the board's files."""
        return bitstreams_root() / self.name

    def build(self, kernel: str) -> KernelConfig:
        """The board's build configuration of a kernel. Raises ConfigError that lists the kernels that it has."""
        builds = {config(name).kernel: config(name) for name in self.kernels}
        if kernel not in builds:
            raise ConfigError(f"kernel of {self.name} must be one of {', '.join(builds)}, not {kernel!r}")
        return builds[kernel]


def bitstreams_root() -> Path:
    """The folder `bitstreams`: the environment's NEARFLASH_BITSTREAMS, else that of the source tree or a board's wheel.

    Raises ConfigError where none exists.
    """
    given = os.environ.get("NEARFLASH_BITSTREAMS")
    package, tree = Path(__file__).parents[2] / "bitstreams", Path(__file__).parents[4] / "bitstreams"
    root = Path(given).resolve() if given else package if package.is_dir() else tree
    if not root.is_dir():
        raise ConfigError(f"NEARFLASH_BITSTREAMS must name the folder bitstreams of a source tree, not {str(root)!r}")
    return root


def boards() -> list[str]:
    """Names of all boards."""
    return sorted(path.parent.name for path in bitstreams_root().glob("*/board.toml"))


def rule(key: str, hint: Any, value: Any) -> str:
    """The rule that texts and numbers of boards' and bitstreams' tables keep to (nearflash.support.tables)."""
    return "text" if value == "" else at_least_zero(key, hint, value)


def load_board(name: str) -> Board:
    """A board by its name. Raises ConfigError for one that does not exist, and for a file that is not a board's."""
    path = bitstreams_root() / name / "board.toml"
    if name not in boards():
        raise ConfigError(f"board must be one of {', '.join(boards())}, not {name!r}")
    body = read_toml(path, ConfigError)
    if body.pop("format", None) != _FORMAT or body.pop("version", None) != _VERSION:
        raise ConfigError(f'{path} must begin with format = "{_FORMAT}" and version = {_VERSION}')
    board = TableReader(ConfigError, rule).parse(Board, body, f"{path}: board")
    if board.name != name:
        raise ConfigError(f"{path}: name must be that of its folder, not {board.name!r}")
    return board
