"""A NAND channel of the C++ model (shims/nand.hpp), seen from Python: its settings, its pages, what it counted."""

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import NearflashError
from nearflash.sim.nand.parts import NandPart
from nearflash.sim.verilog import Design, Port, encode

__all__ = ["NandChannel", "NandModel", "NandStatistics", "NandViolation", "link_names", "nand_header"]


class NandViolation(NearflashError):
    """The controller broke a rule of ONFI; the text names lun, time and rule."""


@dataclass(frozen=True)
class NandModel:
    """How the NAND behind each channel behaves."""

    part: NandPart
    luns: int
    clock_hz: int
    """Of the controller's clock."""
    bit_error_rate: float = 0.0
    """Raw, of each read."""
    seed: int = 0
    disturb_reads: int = 0
    """Reads of a block since its erase that flip one more bit of each of its pages that is read; 0: they flip none."""

    def __post_init__(self) -> None:
        if not 1 <= self.luns <= 256:
            raise ValueError(f"luns must be 1 to 256, not {self.luns!r}")
        if not 0 <= self.bit_error_rate < 1:
            raise ValueError(f"bit_error_rate must be within [0, 1), not {self.bit_error_rate!r}")
        if self.disturb_reads < 0:
            raise ValueError(f"disturb_reads must be at least 0, not {self.disturb_reads!r}")


_TIMES = ("read_ns", "program_ns", "erase_ns", "cache_busy_ns", "reset_ns",
          "command_ns", "preamble_ns", "wb_ns", "adl_ns", "whr_ns", "ccs_ns", "rhw_ns")  # fmt: skip


class _Settings(ctypes.Structure):
    """Mirrors NandSettings in nand.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("luns", "page_bytes", "pages_per_block", "blocks", "seed", "disturb_reads")
        ),
        *((name, ctypes.c_double) for name in ("clock_hz", "link_bytes_per_s", *_TIMES, "jitter", "bit_error_rate")),
    ]

    @classmethod
    def of(cls, model: NandModel) -> "_Settings":
        part, timing = model.part, model.part.timing
        return cls(
            model.luns, part.raw_page_bytes, part.pages_per_block, part.blocks, model.seed, model.disturb_reads,
            model.clock_hz, timing.link_bytes_per_s, *(getattr(timing, name) for name in _TIMES),
            part.jitter, model.bit_error_rate,
        )  # fmt: skip


@dataclass(frozen=True)
class NandStatistics:
    """Counts of a channel; data, command, wait and idle cycles add up to `cycles`."""

    cycles: int
    data_cycles: int
    """In bursts of pages, preambles among them."""
    command_cycles: int
    """In command, address and status cycles."""
    wait_cycles: int
    """Between them, where a wait of ONFI holds the bus (tWHR, tCCS, tADL, tRHW)."""
    idle_cycles: int
    read_beats: int
    """Of pages and status, 8 bytes each."""
    written_beats: int
    reads: int
    programs: int
    erases: int
    resets: int
    polls: int
    busy_polls: int
    """Polls that found the lun busy."""
    selects: int
    column_changes: int
    bit_errors: int

    @property
    def busy(self) -> float:
        """Share of the time in which the bus was taken."""
        return 1 - self.idle_cycles / self.cycles

    @property
    def data(self) -> float:
        """Share of the time in which data moved."""
        return self.data_cycles / self.cycles


class NandChannel:
    """One channel inside a loaded library.

    `library` exports the functions of nand.hpp; `address` is that of its NandChannel. Pages lie at (lun, row), spare
    included; a page that was never written is all ones.
    """

    def __init__(self, library: ctypes.CDLL, address: int, model: NandModel) -> None:
        self._library, self._address = library, ctypes.c_void_p(address)
        for name in (
            "nand_page",
            "nand_configure",
            "nand_stick",
            "nand_spoil",
            "nand_mark",
            "nand_fail",
            "nand_load",
            "nand_start_log",
        ):
            getattr(library, name).restype = ctypes.c_int
        for name in ("nand_block_reads", "nand_block_erases", "nand_log"):
            getattr(library, name).restype = ctypes.c_uint64
        library.nand_error.restype = ctypes.c_char_p
        self.configure(model)

    def configure(self, model: NandModel) -> None:
        """Set part, rates and seed, forget a violation. Another number of luns or size of page empties all pages."""
        self.model = model
        self._library.nand_configure(self._address, ctypes.byref(_Settings.of(model)))

    def load(self, lun: int, rows: NDArray[np.integer[Any]], pages: NDArray[np.uint8]) -> None:
        """Put `pages` (n, bytes) at `rows` (n,) of `lun`, without time or wear; bytes beyond theirs are all ones."""
        self._check_unit(lun)
        rows = np.ascontiguousarray(rows, np.uint32)
        pages = np.ascontiguousarray(pages, np.uint8)
        if pages.ndim != 2 or len(pages) != len(rows) or pages.shape[1] > self.model.part.raw_page_bytes:
            raise ValueError(
                f"pages must be {len(rows)} of at most {self.model.part.raw_page_bytes} bytes, not {pages.shape}"
            )
        counts = (ctypes.c_uint64(n) for n in pages.shape)
        self._library.nand_load(self._address, ctypes.c_uint64(lun), ctypes.c_void_p(rows.ctypes.data), next(counts),
                                ctypes.c_void_p(pages.ctypes.data), next(counts))  # fmt: skip

    def page(self, lun: int, row: int) -> NDArray[np.uint8]:
        """Read the bytes stored there, spare included."""
        self._check_unit(lun)
        page = np.empty(self.model.part.raw_page_bytes, np.uint8)
        self._library.nand_page(
            self._address, ctypes.c_uint64(lun), ctypes.c_uint32(row), ctypes.c_void_p(page.ctypes.data)
        )
        return page

    def stick(self, lun: int, after: int = 0) -> None:
        """The lun finishes `after` more commands that make it busy, then stays busy for ever; -1: it finishes all."""
        self._check_unit(lun)
        self._library.nand_stick(self._address, ctypes.c_uint64(lun), ctypes.c_int64(after))

    def spoil(self, lun: int, block: int) -> None:
        """Programs and erases of the block fail from now on."""
        self._check_unit(lun)
        self._library.nand_spoil(self._address, ctypes.c_uint64(lun), ctypes.c_uint32(block))

    def mark(self, lun: int, block: int) -> None:
        """The block is bad from the factory: marked as ONFI has it, and spoiled."""
        self._check_unit(lun)
        column = ctypes.c_uint64(self.model.part.page_bytes)
        self._library.nand_mark(self._address, ctypes.c_uint64(lun), ctypes.c_uint32(block), column)

    def fail(self, lun: int, block: int, *, programs: int = 0, erases: int = 0) -> None:
        """So many of the next programs and erases of the block fail."""
        self._check_unit(lun)
        counts = ctypes.c_uint64(programs), ctypes.c_uint64(erases)
        self._library.nand_fail(self._address, ctypes.c_uint64(lun), ctypes.c_uint32(block), *counts)

    def block_reads(self, lun: int, block: int) -> int:
        """Reads of the block's pages."""
        self._check_unit(lun)
        return int(self._library.nand_block_reads(self._address, ctypes.c_uint64(lun), ctypes.c_uint32(block)))

    def block_erases(self, lun: int, block: int) -> int:
        """Erases of the block."""
        self._check_unit(lun)
        return int(self._library.nand_block_erases(self._address, ctypes.c_uint64(lun), ctypes.c_uint32(block)))

    def statistics(self, *, clear: bool = False) -> NandStatistics:
        """Counts since the channel was made or last cleared."""
        names = [field.name for field in fields(NandStatistics)]
        counts = (ctypes.c_uint64 * len(names))()
        self._library.nand_statistics(self._address, counts, int(clear))
        return NandStatistics(**dict(zip(names, counts, strict=True)))

    def start_log(self) -> None:
        """Keep every bus cycle from now on."""
        self._library.nand_start_log(self._address)

    @property
    def logged(self) -> int:
        """Bus cycles in the log so far."""
        return int(self._library.nand_log(self._address, None, ctypes.c_uint64(0))) // 3

    def log(self) -> NDArray[np.uint8]:
        """The bus cycles (n, 3): lun, CycleKind, byte."""
        cycles = np.empty((self.logged, 3), np.uint8)
        self._library.nand_log(self._address, ctypes.c_void_p(cycles.ctypes.data), ctypes.c_uint64(cycles.size))
        return cycles

    def check(self) -> None:
        """Raises NandViolation where the controller broke a rule."""
        if error := self._library.nand_error(self._address):
            raise NandViolation(error.decode())

    def _check_unit(self, lun: int) -> None:
        if not 0 <= lun < self.model.luns:
            raise ValueError(f"lun must be below {self.model.luns}, not {lun!r}")


