"""Bench `attend`, channel: the controller of one NAND channel, cycle by cycle, beside the event model of exploring.

Both read the same pages in part, each as soon as there is a place for it. Cycles are those of all requests less those
of a run with the first one alone, so that the resets of the LUNs before it do not count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import CODEWORD_BYTES, RAW_BYTES
from nearflash.abi.kernel.config import attend_config
from nearflash.sim.nand.parts import NandPart, nand_part
from nearflash.verify.bench.attend_performance import CONFIG
from nearflash.verify.fixtures.nand_channel import ChannelTiming, Request, channel_cycles
from nearflash.verify.fixtures.nand_controller import ControllerBench, PageRead

__all__ = ["MIXES", "channel_rows", "compare", "controller"]

PARTS = ("slc-1400", "page16k-1400", "instinfer-1400")
_PAGES_PER_BLOCK, _TIMEOUT_CYCLES = 16, 100_000_000

Draw = Callable[[np.random.Generator, int, int], int]
"""A mask of codewords of a page: of the generator, their number in a page, and the request's number."""


def _whole(rng: np.random.Generator, size: int, number: int) -> int:
    return (1 << size) - 1


def _single(rng: np.random.Generator, size: int, number: int) -> int:
    return 1 << int(rng.integers(size))


def _runs(rng: np.random.Generator, size: int, number: int) -> int:
    return int(rng.integers(1, 1 << size))


def _draw_mixed(rng: np.random.Generator, size: int, number: int) -> int:
    return (_whole, _runs)[int(rng.integers(2))](rng, size, number)


MIXES: dict[str, tuple[Draw, int]] = {
    "whole pages, LUNs in turn": (_whole, 1),
    "whole pages": (_whole, 0),
    "whole pages of one LUN": (_whole, -1),
    "single codewords": (_single, 0),
    "runs of codewords": (_runs, 0),
    "whole pages and runs": (_draw_mixed, 0),
}
"""By name: which codewords of each page, and LUNs: at random (0), in turn (1), always the first (-1)."""


def channel_rows(parts: Sequence[str] = PARTS, count: int = 400) -> Iterator[dict[str, Any]]:
    """Each mix on each part, on the LUNs of the build."""
    config = attend_config(CONFIG)
    for name in parts:
        part = nand_part(name)
        luns = min(part.luns, config.luns)
        bench = controller(part, luns, config.clock_hz, f"bench_channel_{name.replace('-', '_')}")
        for mix in MIXES:
            rtl, event = compare(bench, mix, count)
            yield {"config": CONFIG, "part": name, "luns": luns, "mix": mix, "requests": count, "rtl_cycles": rtl,
                   "event_cycles": event, "error": event / rtl - 1, "error_of": "rtl_cycles",
                   "unit": "clock cycles"}  # fmt: skip


def controller(part: NandPart, luns: int, clock_hz: int, name: str) -> ControllerBench:
    """The Verilated controller, its first pages programmed."""
    bench = ControllerBench(replace(part, pages_per_block=_PAGES_PER_BLOCK), luns, clock_hz, name)
    stored = np.zeros((_PAGES_PER_BLOCK, part.page_bytes // CODEWORD_BYTES * RAW_BYTES), np.uint8)
    for lun in range(luns):
        bench.channel.load(lun, np.arange(_PAGES_PER_BLOCK), stored)
    return bench


def compare(bench: ControllerBench, mix: str, count: int, seed: int = 1) -> tuple[int, float]:
    """Cycles of so many requests in the RTL and in the event model."""
    part, luns, rng = bench.model.part, bench.model.luns, np.random.default_rng(seed)
    size, (draw, order) = part.page_bytes // CODEWORD_BYTES, MIXES[mix]
    reads = []
    for number in range(count):
        lun = {0: int(rng.integers(luns)), 1: number % luns, -1: 0}[order]
        reads.append(PageRead(lun, int(rng.integers(_PAGES_PER_BLOCK)), draw(rng, size, number)))
    timing = ChannelTiming(part.timing, bench.model.clock_hz)
    rtl, event = [], []
    for some in (reads, reads[:1]):
        bench.channel.statistics(clear=True)
        bench.run(some, page_codewords=size, timeout_cycles=_TIMEOUT_CYCLES)
        rtl.append(bench.channel.statistics().cycles)
        event.append(channel_cycles((_request(read) for read in some), timing, luns))
    return rtl[0] - rtl[1], event[0] - event[1]


def _request(read: PageRead) -> Request:
    mask = read.codewords
    begins = mask & ~(mask << 1)
    low = (mask & -mask).bit_length() - 1
    first = ((mask >> low) + 1 & ~(mask >> low)).bit_length() - 1  # codewords of the first run
    return Request(0, read.lun, mask.bit_count(), begins.bit_count(), scan=low + first)
