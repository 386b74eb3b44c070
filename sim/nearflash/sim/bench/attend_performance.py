"""Bench `attend`, performance: heads in flight on eight NAND channels, cycle by cycle, beside the event model.

All heads of a row are alike in shape and differ in q; a few share their K and V, so that many fit. A batch runs to its
end; figures are of the window between the completions of two heads in the middle, so that neither filling nor emptying
the contexts counts. A channel is busy while its link moves pages, commands, addresses or status, or waits between them
as ONFI demands; `channel_data_fraction` counts page data alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from nearflash.abi.attend.codeword import Owner
from nearflash.abi.config import AttendConfig, attend_config
from nearflash.device.attend import Head, PlacedBatch
from nearflash.model.attend.case import Case
from nearflash.model.attend.settings import Settings
from nearflash.sim.bench.attend_events import Load, simulate
from nearflash.sim.device import VerilatorDevice
from nearflash.sim.heads import completion_records, page_settings, placed
from nearflash.sim.nand.channel import NandModel
from nearflash.sim.nand.parts import nand_part

__all__ = ["EVENTS", "RTL", "Point", "performance_rows"]

CONFIG = "attend-zynq7045"
_DIM, _STEP_CYCLES, _STORED_HEADS = 128, 256, 4
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

    @property
    def config(self) -> AttendConfig:
        """The build for the part: its timing and its pages."""
        part = nand_part(self.part)
        return replace(attend_config(CONFIG), nand=part.timing, page_bytes=part.page_bytes)

    @property
    def settings(self) -> Settings:
        """Of every head."""
        return page_settings(self.mode, _DIM, self.tokens, nand_part(self.part).page_bytes)


RTL = (
    Point("slc-1400", 1024, 32, 96), Point("slc-1400", 4096, 32, 64), Point("slc-1400", 16384, 8, 16),
    Point("page16k-1400", 1024, 32, 96), Point("page16k-1400", 4096, 32, 64), Point("page16k-1400", 16384, 32, 48),
)  # fmt: skip
EVENTS = (Point("slc-1400", 131072, 4, 12), Point("page16k-1400", 131072, 4, 12))


def performance_rows(points: Sequence[Point] = RTL, events: Sequence[Point] = EVENTS) -> Iterator[dict[str, Any]]:
    """Each of `points` in the RTL and in the event model, `events` in the event model alone."""
    for point in points:
        yield _row(point, "rtl", _measured(point))
        yield _row(point, "event", _modelled(point))
    for point in events:
        yield _row(point, "event", _modelled(point))


def _row(point: Point, source: str, figures: dict[str, float]) -> dict[str, Any]:
    return {"config": CONFIG, "digest": point.config.digest, "mode": point.mode, "part": point.part,
            "tokens": point.tokens, "group": point.group, "contexts": point.contexts, "heads": point.heads,
            **figures, "source": source, "of": _OF, "unit": "clock cycles"}  # fmt: skip


def _modelled(point: Point) -> dict[str, float]:
    load = Load(point.settings, point.tokens, point.group, 1 / 8)
    outcome = simulate(point.config, nand_part(point.part), load, point.contexts, heads=point.heads)
    return {
        "channel_busy_fraction": outcome.channel_busy_fraction, "mac_duty": outcome.lane_busy_fraction,
        "cycles_per_head": outcome.cycles_per_head, **outcome.phases,
    }  # fmt: skip


def _stored(point: Point) -> list[Case]:
    rng = np.random.default_rng(1)
    heads = []
    for index in range(_STORED_HEADS):
        k, v = (rng.standard_normal((point.tokens, _DIM)) for _ in range(2))
        q = rng.standard_normal((point.group, _DIM))
        heads.append(Case.of(point.settings, Owner(index, 0, 2 * index), q, k, v))
    return heads


def _measured(point: Point) -> dict[str, float]:
    config, rng = point.config, np.random.default_rng(2)
    model = NandModel(nand_part(point.part), config.units, config.clock_hz)
    with VerilatorDevice(config, nand=model, memory_bytes=1 << 28) as device, placed(device, _stored(point)) as stored:
        shape = (point.group, _DIM)
        heads = [replace(stored[index % len(stored)], q=rng.standard_normal(shape).astype(np.float16))
                 for index in range(point.heads)]  # fmt: skip
        return _Window(device, heads, point.contexts).run()


class _Window:
    """A batch, and its middle."""

    def __init__(self, device: VerilatorDevice, heads: Sequence[Head], contexts: int) -> None:
        self._device, self._kernel, self._count = device, device.kernel, len(heads)
        self._batch = PlacedBatch(device, heads, contexts, 1_000_000)

    def run(self) -> dict[str, float]:
        """Figures of the window; counters of the kernel, over the whole batch, a head."""
        first, last = self._count // 3, self._count * 2 // 3
        ticket = self._device.submit(self._batch.batch)
        begin = self._until(first)
        for channel in self._kernel.channels:
            channel.statistics(clear=True)
        window = self._until(last) - begin
        channels = [channel.statistics() for channel in self._kernel.channels]
        counters = self._device.wait(ticket, 3600).counters
        assert not counters["heads_faulty"]
        taken = len(channels) * counters["cycles"]
        return {
            "channel_busy_fraction": fmean(channel.busy for channel in channels),
            "channel_data_fraction": fmean(channel.data for channel in channels),
            "mac_duty": counters["lane_cycles"] / taken,
            "cycles_per_head": window / (last - first),
            "score_wait_fraction": counters["wait_score_cycles"] / taken,
            **{f"{phase}_cycles": counters[f"{phase}_cycles"] / self._count
               for phase in ("prepare", "scan", "select", "gather", "finish")},
            "batch_cycles": counters["cycles"],
        }  # fmt: skip

    def _until(self, ended: int) -> int:
        """Run until so many heads have ended; the cycle."""
        records = completion_records(self._device, self._batch)
        while records.any(axis=1).sum() < ended:
            self._kernel.advance(_STEP_CYCLES)
        return self._kernel.cycles