_SUFFIX = "__cycles__payload"
_PINS = """struct NandPins{index} {{
    Vtop& top;
    auto& cycle_ready() {{ return top.{cycles}ready; }}
    auto& read_valid() {{ return top.{read}valid; }}
    auto& read_data() {{ return top.{read}payload; }}
    auto& write_ready() {{ return top.{write}ready; }}
    uint64_t cycle_valid() const {{ return top.{cycles}valid; }}
    uint64_t read_ready() const {{ return top.{read}ready; }}
    uint64_t write_valid() const {{ return top.{write}valid; }}
    uint64_t write_data() const {{ return top.{write}payload; }}
    uint64_t lun() const {{ return top.{cycles}payload & 0xFF; }}
    uint64_t kind() const {{ return top.{cycles}payload >> 8 & 3; }}
    uint64_t byte() const {{ return top.{cycles}payload >> 10 & 0xFF; }}
    uint64_t beats() const {{ return top.{cycles}payload >> 18; }}
}};"""
_DEVICES = """struct NandDevices {{
    NandChannel channels[{count}];
    void drive(Vtop& top) {{ {drive} }}
    void sample(Vtop& top) {{ {sample} }}
    void reset() {{
        for (auto& channel : channels) channel.reset();
    }}
    void* at(int index) {{ return &channels[index]; }}
}};
"""


def link_names(ports: tuple[Port, ...]) -> list[str]:
    """Names of the NAND links among a design's ports, in the order of the ports."""
    return [port.name.removesuffix(_SUFFIX) for port in ports if port.name.endswith(_SUFFIX)]


def nand_header(design: Design) -> str:
    """C++ text: pins of each NAND link of the design, and a class NandDevices that puts a channel behind each.

    Each cycle: drive(top), the model settles, sample(top), the clock edge; reset() with the design's reset.
    Raises ValueError for a design without a link.
    """
    names = link_names(design.ports)
    if not names:
        raise ValueError(f"the design must have a NAND link, not just {', '.join(port.name for port in design.ports)}")
    lines = ["#pragma once", '#include "nand.hpp"']
    for index, name in enumerate(names):
        members = {part: encode(f"{name}__{part}__") for part in ("cycles", "read", "write")}
        lines.append(_PINS.format(index=index, **members))
    steps = {
        step: " ".join(f"NandPins{at} pins{at}{{top}}; channels[{at}].{step}(pins{at});" for at in range(len(names)))
        for step in ("drive", "sample")
    }
    return "\n".join([*lines, _DEVICES.format(count=len(names), **steps)])
