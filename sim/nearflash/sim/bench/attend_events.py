"""Event model of the attend kernel's performance: heads in flight, units, links, lanes, score path and selection.

    prepare ─► walker ─► channels: units sense ─► link ─► lanes ─► scores ─► selection ─► walker ─► channels ─► finish
                 ▲ score buffers free                              (one way for all channels)

A head goes through its phases as in the kernel; what there is once (prepare, each walker, score path, selection,
finish) serves one head or block at a time. A unit senses its next page while the one before waits in its cache register
or is read out; a link serves pages in the order in which they are ready. Selected pages are random: clustering is for
recorded traffic to tell.

Times are clock cycles. `Cycles` holds what the gateware's docstrings state; runs of the RTL correct it.
Limits: no bit errors, no programs or erases, a memory that is never slow, groups of tokens on NAND only.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nearflash.abi.attend.codeword import CODEWORD_BYTES
from nearflash.abi.attend.descriptor import Mode
from nearflash.abi.attend.pages import IndexFormat
from nearflash.abi.config import AttendConfig
from nearflash.model.attend.settings import Settings
from nearflash.sim.bench.channel_events import Channel, ChannelTiming, Clock, Request, Server
from nearflash.sim.nand.parts import NandPart

__all__ = ["Cycles", "Load", "Outcome", "simulate"]

_LANES, _BEAT_BYTES = 4, 8
_ROW_BEAT_CYCLES = {IndexFormat.FP16: 1, IndexFormat.INT8: 2, IndexFormat.INT4: 2}
"""Cycles of the lanes for a beat of an index row and one set of heads."""


@dataclass(frozen=True)
class Cycles:
    """Constants of the kernel, clock cycles."""

    prepare: int = 940
    finish: int = 150
    """Beside one cycle an element of the output."""
    select: int = 600
    """Beside its passes over the entries and the selector's two over the keys."""
    group_skipped: int = 2
    group_walked: int = 4
    """Beside n / 4."""
    memory_latency: int = 60


@dataclass(frozen=True)
class Load:
    """What each head is: S tokens, g query heads, and the share of its token groups that is gathered."""

    settings: Settings
    tokens: int
    group: int
    gathered: float


@dataclass(frozen=True)
class Outcome:
    """Means over the heads that were finished in the middle half of the run."""

    cycles_per_head: float
    channel_busy_fraction: float
    """Of all channels' time, what their links transferred commands or data in."""
    lane_busy_fraction: float
    phases: dict[str, float]
    """Cycles of a head from phase to phase, by name, waits included."""


_PHASES = ("prepare", "scan", "select", "gather", "finish")


@dataclass
class _Head:
    """A head in flight: what its phase still waits for, and when its phases ended."""

    number: int
    pending: int = 0
    times: list[float] = field(default_factory=list)


