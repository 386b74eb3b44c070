"""Bound of a kernel's rate on a board: what its lanes do at its clock, or what its memory moves.

A parameter is AdamW's with fp32 state and a 16-bit copy; an element is a weight of 16 bits, half of them zero; a token
is a head's K and V of 128 dimensions in fp16, read whole. The simulated rates of `update` are within 1 % of the bound
(docs/results/gateware.md); those of the others were not compared.
"""

from dataclasses import dataclass

from nearflash.abi.errors import PlanError
from nearflash.abi.kernel.config import AttendConfig, ExpandConfig, KernelConfig, UpdateConfig
from nearflash.explore.studies.dse import FpgaBoard
from nearflash.explore.tables import part_names, read_part

__all__ = ["KernelRate", "compute_rate", "find_fpga"]

_PARAM_BYTES = 4 + 2 * 3 * 4 + 2
"""Gradient in; p, m and v in and out; copy out."""
_ELEMENT_BYTES = 1 / 8 + 2 / 2 + 2
"""Bitmap and values in; dense value out."""
_TOKEN_BYTES = 2 * 2 * 128
_CHANNEL_BYTES = 8
"""Of K or V that a channel's lanes take in a cycle."""


@dataclass(frozen=True)
class KernelRate:
    """Units a second, which units, and bytes a second that move for them."""

    units_per_s: float
    unit: str
    bytes_per_s: float


def compute_rate(build: KernelConfig, clock_hz: float, memory_bytes_per_s: float) -> KernelRate:
    """Rate of a build at a clock with its memory; attend with NAND reads the links of its channels."""
    if isinstance(build, UpdateConfig):
        return _compute_bound(build.lanes * clock_hz, memory_bytes_per_s, _PARAM_BYTES, "params")
    if isinstance(build, ExpandConfig):
        return _compute_bound(build.width * clock_hz, memory_bytes_per_s, _ELEMENT_BYTES, "elements")
    assert isinstance(build, AttendConfig)
    lanes = build.channels * _CHANNEL_BYTES * clock_hz / _TOKEN_BYTES
    links = build.channels * build.nand.link_bytes_per_s if build.luns else memory_bytes_per_s
    inner = links if build.luns else min(links, _CHANNEL_BYTES * clock_hz)
    return _compute_bound(lanes, inner, _TOKEN_BYTES, "tokens of a head")


def _compute_bound(lanes_per_s: float, bytes_per_s: float, unit_bytes: float, unit: str) -> KernelRate:
    return KernelRate(min(lanes_per_s, bytes_per_s / unit_bytes), unit, min(lanes_per_s * unit_bytes, bytes_per_s))


def find_fpga(part: str) -> FpgaBoard:
    """The device of a part (xc7z020clg400-1) with its price. Raises PlanError for one that is not in board.toml."""
    known = {found.part: found for found in (read_part(FpgaBoard, name) for name in part_names(FpgaBoard))}
    found = next((known[device] for device in known if part.startswith(device)), None)
    if found is None:
        raise PlanError(f"part must begin with one of {', '.join(sorted(known))}, not {part!r}")
    return found
