"""Records a batch of heads on the simulated attend kernel: every cycle of its NAND channels, and when heads end.

The simulator goes forward a cycle at a time and is looked at in between, which takes no simulated time and needs
nothing in the gateware.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, ConfigError
from nearflash.abi.kernel.config import attend_config
from nearflash.device.drivers.attend import Head, PlacedBatch
from nearflash.model.attention.random_vectors import random_vector
from nearflash.model.attention.vectors import TestVector
from nearflash.sim.nand.channel import NandChannel
from nearflash.sim.verilator.device import VerilatorDevice, nand_model
from nearflash.sim.verilator.heads import completion_records, page_settings, place_heads

__all__ = ["BusState", "ChannelRecording", "HeadLoad", "Page", "Recording", "WatchedChannel", "record", "record_waves"]

_DIM, _BLOCK_TOKENS = 128, 1024
_MEMORY_BYTES = 1 << 28
_LIMIT_CYCLES = 1 << 22


class BusState(IntEnum):
    """Activity of a channel's bus in a cycle."""

    IDLE = 0
    WAIT = 1
    """A wait of ONFI holds it."""
    COMMAND = 2
    """Commands, addresses, status."""
    DATA = 3
    """A burst of a page, its preamble included."""


class Page(NamedTuple):
    """Contents of a page of NAND."""

    head: int
    kind: PageKind
    number: int
    """Page index."""


@dataclass(frozen=True)
class ChannelRecording:
    """A channel; cycle 0 is the first of the recording."""

    states: NDArray[np.uint8]
    """(cycles,), BusState."""
    bus: NDArray[np.uint8]
    """(n, 3), bus cycles as NandChannel.log has them."""
    begins: NDArray[np.int64]
    """(n,), the cycle in which each of them began."""


