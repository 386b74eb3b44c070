"""Build configurations: named, frozen, and identified by a digest.

The digest covers the ABI version, every parameter and the kernel's register map, so a host that knows a digest knows
how to talk to the device. Boards add their names here.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TypeVar

from nearflash.abi import ABI_VERSION
from nearflash.abi.bitmap import RowFormat
from nearflash.abi.coded import LevelFormat
from nearflash.abi.errors import ConfigError
from nearflash.abi.fields import RegisterMap
from nearflash.abi.nand import NandTiming
from nearflash.abi.optimizers import OPTIMIZERS, MasterFormat, StateFormat
from nearflash.abi.registers import REGISTER_MAPS, SPLIT_UPDATE, UPDATE

__all__ = [
    "CONFIGS",
    "AttendConfig",
    "ExpandConfig",
    "KernelConfig",
    "UpdateConfig",
    "attend_config",
    "config",
    "config_of",
    "expand_config",
    "update_config",
]

_Kind = TypeVar("_Kind", bound="KernelConfig")
_PORT_WIDTHS_BITS = (64, 128, 256, 512)
_STATE_FORMATS = tuple(map(str, StateFormat))
_MASTER_FORMATS = tuple(map(str, MasterFormat))
_ROW_FORMATS = tuple(form.name.lower() for form in RowFormat)
_LEVEL_FORMATS = tuple(form.name.lower() for form in LevelFormat)
_LONGEST_ROW = (1 << 32) - 512
_SLC = NandTiming(read_ns=4_000, program_ns=75_000, erase_ns=1_000_000, cache_busy_ns=500,
                  link_bytes_per_s=1_400_000_000)  # fmt: skip
_MLC = NandTiming(read_ns=45_000, program_ns=400_000, erase_ns=3_500_000, cache_busy_ns=3_000,
                  link_bytes_per_s=1_400_000_000)  # fmt: skip


class KernelConfig:
    """Base of build configurations: a kernel, a name, and the digest that identifies them."""

    name: str
    kernel: str
    clock_hz: int
    """Clock that the build aims at, Hz."""
    port_bits: int

    def _check(self, rules: Mapping[str, tuple[bool, str]]) -> None:
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @property
    def port_bytes(self) -> int:
        """Data width of each port, bytes."""
        return self.port_bits // 8

    @property
    def full_name(self) -> str:
        """Name in device specifications, for example `update-tiny`."""
        return f"{self.kernel}-{self.name}"

    @property
    def registers(self) -> RegisterMap:
        """Register map of the build."""
        return REGISTER_MAPS[self.kernel]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of ABI version, parameters and register map."""
        registers = [[r.name, r.offset, r.width_bits, str(r.access), [[f.name, f.lsb, f.width] for f in r.fields]]
                     for r in self.registers]  # fmt: skip
        parameters = asdict(self)  # type: ignore[call-overload]
        # What came later changes no digest of a build without it: bitstreams that exist stay known.
        for one in fields(self):  # type: ignore[arg-type]
            if one.metadata.get("later") and getattr(self, one.name) == one.default:
                del parameters[one.name]
        text = json.dumps({"abi": ABI_VERSION, "config": parameters, "registers": registers}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def digest64(self) -> int:
        """First 64 bits of the digest: what the identity block holds."""
        return int(self.digest[:16], 16)


SOFTWARE_GRADIENTS = ("fp32", "topk", "bf16")
"""Formats of gradients that devices in software read."""


@dataclass(frozen=True)
class UpdateConfig(KernelConfig):
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
    optimizers: tuple[str, ...] = OPTIMIZERS
    """Rules that the lanes compute (OptimizerStep.optimizer)."""
    state_formats: tuple[str, ...] = ("fp32",)
    """Formats of m and v that the kernel reads and writes."""
    gradients: tuple[str, ...] = ("fp32",)
    """Formats of gradients that it reads."""
    delta: bool = field(default=False, metadata={"later": True})
    """Whether it can write what a step changes in the place of the low-precision copy (nearflash.abi.delta)."""
    masters: tuple[str, ...] = field(default=_MASTER_FORMATS[:1], metadata={"later": True})
    """Formats of p that it reads and writes."""
    kernel: str = "update"

    def __post_init__(self) -> None:
        self._check({
            "lanes": (self.lanes in (1, 2, 4, 8), "a power of two up to 8"),
            "port_bits": (self.port_bits in _PORT_WIDTHS_BITS and self.port_bits >= 64 * self.lanes,
                          "64, 128, 256 or 512 and at least 64 bits a lane"),
            "outstanding_bursts": (1 <= self.outstanding_bursts <= 32, "between 1 and 32"),
            "burst_bytes": (self.burst_bytes > 0 and 4096 % self.burst_bytes == 0
                            and self.port_bytes <= self.burst_bytes <= 256 * self.port_bytes,
                            "a divisor of 4096 of 1 to 256 beats"),
            "state_formats": (self.state_formats in (_STATE_FORMATS[:1], _STATE_FORMATS),
                              f"fp32 alone, or {', '.join(_STATE_FORMATS)}"),
            "gradients": (self.gradients in (("fp32",), SOFTWARE_GRADIENTS)
                          or (self.gradients == ("fp32", "topk") and self.lanes <= 4),
                          "fp32, and topk with up to 4 lanes"),
            "delta": (not self.delta or self.gradients == SOFTWARE_GRADIENTS
                      or self.lanes <= 4, "False but for up to 4 lanes"),
            "masters": (self.masters in (_MASTER_FORMATS[:1], _MASTER_FORMATS),
                        f"fp32 alone, or {', '.join(_MASTER_FORMATS)}"),
        })  # fmt: skip

    @property
    def ports(self) -> int:
        """AXI4 ports: gmem0 (g in, copy out), gmem1 (p), gmem2 (m), gmem3 (v)."""
        return 4

    @property
    def registers(self) -> RegisterMap:
        """Register map of the build: one with split masters has the addresses of their second halves, too."""
        return UPDATE if len(self.masters) == 1 else SPLIT_UPDATE

    def in_software(self) -> "UpdateConfig":
        """Widen the build to what a device in software computes: every rule and every format, at the build's ports."""
        return replace(self, optimizers=OPTIMIZERS, state_formats=_STATE_FORMATS, gradients=SOFTWARE_GRADIENTS,
                       delta=True, masters=_MASTER_FORMATS)  # fmt: skip


@dataclass(frozen=True)
class AttendConfig(KernelConfig):
    """Parameters of an `attend` kernel. Raises ConfigError when they do not fit together."""

    name: str
    channels: int
    """Channel engines; with NAND, one behind each flash channel."""
    heads_per_beat: int
    """Query heads that a channel's lanes compute at once (G); groups of more take several passes a beat."""
    contexts: int
    """Heads in flight."""
    gather_slots: int
    """Of these, heads whose K and V are being gathered: each has its own exact sums."""
    query_rows: int
    """Rows of four elements of q that a channel holds: a head takes d/4 rows a pass."""
    score_blocks: int
    """Index blocks that a channel holds scores of (passes of one block count apart)."""
    score_entries: int
    """Entries (pages or tokens) that the selection stores, over all contexts and their query heads."""
    selector_keys: int
    """Keys of one head that the selector holds."""
    luns: int
    """LUNs (or planes that read independently) of a channel; 0: no NAND, pages come from memory."""
    page_bytes: int
    """Largest page, bytes: 4096, 8192 or 16384."""
    clock_hz: int
    port_bits: int = 64
    """Data width of the memory port. Inside, 8 bytes a cycle are read: a wider port serves fewer, longer beats."""
    nand: NandTiming = _SLC
    """What the controllers count with; without LUNs it means nothing."""
    mask_beats: int = field(default=0, metadata={"later": True})
    """Beats of four entries that masks of selected heads may wait in for their walk. With them a head has the entries
    that it needs from its scan to the end of its selection, whatever the contexts in use; without (0) each context has
    an equal share of the entries, and a selection waits while its mask is walked."""
    kernel: str = "attend"

    def __post_init__(self) -> None:
        def power(value: int, least: int, most: int) -> tuple[bool, str]:
            return least <= value <= most and value & (value - 1) == 0, f"a power of two, {least} to {most}"

        self._check({
            "channels": (1 <= self.channels <= 16, "between 1 and 16"),
            "heads_per_beat": power(self.heads_per_beat, 1, 8),
            "contexts": power(self.contexts, 1, 64),
            "gather_slots": power(self.gather_slots, 1, self.contexts),
            "query_rows": power(self.query_rows, 64, 4096),
            "score_blocks": power(self.score_blocks, 1, 16),
            "score_entries": power(self.score_entries, 1024, 1 << 20),
            "selector_keys": power(self.selector_keys, 256, 1 << 17),
            "luns": (self.luns == 0 or power(self.luns, 2, 64)[0], "0 or a power of two, 2 to 64"),
            "page_bytes": power(self.page_bytes, 4096, 16384),
            "port_bits": (self.port_bits in _PORT_WIDTHS_BITS, "64, 128, 256 or 512"),
            "mask_beats": (self.mask_beats == 0 or power(self.mask_beats, 64, 1 << 15)[0],
                           "0 or a power of two, 64 to 32768"),
        })  # fmt: skip

    @property
    def ports(self) -> int:
        """AXI4 ports: gmem0, for all of the kernel's traffic with memory."""
        return 1

    @property
    def inner(self) -> "AttendConfig":
        """The same build with the buses of 64 bits that its units have."""
        return replace(self, port_bits=64)


@dataclass(frozen=True)
class ExpandConfig(KernelConfig):
    """Parameters of an `expand` kernel. Raises ConfigError when they do not fit together."""

    name: str
    width: int
    """Elements expanded per cycle (W)."""
    port_bits: int
    """Data width of both AXI4 ports, bits: 64, 128, 256 or 512, and at least 16·width."""
    columns_max: int
    """Longest row that the queues of rows' sections have room for; a multiple of 512."""
    outstanding_bursts: int
    """Bursts that the reader and the writer may each have in flight."""
    burst_bytes: int
    """Longest burst, bytes; a divisor of 4096, at most 256 beats."""
    clock_hz: int
    """Clock that the build aims at, Hz."""
    formats: tuple[str, ...] = _ROW_FORMATS
    """Formats that it expands (names of nearflash.abi.bitmap.RowFormat and nearflash.abi.coded.LevelFormat)."""
    kernel: str = "expand"

    def __post_init__(self) -> None:
        self._check({
            "width": (self.width in (4, 8, 16, 32), "a power of two, 4 to 32"),
            "port_bits": (self.port_bits in _PORT_WIDTHS_BITS and self.port_bits >= 16 * self.width,
                          "64, 128, 256 or 512 and at least 16 bits an element"),
            "columns_max": (self.columns_max % 512 == 0 and 512 <= self.columns_max <= _LONGEST_ROW,
                            "a multiple of 512, less than 2^32"),
            "outstanding_bursts": (2 <= self.outstanding_bursts <= 32, "between 2 and 32"),
            "burst_bytes": (self.burst_bytes > 0 and 4096 % self.burst_bytes == 0
                            and self.port_bytes <= self.burst_bytes <= 256 * self.port_bytes,
                            "a divisor of 4096 of 1 to 256 beats"),
            "formats": (set(self.formats) <= {*_ROW_FORMATS, *_LEVEL_FORMATS}
                        and not set(_ROW_FORMATS).isdisjoint(self.formats)
                        and (self.levels or set(_LEVEL_FORMATS).isdisjoint(self.formats)),
                        f"some of {', '.join(_ROW_FORMATS)}, and none or both of {', '.join(_LEVEL_FORMATS)}"),
        })  # fmt: skip

    @property
    def levels(self) -> bool:
        """Whether it expands coded weights."""
        return set(_LEVEL_FORMATS) <= set(self.formats)

    @property
    def ports(self) -> int:
        """AXI4 ports: gmem0 (matrix in), gmem1 (dense rows out)."""
        return 2

    def in_software(self) -> "ExpandConfig":
        """Widen the build to what a device in software expands: every format, rows of any length."""
        return replace(self, formats=_ROW_FORMATS + _LEVEL_FORMATS, columns_max=_LONGEST_ROW)


CONFIGS: dict[str, UpdateConfig | AttendConfig | ExpandConfig] = {
    c.full_name: c
    for c in (
        UpdateConfig("tiny", lanes=1, port_bits=64, outstanding_bursts=4, burst_bytes=512, clock_hz=100_000_000,
                     state_formats=_STATE_FORMATS, gradients=("fp32", "topk")),
        UpdateConfig("tiny-delta", lanes=1, port_bits=64, outstanding_bursts=4, burst_bytes=512, clock_hz=100_000_000,
                     delta=True),
        UpdateConfig("tiny-split", lanes=1, port_bits=64, outstanding_bursts=4, burst_bytes=512, clock_hz=100_000_000,
                     state_formats=_STATE_FORMATS, gradients=("fp32", "topk"), masters=_MASTER_FORMATS),
        UpdateConfig("smartssd", lanes=4, port_bits=512, outstanding_bursts=8, burst_bytes=4096, clock_hz=300_000_000,
                     state_formats=_STATE_FORMATS, gradients=("fp32", "topk")),
        UpdateConfig("smartssd-delta", lanes=4, port_bits=512, outstanding_bursts=8, burst_bytes=4096,
                     clock_hz=300_000_000, state_formats=_STATE_FORMATS, gradients=("fp32", "topk"), delta=True),
        UpdateConfig("smartssd-split", lanes=4, port_bits=512, outstanding_bursts=8, burst_bytes=4096,
                     clock_hz=300_000_000, state_formats=_STATE_FORMATS, gradients=("fp32", "topk"),
                     masters=_MASTER_FORMATS),
        UpdateConfig("ku3p", lanes=1, port_bits=64, outstanding_bursts=8, burst_bytes=512, clock_hz=125_000_000),
        UpdateConfig("pynq-z2", lanes=1, port_bits=64, outstanding_bursts=8, burst_bytes=128, clock_hz=100_000_000),
        UpdateConfig("zynq7010", lanes=1, port_bits=64, outstanding_bursts=4, burst_bytes=128, clock_hz=100_000_000),
        AttendConfig("tiny", channels=2, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=1024, score_blocks=8,
                     score_entries=1 << 15, selector_keys=4096, luns=4, page_bytes=4096, clock_hz=100_000_000,
                     mask_beats=1024),
        AttendConfig("pynq-z2", channels=1, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=2048,
                     score_blocks=8, score_entries=8192, selector_keys=4096, luns=0, page_bytes=4096,
                     clock_hz=100_000_000),
        AttendConfig("smartssd", channels=2, heads_per_beat=4, contexts=16, gather_slots=8, query_rows=1024,
                     score_blocks=4, score_entries=1 << 16, selector_keys=1 << 13, luns=0, page_bytes=16384,
                     clock_hz=300_000_000, port_bits=512),
        AttendConfig("smartssd-tiny", channels=2, heads_per_beat=1, contexts=4, gather_slots=2, query_rows=1024,
                     score_blocks=8, score_entries=1 << 14, selector_keys=4096, luns=0, page_bytes=4096,
                     clock_hz=100_000_000, port_bits=512),
        AttendConfig("zynq7045", channels=8, heads_per_beat=4, contexts=32, gather_slots=16, query_rows=1024,
                     score_blocks=4, score_entries=1 << 16, selector_keys=1 << 15, luns=16, page_bytes=16384,
                     clock_hz=285_000_000, nand=_MLC, mask_beats=4096),
        AttendConfig("zu17eg", channels=8, heads_per_beat=4, contexts=32, gather_slots=16, query_rows=1024,
                     score_blocks=8, score_entries=1 << 17, selector_keys=1 << 16, luns=32, page_bytes=16384,
                     clock_hz=300_000_000, nand=_MLC, mask_beats=4096),
        ExpandConfig("tiny", width=4, port_bits=64, columns_max=1024, outstanding_bursts=4, burst_bytes=512,
                     clock_hz=100_000_000),
        ExpandConfig("pynq-z2", width=4, port_bits=64, columns_max=16384, outstanding_bursts=8, burst_bytes=128,
                     clock_hz=100_000_000),
        ExpandConfig("zynq7010", width=4, port_bits=64, columns_max=4096, outstanding_bursts=8, burst_bytes=128,
                     clock_hz=100_000_000),
        ExpandConfig("tiny-levels", width=4, port_bits=64, columns_max=65536, outstanding_bursts=4, burst_bytes=512,
                     clock_hz=100_000_000, formats=_ROW_FORMATS + _LEVEL_FORMATS),
        ExpandConfig("smartssd", width=16, port_bits=512, columns_max=36864, outstanding_bursts=8, burst_bytes=4096,
                     clock_hz=300_000_000),
        ExpandConfig("smartssd-levels", width=16, port_bits=512, columns_max=65536, outstanding_bursts=8,
                     burst_bytes=4096, clock_hz=300_000_000, formats=_ROW_FORMATS + _LEVEL_FORMATS),
    )
}  # fmt: skip


def config(full_name: str) -> UpdateConfig | AttendConfig | ExpandConfig:
    """The build configuration of that name. Raises ConfigError that lists what exists."""
    if full_name not in CONFIGS:
        raise ConfigError(f"configuration must be one of {', '.join(sorted(CONFIGS))}, not {full_name!r}")
    return CONFIGS[full_name]


def config_of(kernel: str, name: str) -> UpdateConfig | AttendConfig | ExpandConfig:
    """The build configuration of a kernel by its own name, `tiny`, or by its full one, `update-tiny`.

    Raises ConfigError that lists what exists.
    """
    return config(name if name.startswith(f"{kernel}-") else f"{kernel}-{name}")


def update_config(full_name: str) -> UpdateConfig:
    """The configuration of that name of an `update` kernel. Raises ConfigError that lists what exists."""
    return _of_kind(UpdateConfig, full_name)


def attend_config(full_name: str) -> AttendConfig:
    """The configuration of that name of an `attend` kernel. Raises ConfigError that lists what exists."""
    return _of_kind(AttendConfig, full_name)


def expand_config(full_name: str) -> ExpandConfig:
    """The configuration of that name of an `expand` kernel. Raises ConfigError that lists what exists."""
    return _of_kind(ExpandConfig, full_name)


def _of_kind(kind: type[_Kind], full_name: str) -> _Kind:
    config = CONFIGS.get(full_name)
    if not isinstance(config, kind):
        names = ", ".join(sorted(name for name, c in CONFIGS.items() if isinstance(c, kind)))
        raise ConfigError(f"configuration must be one of {names}, not {full_name!r}")
    return config
