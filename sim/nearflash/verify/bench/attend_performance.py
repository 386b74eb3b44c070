"""Bench `attend`, performance and events: heads in flight on eight NAND channels, in the RTL and in the event model.

All heads of a row are alike in shape; each has a q, K and V of its own. (Heads that share pages want the same ones
again, and the channels of those are busier than others.) A batch runs to its end; figures are of the window from the
end of a quarter of its heads to the beginning of the last one, so that neither filling nor emptying the contexts
counts; for how many heads it counts, its share of all data on the links says: heads end in bunches. A channel is
busy while its link moves pages, commands, addresses or status, or waits between them as ONFI
demands; `channel_data_fraction` counts page data alone. Some heads are compared with the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.kernel.config import AttendConfig, attend_config
from nearflash.device.drivers.attend import Head, HeadOutput, PlacedBatch
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.vectors import TestVector, differences
from nearflash.sim.nand.channel import NandModel
from nearflash.sim.nand.parts import nand_part
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.heads import completion_records, page_settings, place_heads
from nearflash.verify.bench.attend_events import Load, simulate

__all__ = ["EVENTS", "RTL", "Point", "event_rows", "performance_rows"]

CONFIG, _ZU17EG = "attend-zynq7045", "attend-zu17eg"
_DIM, _STEP_CYCLES, _COMPARED_HEADS = 128, 256, 4
_MEMORY_BYTES, _WATCHDOG_CYCLES = 1 << 30, 1_000_000
_OF = "all channels' clock cycles in which their links are taken, commands and waits of ONFI included"


@dataclass(frozen=True)
class Point:
    """One row: S tokens, heads in flight, heads in all, query heads of a KV head."""

    part: str
    tokens: int
    contexts: int
    heads: int
    group: int = 4
    mode: str = "sparf-page"
    build: str = CONFIG

    @property
    def config(self) -> AttendConfig:
        """The build for the part: its timing and its pages."""
        part = nand_part(self.part)
        return replace(attend_config(self.build), nand=part.timing, page_bytes=part.page_bytes)

    @property
    def settings(self) -> HeadSettings:
        """Settings of every head."""
        return page_settings(self.mode, _DIM, self.tokens, nand_part(self.part).page_bytes)


RTL = (
    Point("slc-1400", 1024, 32, 192), Point("slc-1400", 4096, 32, 96), Point("slc-1400", 16384, 8, 32),
    Point("page16k-1400", 1024, 32, 192), Point("page16k-1400", 4096, 32, 96), Point("page16k-1400", 16384, 16, 48),
)  # fmt: skip
EVENTS = (
    Point("slc-1400", 131072, 4, 24), Point("page16k-1400", 131072, 8, 32),
    Point("page16k-1400", 4096, 32, 96, 4, build=_ZU17EG), Point("page16k-1400", 4096, 16, 96, 8, build=_ZU17EG),
    Point("page16k-1400", 131072, 8, 32, 4, build=_ZU17EG), Point("page16k-1400", 131072, 4, 16, 8, build=_ZU17EG),
)  # fmt: skip


def performance_rows(points: Sequence[Point] = RTL) -> Iterator[dict[str, Any]]:
    """Each point in the RTL and in the event model."""
    for point in points:
        yield _row(point, "rtl", _measure(point))
        yield from event_rows([point])


def event_rows(points: Sequence[Point] = EVENTS) -> Iterator[dict[str, Any]]:
    """Each point in the event model alone, which takes seconds."""
    for point in points:
        yield _row(point, "event", _simulate(point))


def _row(point: Point, source: str, figures: dict[str, float]) -> dict[str, Any]:
    return {"config": point.build, "digest": point.config.digest, "mode": point.mode, "part": point.part,
            "tokens": point.tokens, "group": point.group, "contexts": point.contexts, "heads": point.heads,
            "mask_beats": point.config.mask_beats,
            **figures, "source": source, "of": _OF, "unit": "clock cycles"}  # fmt: skip


def _simulate(point: Point) -> dict[str, float]:
    load = Load(point.settings, point.tokens, point.group, 1 / 8)
    outcome = simulate(point.config, nand_part(point.part), load, point.contexts, heads=point.heads)
    return {
        "channel_busy_fraction": outcome.channel_busy_fraction, "mac_duty": outcome.lane_busy_fraction,
        "cycles_per_head": outcome.cycles_per_head, **outcome.phases,
    }  # fmt: skip


def _vector(point: Point, index: int) -> TestVector:
    rng = np.random.default_rng(index)
    q, k, v = (rng.standard_normal((size, _DIM)) for size in (point.group, point.tokens, point.tokens))
    return TestVector.of(point.settings, PageTag(index, 0, index), q, k, v)


def _measure(point: Point) -> dict[str, float]:
    config, vectors = point.config, (_vector(point, index) for index in range(point.heads))
    model = NandModel(nand_part(point.part), config.luns, config.clock_hz)
    with (
        VerilatorDevice(config, nand=model, memory_bytes=_MEMORY_BYTES) as device,
        place_heads(device, vectors) as heads,
    ):
        window = _Window(device, heads, point.contexts)
        figures, results = window.run(), window.results()
    compared = range(0, point.heads, -(-point.heads // _COMPARED_HEADS))
    wrong = [differences(_vector(point, index), results[index].completion, results[index].out) for index in compared]
    return {**figures, "heads_compared": len(compared), "mismatches": sum(map(bool, wrong))}


class _Window:
    """A batch, and its middle."""

    def __init__(self, device: VerilatorDevice, heads: Sequence[Head], contexts: int) -> None:
        self._device, self._kernel, self._count = device, device.kernel, len(heads)
        self._batch = PlacedBatch(device, heads, contexts, _WATCHDOG_CYCLES)
        self._first, self._last = self._count // 4, self._count - contexts

    def run(self) -> dict[str, float]:
        """Figures of the window; counters of the kernel, over the whole batch, a head."""
        ticket = self._device.submit(self._batch.batch)
        begin = self._until(self._first)
        before = sum(channel.statistics(clear=True).read_beats for channel in self._kernel.channels)
        window = self._until(self._last) - begin
        channels = [channel.statistics() for channel in self._kernel.channels]
        within = sum(channel.read_beats for channel in channels)
        counters = self._device.wait(ticket, 3600).counters
        every = before + sum(channel.statistics().read_beats for channel in self._kernel.channels)
        assert not counters["heads_faulty"]
        busy = [channel.busy for channel in channels]
        taken = len(channels) * counters["cycles"]
        return {
            "channel_busy_fraction": fmean(busy),
            "channel_busy_least": min(busy),
            "channel_busy_most": max(busy),
            "channel_data_fraction": fmean(channel.data for channel in channels),
            "mac_duty": counters["lane_cycles"] / taken,
            "cycles_per_head": window * every / self._count / within,
            "score_wait_fraction": counters["wait_score_cycles"] / taken,
            **{f"{phase}_cycles": counters[f"{phase}_cycles"] / self._count
               for phase in ("prepare", "scan", "select", "gather", "finish")},
            "batch_cycles": counters["cycles"],
        }  # fmt: skip

    def results(self) -> list[HeadOutput]:
        """Results of all heads, in order."""
        return self._batch.results()

    def _until(self, ended: int) -> int:
        """Run until so many heads have ended; the cycle."""
        records = completion_records(self._device, self._batch)
        while records.any(axis=1).sum() < ended:
            self._kernel.advance(_STEP_CYCLES)
        return self._kernel.cycles