@dataclass(frozen=True)
class Recording:
    """A batch from its start to its interrupt."""

    clock_hz: int
    contexts: int
    channels: tuple[ChannelRecording, ...]
    pages: Mapping[tuple[int, int, int], Page]
    """By channel, unit, row."""
    ended: tuple[int, ...]
    """By head, the cycle in which its completion was in memory."""

    @property
    def cycles(self) -> int:
        """Length of the recording."""
        return len(self.channels[0].states)

    @property
    def middle(self) -> slice:
        """Cycles between the ends of two heads, a third and two thirds of the way: neither filling nor emptying."""
        ended = sorted(self.ended)
        return slice(ended[len(ended) // 3], ended[len(ended) * 2 // 3])

    def shares(self, channel: int, bin_cycles: int) -> NDArray[np.float64]:
        """Share of each bin's cycles in each BusState, (bins, 4); a last bin that is not full is left out."""
        states = self.channels[channel].states
        bins = states[: len(states) // bin_cycles * bin_cycles].reshape(-1, bin_cycles)
        return np.stack([(bins == state).mean(axis=1) for state in BusState], axis=1)


@dataclass(frozen=True)
class HeadLoad:
    """Heads of random data: pages selected by probability, an int4 index, r = d/4, an eighth of the pages.

    Raises CommandError for `tokens` that leave a part of an embedding block.
    """

    config: str = "attend-tiny"
    heads: int = 12
    tokens: int = 1024
    group: int = 1
    """Query heads of a KV head."""
    contexts: int = 4
    link_bytes_per_s: int = 491_000_000
    """Of the NAND's links; as many bytes a clock at 100 MHz as 1.4 GB/s are at 285 MHz."""

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.tokens % _BLOCK_TOKENS:
            raise CommandError(f"tokens must be a multiple of {_BLOCK_TOKENS}, not {self.tokens!r}")
        if self.heads < 3:
            raise CommandError(f"heads must be 3 or more, not {self.heads!r}")

    def vectors(self) -> list[TestVector]:
        """The heads, each with its own K and V."""
        settings = page_settings("sparf-page", _DIM, self.tokens)
        return [random_vector(settings, self.tokens, self.group, seed, head=seed) for seed in range(self.heads)]

    def open_device(self, *, waves: bool = False) -> VerilatorDevice:
        """The device that they run on."""
        config = attend_config(self.config)
        nand = nand_model(config)
        if nand is None:
            raise ConfigError(f"{self.config} must have NAND units, not none, to be traced")
        timing = replace(nand.part.timing, link_bytes_per_s=self.link_bytes_per_s)
        nand = replace(nand, part=replace(nand.part, timing=timing))
        return VerilatorDevice(config, memory_bytes=_MEMORY_BYTES, nand=nand, trace=waves)


def record(workload: HeadLoad) -> Recording:
    """Run the heads and record them. Raises DeviceError where one ends with a fault."""
    with workload.open_device() as device, place_heads(device, workload.vectors()) as heads:
        watch = _Watch(device, PlacedBatch(device, heads, workload.contexts, 0))
        recorded, ended = watch.run()
        clock_hz = device.identity.config.clock_hz
        return Recording(clock_hz, workload.contexts, recorded, dict(_pages(heads)), ended)


def record_waves(workload: HeadLoad, path: Path) -> None:
    """Write waves (VCD) of 2,000 cycles from cycle 30,000 of the batch on; builds a simulator with waves."""
    first_cycle, cycles = 30_000, 2_000
    with workload.open_device(waves=True) as device, place_heads(device, workload.vectors()) as heads:
        device.submit(PlacedBatch(device, heads, workload.contexts, 0).batch)
        device.kernel.start_trace(path, cycles, first_cycle)
        device.kernel.advance(first_cycle + cycles)
        device.kernel.stop_trace()


def _pages(heads: Sequence[Head]) -> Iterator[tuple[tuple[int, int, int], Page]]:
    """Find the heads' pages on NAND."""
    for number, head in enumerate(heads):
        for kind, table in ((PageKind.INDEX, head.index_table), (PageKind.TOKEN, head.token_table)):
            for index, packed in enumerate(table):
                entry = PageEntry.unpack(int(packed))
                if entry.address is None:
                    yield (entry.channel, entry.lun, entry.row), Page(number, kind, index)


class _Watch:
    """A batch in flight, looked at after every cycle."""

    def __init__(self, device: VerilatorDevice, batch: PlacedBatch) -> None:
        self._device, self._kernel, self._batch = device, device.kernel, batch
        self._completions = completion_records(device, batch)
        self._ended = np.full(len(self._completions), -1)

    def run(self) -> tuple[tuple[ChannelRecording, ...], tuple[int, ...]]:
        """To the interrupt: the channels, and when each head ended."""
        channels, kernel = self._kernel.channels, self._kernel
        for channel in channels:
            channel.start_log()
        ticket = self._device.submit(self._batch.batch)
        watched = [WatchedChannel(channel) for channel in channels]
        for cycle in range(_LIMIT_CYCLES):
            if kernel.interrupt:
                break
            kernel.advance(1)
            for one in watched:
                one.look(cycle)
            self._ended[(self._ended < 0) & self._completions.any(axis=1)] = cycle
        self._device.wait(ticket, 1.0)
        for output in self._batch.results():
            output.value()
        return tuple(channel.recording() for channel in watched), tuple(map(int, self._ended))


class WatchedChannel:
    """Activity of a channel, from its counts after each cycle; made before the recording's first cycle."""

    def __init__(self, channel: NandChannel) -> None:
        self._channel = channel
        self._states, self._begins = bytearray(), [0] * channel.logged
        self._counts = channel.statistics()

    def look(self, cycle: int) -> None:
        """Note what happened in that cycle, the last one."""
        before, now = self._counts, self._channel.statistics()
        for state, name in ((BusState.DATA, "data_cycles"), (BusState.COMMAND, "command_cycles"),
                            (BusState.WAIT, "wait_cycles"), (BusState.IDLE, "idle_cycles")):  # fmt: skip
            if getattr(now, name) != getattr(before, name):
                self._states.append(state)
        self._begins += [cycle] * (self._channel.logged - len(self._begins))
        self._counts = now

    def recording(self) -> ChannelRecording:
        """Build the recording of what was noted, with the log."""
        return ChannelRecording(np.frombuffer(self._states, np.uint8), self._channel.log(), np.array(self._begins))
