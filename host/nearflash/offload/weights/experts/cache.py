"""A cache of the experts of mixtures: only those that are routed are read, hot ones stay in memory.

The expert that was routed least often is evicted. Reads go ahead of the loop over experts, once a layer's routing is
known, and behind those to what the next layer's router will probably choose.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from nearflash.abi.errors import CommandError
from nearflash.offload.tiers.ledger import EXPERTS_WAIT, Ledger
from nearflash.offload.tiers.link import DeviceLink, StagedBuffer
from nearflash.offload.weights.experts.counts import ExpertKey, RoutingCounts
from nearflash.offload.weights.experts.mixture import MixtureLayer, add_row_checksums, expert_source
from nearflash.offload.weights.layout import BufferLayout, LayoutReader
from nearflash.support.prefetch import Prefetcher

__all__ = ["ExpertCache", "HitCounts"]

_READERS = 2
_AHEAD, _PREDICTED_AHEAD = 2 * _READERS, _READERS
"""Experts that are being read or will be next, at most; fewer while one is begun that is only predicted."""


@dataclass(frozen=True)
class HitCounts:
    """Routed experts, each once for a layer and batch, since a cache was opened."""

    hits: int = 0
    """In memory."""
    ahead: int = 0
    """Predicted, and read or being read."""
    misses: int = 0
    """Neither."""

    def __sub__(self, before: "HitCounts") -> "HitCounts":
        return HitCounts(self.hits - before.hits, self.ahead - before.ahead, self.misses - before.misses)


@dataclass
class _Slot:
    """Memory of one expert, and whose it is."""

    buffer: StagedBuffer
    key: ExpertKey | None = None
    views: dict[str, Tensor] = field(default_factory=dict)
    """Empty until what was loaded is taken."""
    used: int = 0
    """When it was used last."""
    predicted: bool = False
    """It was read before its layer's router was asked, and that did not name it yet."""


