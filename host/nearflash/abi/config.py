"""Build configurations: named, frozen, and identified by a digest.

The digest covers the ABI version, every parameter and the kernel's register map, so a host that knows a digest knows
how to talk to the device. Boards of later storeys add their names here.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import ConfigError
from nearflash.abi.registers import REGISTER_MAPS

__all__ = ["CONFIGS", "UpdateConfig", "config"]


@dataclass(frozen=True)
class UpdateConfig:
    """Parameters of an `update` kernel. Raises ConfigError when they do not fit together."""

    name: str
    lanes: int
    """Parameters updated per cycle (W)."""
    port_bits: int
    """Data width of each AXI4 port, bits: 64, 128, 256 or 512, and at least 64·lanes."""
    outstanding_bursts: int
    """Bursts that a reader or writer may have in flight."""
    burst_bytes: int
    """Longest burst, bytes; a divisor of 4096, at most 256 beats."""
    clock_hz: int
    """Clock that the build aims at, Hz."""
    kernel: str = "update"

    def __post_init__(self) -> None:
        rules = {
            "lanes": (self.lanes in (1, 2, 4, 8), "a power of two up to 8"),
            "port_bits": (self.port_bits in (64, 128, 256, 512) and self.port_bits >= 64 * self.lanes,
                          "64, 128, 256 or 512 and at least 64 bits a lane"),
            "outstanding_bursts": (1 <= self.outstanding_bursts <= 32, "between 1 and 32"),
            "burst_bytes": (self.burst_bytes > 0 and 4096 % self.burst_bytes == 0
                            and self.port_bytes <= self.burst_bytes <= 256 * self.port_bytes,
                            "a divisor of 4096 of 1 to 256 beats"),
        }  # fmt: skip
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def port_bytes(self) -> int:
        """Data width of each port, bytes: addresses of a command are multiples of it."""
        return self.port_bits // 8

    @property
    def ports(self) -> int:
        """AXI4 ports: gmem0 (g in, copy out), gmem1 (p), gmem2 (m), gmem3 (v)."""
        return 4

    @property
    def full_name(self) -> str:
        """Name in device specifications, for example `update-tiny`."""
        return f"{self.kernel}-{self.name}"

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of ABI version, parameters and register map."""
        registers = [[r.name, r.offset, r.width_bits, str(r.access), [[f.name, f.lsb, f.width] for f in r.fields]]
                     for r in REGISTER_MAPS[self.kernel]]  # fmt: skip
        text = json.dumps({"abi": ABI_VERSION, "config": asdict(self), "registers": registers}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def digest64(self) -> int:
        """First 64 bits of the digest: what the identity block holds."""
        return int(self.digest[:16], 16)


CONFIGS = {
    c.full_name: c
    for c in (
        UpdateConfig("tiny", lanes=1, port_bits=64, outstanding_bursts=4, burst_bytes=512, clock_hz=100_000_000),
        UpdateConfig("smartssd", lanes=4, port_bits=512, outstanding_bursts=8, burst_bytes=4096, clock_hz=300_000_000),
    )
}


def config(full_name: str) -> UpdateConfig:
    """The build configuration of that name. Raises ConfigError that lists what exists."""
    if full_name not in CONFIGS:
        raise ConfigError(f"configuration must be one of {', '.join(sorted(CONFIGS))}, not {full_name!r}")
    return CONFIGS[full_name]
