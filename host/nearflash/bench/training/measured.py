"""Time, memory and disk bytes of training steps in this process, whoever does them.

Sources: proc(5), /proc/self/io (bytes that the process caused to be read from and written to drives).
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nearflash.storage.io.bandwidth import CACHED_BYTES, Probe
from nearflash.support import process

__all__ = ["Measured", "MeasuredRun", "beside_the_disk", "disk_bytes", "measure"]


class MeasuredRun(Protocol):
    """A training run, step by step."""

    @property
    def link_bytes(self) -> int | None:
        """Bytes so far between host and the place where the state is; None where it is in host memory."""

    def gradients(self, step: int) -> float:
        """Forward and backward; returns the loss."""

    def update(self) -> None:
        """The optimizer's step, and what it needs before the next one."""


@dataclass
class Measured:
    """Figures of each step."""

    params: int
    optimizer_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    host_peak_bytes: int = 0
    """Largest resident set of the process during the steps."""
    disk_read_bytes: float = 0.0
    """Of a step, on average, as the next."""
    disk_written_bytes: float = 0.0
    link_bytes: float | None = None
    interleaved: list[tuple[float, float, float]] = field(default_factory=list)
    """Optimizer seconds of a step, and of the disk alone with the same bytes right behind it: as it comes from memory
    and goes there, and in buffers that stay in the processor's cache."""

    def to_json(self) -> dict[str, Any]:
        """As a dict."""
        return asdict(self)


def measure(subject: MeasuredRun, params: int, steps: int, *, warm_up: int = 1) -> Measured:
    """Run `warm_up` and then `steps` steps; only the latter count."""
    result = Measured(params)
    for step in range(warm_up):
        subject.gradients(step)
        subject.update()
    process.reset_peak()
    before, link = disk_bytes(), subject.link_bytes
    for step in range(warm_up, warm_up + steps):
        start = time.perf_counter()
        result.loss.append(subject.gradients(step))
        middle = time.perf_counter()
        subject.update()
        end = time.perf_counter()
        result.optimizer_seconds.append(end - middle)
        result.step_seconds.append(end - start)
    read, written = (now - then for now, then in zip(disk_bytes(), before, strict=True))
    result.disk_read_bytes, result.disk_written_bytes = read / steps, written / steps
    if subject.link_bytes is not None and link is not None:
        result.link_bytes = (subject.link_bytes - link) / steps
    result.host_peak_bytes = process.peak_resident_bytes()
    return result


def beside_the_disk(subject: MeasuredRun, measured: Measured, folder: Path, first: int, steps: int) -> None:
    """Run steps from `first` on and, after each, move the same bytes by the probe in `folder`; fills
    `found.interleaved`.

    Interleaved, because the speed of a drive, of a virtual one above all, changes from minute to minute.
    """
    read, written = int(measured.disk_read_bytes), int(measured.disk_written_bytes)
    size = read + written
    with Probe(folder, size) as memory, Probe(folder, size, block_bytes=CACHED_BYTES) as cache:
        for probe in (memory, cache):
            probe.write(probe.size_bytes)
        for step in range(first, first + steps):
            subject.gradients(step)
            start = time.perf_counter()
            subject.update()
            ours = time.perf_counter() - start
            measured.interleaved.append((ours, memory.both(read, written), cache.both(read, written)))


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from drives, and written."""
    counts = process.fields("io")
    return int(counts["read_bytes"]), int(counts["write_bytes"])