class ExpertCache:
    """Experts of `mixtures`, up to `cache_bytes` of them. Close it.

    folder: the model's, where the counts are kept if it can be written to; None: they are not. ahead: read before the
    loop asks. Raises CommandError for a budget of less than two experts, StateError for damaged counts. Damaged experts
    raise WeightsError, here or when they are asked for.
    """

    def __init__(
        self, mixtures: Sequence[MixtureLayer], cache_bytes: int, *, link: DeviceLink, ledger: Ledger,
        folder: Path | None, ahead: bool = True, direct: bool = True,
    ) -> None:  # fmt: skip
        self._link, self._ledger, self.ahead = link, ledger, ahead
        self._numbers = [mixture.number for mixture in mixtures]
        self._sources = [
            {leaf: add_row_checksums(source) for leaf, source in mixture.sources.items()} for mixture in mixtures
        ]
        self._reader = LayoutReader(direct)
        self._layouts: dict[ExpertKey, BufferLayout] = {}
        keys = [(index, expert) for index, mixture in enumerate(mixtures) for expert in range(mixture.experts)]
        size = max(self._layout(key).size_bytes for key in keys)  # they begin anywhere in a block
        count = min(cache_bytes // size, len(keys))
        if count < 2:
            raise CommandError(
                f"expert_bytes (--expert-memory) must be {2 * size} at least, for two experts, not {cache_bytes!r}"
            )
        ledger.take("gpu", count * size, "experts")
        self._held_bytes = count * size
        self._slots = [_Slot(link.buffer(size)) for _ in range(count)]
        self._by_key: dict[ExpertKey, _Slot] = {}
        self._free = list(self._slots)
        self._loads = Prefetcher("nearflash-experts", self._load, threads=_READERS)
        self._clock = 0
        self._plan: list[ExpertKey] = []
        """What the loop that runs will still ask for, in its order."""
        self._predicted: list[ExpertKey] = []
        """What the next layer's will probably ask for."""
        self._current: ExpertKey | None = None
        self._hits = self._ahead_hits = self._misses = 0
        self.counts = RoutingCounts(folder, [(mixture.number, mixture.experts) for mixture in mixtures])

    @property
    def hit_counts(self) -> HitCounts:
        """Counts so far."""
        return HitCounts(self._hits, self._ahead_hits, self._misses)

    def plan(self, mixture: int, routed: Mapping[int, int]) -> None:
        """The loop of a mixture begins, and will ask for these experts in this order; how often each was routed."""
        self._plan, self._current = [(mixture, expert) for expert in routed], None
        for key, count in zip(self._plan, routed.values(), strict=True):
            self.counts.add(key, count)
            slot = self._by_key.get(key)
            if slot is None:
                self._misses += 1
            elif slot.predicted:
                self._ahead_hits += 1
                slot.predicted = False
            else:
                self._hits += 1
        if self.ahead:
            self._withdraw()

    def read_ahead(self, predicted: Iterable[ExpertKey]) -> None:
        """Begin to read what is planned, and behind it what will probably be, the most likely first."""
        self._predicted = list(predicted)
        self._read_on()

    def tensor(self, mixture: int, expert: int, leaf: str) -> Tensor:
        """A parameter of an expert, (…): of `sources[leaf]` without its first dimension. Waits until it is read."""
        key = (mixture, expert)
        if key != self._current or key not in self._by_key:
            if key in self._plan:
                del self._plan[: self._plan.index(key) + 1]
            self._current = key
            slot = self._slot(key)
            assert slot is not None
            self._read_on()
            with self._ledger.span(EXPERTS_WAIT, layer=self._numbers[mixture], expert=expert):
                if not slot.views:
                    slot.views = self._loads.take(key)
            self._link.before_use(slot.buffer)
        return self._by_key[key].views[leaf]

    def close(self) -> None:
        """Keep the counts, free the memory; may be called twice."""
        self._loads.close()
        self._reader.close()
        if self._held_bytes:
            self._ledger.give("gpu", self._held_bytes)
            self.counts.save()
        self._held_bytes = 0

    # Memory

    def _read_on(self) -> None:
        """Begin to read what the loop asks for next, and what it will probably ask for in the next layer."""
        if not self.ahead:
            return
        asked = len(self._plan)
        for number, key in enumerate(self._plan + self._predicted):
            if len(self._loads.in_flight) >= (_AHEAD if number < asked else _PREDICTED_AHEAD):
                return
            if key not in self._by_key:
                slot = self._slot(key, needed=False)
                if slot is None:
                    return
                slot.predicted = number >= asked

    def _withdraw(self) -> None:
        """Free the memory of predicted experts that are not asked for and whose reading did not begin."""
        for key in self._loads:
            if key not in self._plan and self._loads.cancel(key):
                slot = self._by_key.pop(key)
                slot.key = None
                self._free.append(slot)

    def _slot(self, key: ExpertKey, *, needed: bool = True) -> _Slot | None:
        """The memory of an expert, which is being read if it was not there; None where it is not `needed` enough."""
        self._clock += 1
        slot = self._by_key.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict(key, needed)
            if slot is None:
                return None
            self._by_key[key] = slot
            slot.key, slot.views, slot.predicted = key, {}, False
            self._loads.begin(key)
        slot.used = self._clock
        return slot

    def _evict(self, key: ExpertKey, needed: bool) -> _Slot | None:
        """Memory taken from the expert that was routed least often, of those that nothing is known to ask for."""
        planned = {*self._plan, *self._predicted}
        others = [slot for slot in self._slots if slot.key != self._current]
        in_flight = self._loads.in_flight
        idle = [slot for slot in others if slot.key not in in_flight]
        spare = [slot for slot in idle if slot.key not in planned]
        if key in self._predicted:  # the next batch will ask for experts of the same layer
            spare = [slot for slot in spare if slot.key is None or slot.key[0] != key[0] - 1]
        if not spare and needed:
            order = {asked: index for index, asked in enumerate(self._plan + self._predicted)}
            spare = sorted(idle, key=lambda slot: order[slot.key or key])[-1:]
        if not spare and needed:  # all of it is being read: wait for the one that is asked for last
            spare = others[-1:]
        if not spare:
            return None
        slot = min(spare, key=lambda slot: (self.counts[slot.key] if slot.key else -1, slot.used))
        if slot.key is not None:
            self._loads.drop([slot.key])
            del self._by_key[slot.key]
            self._link.after_use(slot.buffer)
        return slot

    def _load(self, key: ExpertKey) -> dict[str, Tensor]:
        layout, buffer = self._layout(key), self._by_key[key].buffer
        self._link.before_fill(buffer)
        span = self._ledger.span("load expert", layer=self._numbers[key[0]], expert=key[1])
        with span, self._reader.begin(layout) as reads:
            moved = self._reader.read_runs(layout, buffer.host) + self._reader.expand(layout, buffer.host, reads)
        self._ledger.count_bytes("experts disk to host", moved)
        with self._link.filling(buffer):
            for spans in layout.dense_spans:
                self._link.push("experts", buffer.host, buffer.memory, spans)
        return layout.views(buffer.memory)

    def _layout(self, key: ExpertKey) -> BufferLayout:
        if key not in self._layouts:
            mixture, expert = key
            sources = {leaf: expert_source(source, expert) for leaf, source in self._sources[mixture].items()}
            self._layouts[key] = BufferLayout(sources, gap_bytes=0)
        return self._layouts[key]