class _Kernel:
    """The heads of one load through the kernel."""

    def __init__(self, config: AttendConfig, part: NandPart, load: Load, cycles: Cycles, seed: int) -> None:
        self.clock, self.load, self.cycles, self._config = Clock(), load, cycles, config
        self._rng = np.random.default_rng(seed)
        self._timing = ChannelTiming(part, config.clock_hz)
        units = min(part.units, config.units)
        self.channels = [Channel(self.clock, self._timing, units) for _ in range(config.channels)]
        self._units = units
        self._passes = -(-load.group // config.heads_per_beat)
        self._prepare, self._scores, self._select, self._finish, self._scan_walk, self._gather_walk = (
            Server(self.clock) for _ in range(6)
        )
        self._credits = [config.score_blocks // self._passes] * config.channels
        self._blocks: deque[tuple[_Head, int]] = deque()
        self._slots, self._selected = config.gather_slots, deque[_Head]()
        self._left = 0
        self.done: list[tuple[_Head, float, float]] = []
        """Finished heads, with the links' and the lanes' cycles until then."""

    def run(self, heads: int, contexts: int) -> None:
        """All heads, at most `contexts` at a time."""
        self._waiting = deque(_Head(number) for number in range(heads))
        for _ in range(contexts):
            self._begin()
        self.clock.run()

    def _begin(self) -> None:
        if self._waiting:
            head = self._waiting.popleft()
            self._prepare.serve(self.cycles.prepare + 2 * self.cycles.memory_latency, lambda: self._scan(head))
            head.times.append(self.clock.now)

    def _scan(self, head: _Head) -> None:
        """Queue the blocks of a head; the tail goes with the last one."""
        settings, tokens = self.load.settings, self.load.tokens
        head.times.append(self.clock.now)
        blocks = settings.scanned(tokens) // settings.block_tokens
        tail = -(-(tokens - settings.scanned(tokens)) // settings.group_tokens)
        head.pending = blocks + tail
        self._blocks.extend((head, block) for block in range(blocks))
        for group in range(-(-tokens // settings.group_tokens) - tail, -(-tokens // settings.group_tokens)):
            self._ask(
                head, group, self._token_codewords(value=False), lambda: self._scored(head, settings.group_tokens)
            )
        self._walk_blocks()

    def _walk_blocks(self) -> None:
        """Ask for the pages of the first block in the queue, when its channel has room for its scores."""
        while self._blocks:
            head, block = self._blocks[0]
            channel = (head.number + block) % len(self.channels)
            if not self._credits[channel]:
                return
            self._credits[channel] -= 1
            self._blocks.popleft()
            self._walk_block(head, channel)

    def _walk_block(self, head: _Head, channel: int) -> None:
        settings, layout = self.load.settings, self.load.settings.index_layout
        chosen = self._rng.choice(settings.dim, settings.channels, replace=False)
        pages = np.bincount(chosen // layout.rows)
        pages = pages[pages > 0]
        left = len(pages)

        def page_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                rows = settings.block_tokens / _LANES * self.load.group
                self._scores.serve(rows, lambda: block_done())

        def block_done() -> None:
            self._credits[channel] += 1
            self._ready_to_select(head)
            self._walk_blocks()

        def ask() -> None:
            for rows in pages.tolist():
                codewords = rows * layout.row_codewords
                beats = codewords * CODEWORD_BYTES // _BEAT_BYTES
                lanes = beats * _ROW_BEAT_CYCLES[layout.format] * self._passes
                self._read(channel, codewords, rows, lanes, page_done)

        self._scan_walk.serve(len(pages), ask)

    def _read(self, channel: int, codewords: float, runs: float, lanes: float, done: Callable[[], None]) -> None:
        unit = int(self._rng.integers(self._units))
        self.channels[channel].ask(Request(channel, unit, self._timing.link(codewords, runs), lanes, done))

    def _token_codewords(self, *, value: bool) -> tuple[float, float]:
        """Codewords of a whole token group (K alone, or V too), and beats of them that the lanes work on."""
        settings = self.load.settings
        size = settings.group_tokens * settings.dim * 2
        used = size * (2 if value else 1)
        asked = used if value or not settings.interleaved else 2 * used
        return asked / CODEWORD_BYTES, used / _BEAT_BYTES

    def _ask(self, head: _Head, group: int, what: tuple[float, float], done: Callable[[], None]) -> None:
        """One request for a token group; separate pages are counted as one read of twice the codewords."""
        codewords, beats = what
        self._read((head.number + group) % len(self.channels), codewords, 1, beats * self._passes, done)

    def _scored(self, head: _Head, tokens: int) -> None:
        self._scores.serve(tokens / _LANES * self.load.group, lambda: self._ready_to_select(head))

    def _ready_to_select(self, head: _Head) -> None:
        """One block or tail group less; the last one begins the selection."""
        head.pending -= 1
        if head.pending:
            return
        head.times.append(self.clock.now)
        settings = self.load.settings
        rows = -(-settings.entries(self.load.tokens) // _LANES)
        passes = 3 if settings.mode & Mode.PROBABILITY else 2
        work = passes * rows * self.load.group + 2 * rows + self.cycles.select
        self._select.serve(work, lambda: self._wants_slot(head))

    def _wants_slot(self, head: _Head) -> None:
        head.times.append(self.clock.now)
        self._selected.append(head)
        self._gather()

    def _gather(self) -> None:
        """Walk over the groups of the first selected head, when a slot for its sums is free."""
        while self._slots and self._selected:
            self._slots -= 1
            head, settings = self._selected.popleft(), self.load.settings
            groups = -(-self.load.tokens // settings.group_tokens)
            chosen = np.sort(self._rng.choice(groups, max(1, round(groups * self.load.gathered)), replace=False))
            head.pending = len(chosen)
            each = settings.group_tokens / 4 + self.cycles.group_walked
            skipped = groups - len(chosen)
            total = len(chosen) * each + skipped * self.cycles.group_skipped
            begin = self._gather_walk.serve(total, lambda: None)
            for i, group in enumerate(chosen.tolist()):
                at = begin + (i + 1) * each + (group - i) * self.cycles.group_skipped
                self.clock.at(at, lambda h=head, g=group: self._ask(  # type: ignore[misc]
                    h, g, self._token_codewords(value=True), lambda: self._gathered(h)))  # fmt: skip

    def _gathered(self, head: _Head) -> None:
        head.pending -= 1
        if not head.pending:
            head.times.append(self.clock.now)
            elements = self.load.group * self.load.settings.dim
            self._finish.serve(self.cycles.finish + elements + 4 * self.cycles.memory_latency, lambda: self._end(head))

    def _end(self, head: _Head) -> None:
        head.times.append(self.clock.now)
        links, lanes = (sum(getattr(c, name) for c in self.channels) for name in ("link_cycles", "lane_cycles"))
        self.done.append((head, links, lanes))
        self._slots += 1
        self._gather()
        self._begin()


def simulate(
    config: AttendConfig, part: NandPart, load: Load, contexts: int, *, heads: int = 0, cycles: Cycles | None = None,
    seed: int = 1,
) -> Outcome:  # fmt: skip
    """`heads` heads (default: enough for a steady middle) of one load, at most `contexts` at a time."""
    kernel = _Kernel(config, part, load, cycles or Cycles(), seed)
    heads = heads or max(16, 4 * contexts)
    kernel.run(heads, contexts)
    first, last = kernel.done[heads // 4], kernel.done[heads * 3 // 4]
    middle = [head for head, *_ in kernel.done[heads // 4 : heads * 3 // 4]]
    elapsed = last[0].times[-1] - first[0].times[-1]
    spent = np.diff([head.times for head in middle], axis=1).mean(axis=0)
    return Outcome(
        cycles_per_head=elapsed / (heads * 3 // 4 - heads // 4),
        channel_busy_fraction=(last[1] - first[1]) / elapsed / len(kernel.channels),
        lane_busy_fraction=(last[2] - first[2]) / elapsed / len(kernel.channels),
        phases={f"{name}_cycles": float(value) for name, value in zip(_PHASES, spent, strict=True)},
    )
