"""Event model of the attend kernel's performance: heads in flight, luns, links, lanes, score path and selection.

    prepare ─► walker ─► queues ─► channels: luns sense ─► link ─► lanes ─► scores ─► selection ─► walker ─► channels
                           ▲ score buffers free                        (one way for all channels)           ─► finish

A head goes through its phases as in the kernel; what there is once (prepare, each walker, score path, selection,
finish) serves one head or block at a time. Builds with `mask_beats` give a head its lines of the selection's store from
its scan to the end of its selection, queue masks, and let scans go first while a head waits for lines. A lun senses a
page and holds it until it is read out: the kernel does without cache reads. A link serves pages in the order in which
they are ready. Pages of a block lie on consecutive luns. Selected pages are random: clustering is for recorded traffic
to tell.

Times are clock cycles. `Cycles` holds what the gateware's docstrings state; runs of the RTL correct it.
Limits: no bit errors, no programs or erases, a memory that is never slow, groups of tokens on NAND only.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import AttendConfig
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.sim.nand.parts import NandPart
from nearflash.verify.bench.channel_events import IndexQueue, Server, Walker, YieldingPort
from nearflash.verify.fixtures.nand_channel import ChannelEvents, ChannelTiming, EventClock, Request

__all__ = ["Cycles", "Load", "LoadMeans", "simulate"]

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
    page_walked: int = 2
    group_skipped: int = 2
    group_walked: int = 4
    """Beside n / 4."""
    memory_latency: int = 60


@dataclass(frozen=True)
class Load:
    """Each head: S tokens, g query heads, and the share of its token groups that is gathered."""

    settings: HeadSettings
    tokens: int
    group: int
    gathered: float


@dataclass(frozen=True)
class LoadMeans:
    """Means over the heads that were finished while all contexts were in use, the first quarter left out."""

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
        self.clock, self.load, self.cycles, self._config = EventClock(), load, cycles, config
        self._rng = np.random.default_rng(seed)
        timing, luns = ChannelTiming(part.timing, config.clock_hz), min(part.luns, config.luns)
        self.channels = [ChannelEvents(self.clock, timing, luns) for _ in range(config.channels)]
        self._units = luns
        self._passes = -(-load.group // config.heads_per_beat)
        self._prepare, self._scores, self._finish = (Server(self.clock) for _ in range(3))
        buffers = config.score_blocks // self._passes
        self._index_queues = [IndexQueue(channel, buffers) for channel in self.channels]
        ports = [YieldingPort(channel, lambda: bool(self._placing)) for channel in self.channels]
        self._scan_walk, self._gather_walk = Walker(self.clock, self._index_queues), Walker(self.clock, ports)
        self._rows = -(-load.settings.entries(load.tokens) // _LANES)
        self._lines, self._mask_beats = config.score_entries // _LANES, config.mask_beats
        self._placing, self._marked = deque[_Head](), deque[_Head]()
        self._blocks: deque[tuple[_Head, int]] = deque()
        self._slots, self._selecting = config.gather_slots, False
        self._scored_heads, self._starting = deque[_Head](), deque[_Head]()
        self.done: list[tuple[_Head, float, float, float]] = []
        """Finished heads, with the cycles of links, bursts and lanes until then."""

    def run(self, heads: int, contexts: int) -> None:
        """All heads, at most `contexts` at a time: with fewer, each has a larger share of the slots."""
        self._slots = max(1, self._slots * contexts // self._config.contexts)
        self._waiting = deque(_Head(number) for number in range(heads))
        for _ in range(contexts):
            self._begin()
        self.clock.run()

    def _begin(self) -> None:
        if self._waiting:
            head = self._waiting.popleft()
            self._prepare.serve(self.cycles.prepare + 2 * self.cycles.memory_latency, lambda: self._place(head))
            head.times.append(self.clock.now)

    def _place(self, head: _Head) -> None:
        """Wait for lines of the store, where heads take them."""
        if self._config.mask_beats:
            self._placing.append(head)
            self._take_lines()
        else:
            self._scan(head)

    def _take_lines(self) -> None:
        while self._placing and self._lines >= self._rows * self.load.group:
            self._lines -= self._rows * self.load.group
            self._scan(self._placing.popleft())

    def _scan(self, head: _Head) -> None:
        """Queue the blocks of a head; the tail goes with the last one."""
        settings, tokens = self.load.settings, self.load.tokens
        head.times.append(self.clock.now)
        blocks = settings.count_scanned(tokens) // settings.block_tokens
        tail = -(-(tokens - settings.count_scanned(tokens)) // settings.group_tokens)
        head.pending = blocks + tail
        self._blocks.extend((head, block) for block in range(blocks))
        for group in range(-(-tokens // settings.group_tokens) - tail, -(-tokens // settings.group_tokens)):
            request = self._group(head, group, lambda: self._end_scoring(head, settings.group_tokens), value=False)
            self.channels[request.channel].ask(request)
        self._walk_blocks()

    def _walk_blocks(self) -> None:
        """Ask for the pages of the first block that waits."""
        if self._blocks and self._scan_walk.idle:
            head, block = self._blocks.popleft()
            self._scan_walk.walk(self._block(head, (head.number + block) % len(self.channels)), self._walk_blocks)

    def _block(self, head: _Head, channel: int) -> Iterator[tuple[float, Request]]:
        settings, layout = self.load.settings, self.load.settings.index_layout
        chosen = np.sort(self._rng.choice(settings.dim, settings.score_dims, replace=False))
        begins = (np.diff(chosen, prepend=-2) > 1) | (chosen % layout.rows == 0)  # of a run of rows
        counts, runs = np.bincount(chosen // layout.rows), np.bincount(chosen // layout.rows, begins)
        pages = [one for one in zip(counts.tolist(), runs.tolist(), strict=True) if one[0]]
        left, start = len(pages), int(self._rng.integers(self._units))

        def page_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                rows = settings.block_tokens / _LANES * self.load.group
                self._scores.serve(rows, lambda: block_done())

        def block_done() -> None:
            self._index_queues[channel].give_back()
            self._ready_to_select(head)

        for page, (rows, begun) in enumerate(pages):
            codewords = rows * layout.row_codewords
            beats = codewords * CODEWORD_BYTES // _BEAT_BYTES
            lanes = beats * _ROW_BEAT_CYCLES[layout.format] * self._passes
            lun = (start + page) % self._units
            yield self.cycles.page_walked, Request(channel, lun, codewords, int(begun), lanes, page_done, page == 0)

    def _token_codewords(self, *, value: bool) -> tuple[float, float]:
        """Codewords of a whole token group (K alone, or V too), and beats of them that the lanes work on."""
        settings = self.load.settings
        size = settings.group_tokens * settings.dim * 2
        used = size * (2 if value else 1)
        asked = used if value or not settings.interleaved else 2 * used
        return asked / CODEWORD_BYTES, used / _BEAT_BYTES

    def _group(self, head: _Head, group: int, done: Callable[[], None], *, value: bool) -> Request:
        """A token group; separate pages are counted as one read of twice the codewords."""
        codewords, beats = self._token_codewords(value=value)
        channel, lun = (head.number + group) % len(self.channels), int(self._rng.integers(self._units))
        return Request(channel, lun, codewords, 1, beats * self._passes, done)

    def _end_scoring(self, head: _Head, tokens: int) -> None:
        self._scores.serve(tokens / _LANES * self.load.group, lambda: self._ready_to_select(head))

    def _ready_to_select(self, head: _Head) -> None:
        """One block or tail group less; the last one begins the selection."""
        head.pending -= 1
        if head.pending:
            return
        head.times.append(self.clock.now)
        self._scored_heads.append(head)
        self._select()

    def _select(self) -> None:
        """Select of the first head whose scores are complete; the unit is free when the mask has left it."""
        if self._selecting or not self._scored_heads:
            return
        self._selecting, head, settings = True, self._scored_heads.popleft(), self.load.settings
        passes = 3 if settings.mode & Mode.PROBABILITY else 2
        work = passes * self._rows * self.load.group + 2 * self._rows + self.cycles.select
        self.clock.at(self.clock.now + work, lambda: self._end_selecting(head))

    def _end_selecting(self, head: _Head) -> None:
        if self._config.mask_beats:
            self._marked.append(head)
            self._queue_mask()
        else:
            self._start(head)

    def _queue_mask(self) -> None:
        """The mask goes to the queue as a whole; then the selection and the lines are free."""
        if self._marked and self._mask_beats >= self._rows:
            self._mask_beats -= self._rows
            self._start(self._marked.popleft())
            self._lines += self._rows * self.load.group
            self._take_lines()
            self._select_next()

    def _start(self, head: _Head) -> None:
        head.times.append(self.clock.now)
        self._starting.append(head)
        self._gather()

    def _gather(self) -> None:
        """Walk over the groups of the selected head, when a slot for its sums is free."""
        if self._slots and self._starting and self._gather_walk.idle:
            self._slots -= 1
            self._gather_walk.walk(self._groups(self._starting.popleft()), self._gather_walked)

    def _gather_walked(self) -> None:
        if self._config.mask_beats:
            self._mask_beats += self._rows
            self._queue_mask()
            self._gather()
        else:
            self._select_next()

    def _select_next(self) -> None:
        self._selecting = False
        self._select()

    def _groups(self, head: _Head) -> Iterator[tuple[float, Request]]:
        settings = self.load.settings
        groups = -(-self.load.tokens // settings.group_tokens)
        chosen = np.sort(self._rng.choice(groups, max(1, round(groups * self.load.gathered)), replace=False))
        head.pending = len(chosen)
        walked = settings.group_tokens / 4 + self.cycles.group_walked
        skipped = (np.diff(chosen, prepend=-1) - 1) * self.cycles.group_skipped
        for group, before in zip(chosen.tolist(), skipped.tolist(), strict=True):
            yield before + walked, self._group(head, group, lambda: self._end_gathering(head), value=True)

    def _end_gathering(self, head: _Head) -> None:
        head.pending -= 1
        if not head.pending:
            head.times.append(self.clock.now)
            elements = self.load.group * self.load.settings.dim
            self._finish.serve(self.cycles.finish + elements + 4 * self.cycles.memory_latency, lambda: self._end(head))

    def sum_cycles(self) -> tuple[float, float, float]:
        """Cycles of all links, bursts and lanes until now."""
        kinds = ("link_cycles", "data_cycles", "lane_cycles")
        links, bursts, lanes = (sum(getattr(c, name) for c in self.channels) for name in kinds)
        return links, bursts, lanes

    def _end(self, head: _Head) -> None:
        head.times.append(self.clock.now)
        self.done.append((head, *self.sum_cycles()))
        self._slots += 1
        self._gather()
        self._begin()


def simulate(
    config: AttendConfig, part: NandPart, load: Load, contexts: int, *, heads: int = 0, cycles: Cycles | None = None,
    seed: int = 1,
) -> LoadMeans:  # fmt: skip
    """`heads` heads (default: enough for a steady middle) of one load, at most `contexts` at a time."""
    kernel = _Kernel(config, part, load, cycles or Cycles(), seed)
    heads = heads or max(16, 4 * contexts)
    kernel.run(heads, contexts)
    begin, end = heads // 4, heads - contexts  # all contexts are in use until then
    first, last = kernel.done[begin], kernel.done[end]
    middle = [head for head, *_ in kernel.done[begin + 1 : end + 1]]
    elapsed = last[0].times[-1] - first[0].times[-1]
    links, bursts, lanes = (after - before for before, after in zip(first[1:], last[1:], strict=True))
    spent = np.diff([head.times for head in middle], axis=1).mean(axis=0)
    return LoadMeans(
        cycles_per_head=elapsed * kernel.sum_cycles()[1] / heads / bursts,  # heads end in bunches, data come evenly
        channel_busy_fraction=links / elapsed / len(kernel.channels),
        lane_busy_fraction=lanes / elapsed / len(kernel.channels),
        phases={f"{name}_cycles": float(value) for name, value in zip(_PHASES, spent, strict=True)},
    )
