"""Experts of a mixture as units of loading: only those that are routed are read, hot ones stay in memory.

transformers keeps a layer's experts in fused parameters, (experts, …), and its loop indexes them by expert. Here an
object stands in a parameter's place that gives the expert's tensor, from a cache with a budget. What is evicted is the
expert that was routed least often; the counts are kept in a file beside the model. Reads go ahead of the loop, once the
layer's routing is known, and behind those to where the next layer's router would send this layer's hidden states: the
drive reads while attention is computed, too.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearflash.abi.errors import CommandError, StateError
from nearflash.offload.tiers.link import Buffer, Link
from nearflash.offload.tiers.report import Ledger
from nearflash.offload.weights.layout import Layout, LayoutReader
from nearflash.storage.io.checksum import crc32c
from nearflash.support.files import write_durably
from nearflash.support.tables import check_fields, check_integers, read_json
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.weights.sources import Piece, Source

__all__ = ["COUNTS_FILE", "ExpertCache", "MixtureLayer", "mixtures_of"]

COUNTS_FILE = "nearflash-experts.json"
"""How often each expert was routed, beside the model."""
EXPERTS_WAIT = "wait for experts"
_READERS = 2
_AHEAD, _GUESSED_AHEAD = 2 * _READERS, _READERS
"""Experts that are being read or will be next, at most; while a guess is begun: a wrong one must not delay others."""


@dataclass
class MixtureLayer:
    """The experts of one decoder layer."""

    number: int
    """Of the layer."""
    module: Any
    """Whose forward loops over experts."""
    router: Any
    sources: dict[str, Source]
    """Of the fused parameters, by name in `module`."""

    @property
    def experts(self) -> int:
        """How many there are."""
        return next(iter(self.sources.values())).experts


def mixtures_of(
    layers: Sequence[Any], sources: Sequence[dict[str, Source]], numbers: Sequence[int]
) -> list[MixtureLayer]:
    """The layers among `numbers` whose experts can be read one by one; their sources are taken out of `sources`.

    Parameters of a matrix for each expert count, in a module with `num_experts` whose implementation can be chosen.
    """
    found = []
    for number in numbers:
        for name, module in layers[number].named_modules():
            if not isinstance(getattr(module, "num_experts", None), int) or not hasattr(module, "is_transposed"):
                continue
            own = {
                leaf: sources[number][f"{name}.{leaf}"] for leaf in module._parameters
                if len(sources[number][f"{name}.{leaf}"].shape) == 3 and sources[number][f"{name}.{leaf}"].experts
            }  # fmt: skip
            parent = layers[number].get_submodule(name.rpartition(".")[0])
            router = next((each for each in parent.children() if _is_router(each, module.num_experts)), None)
            if own:
                for leaf in own:
                    del sources[number][f"{name}.{leaf}"]
                found.append(MixtureLayer(number, module, router, own))
                break
    return found


def _is_router(module: Any, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == experts and hasattr(module, "top_k")


@dataclass
class _Slot:
    """Memory of one expert, and whose it is."""

    buffer: Buffer
    key: tuple[int, int] | None = None
    loading: "Future[None] | None" = None
    views: dict[str, Tensor] = field(default_factory=dict)
    used: int = 0
    """When it was used last."""
    guessed: bool = False
    """It was read before its layer's router was asked, and that did not name it yet."""


class _Rows:
    """In the place of a fused parameter: its rows by expert."""

    def __init__(self, cache: "ExpertCache", place: int, leaf: str) -> None:
        self._cache, self._place, self._leaf = cache, place, leaf

    def __getitem__(self, index: Any) -> Tensor:
        return self._cache.tensor(self._place, int(index), self._leaf)


class ExpertCache:
    """Experts of the layers of `mixtures`, up to `cache_bytes` of them. Close it, or use it as a context manager.

    folder: the model's, where the counts are kept if it can be written to; None: they are not. ahead: read before the
    loop asks. Raises CommandError for a budget of less than two experts, StateError for damaged counts. Damaged experts
    raise WeightsError, here or when they are asked for.
    """

    def __init__(
        self, mixtures: Sequence[MixtureLayer], cache_bytes: int, *, link: Link, ledger: Ledger, folder: Path | None,
        ahead: bool = True, direct: bool = True,
    ) -> None:  # fmt: skip
        self._link, self._ledger, self._ahead = link, ledger, ahead
        self._mixtures = [
            replace(each, sources={leaf: _with_row_checksums(source) for leaf, source in each.sources.items()})
            for each in mixtures
        ]
        self._reader = LayoutReader(direct)
        self._layouts: dict[tuple[int, int], Layout] = {}
        every = [(place, expert) for place, own in enumerate(self._mixtures) for expert in range(own.experts)]
        size = max(self._layout(*key).size_bytes for key in every)  # they begin anywhere in a block
        count = min(cache_bytes // size, len(every))
        if count < 2:
            raise CommandError(f"expert_bytes must be {2 * size} at least, for two experts, not {cache_bytes!r}")
        ledger.take("gpu", count * size, "experts")
        self._held = count * size
        self._slots = [_Slot(link.buffer(size)) for _ in range(count)]
        self._by_key: dict[tuple[int, int], _Slot] = {}
        self._free = list(self._slots)
        self._pool = ThreadPoolExecutor(_READERS, "nearflash-experts", initializer=set_ieee_arithmetic)
        self._clock = 0
        self._loading: list[_Slot] = []
        self._plan: list[tuple[int, int]] = []
        """What the loop that runs will still ask for, in its order."""
        self._guesses: list[tuple[int, int]] = []
        """What the next layer's will probably ask for."""
        self._current: tuple[int, int] | None = None
        self.hits = self.ahead_hits = self.misses = 0
        """Routed experts that were in memory; that were guessed, and read or being read; that were neither."""
        self.reads = 0
        self._file = None if folder is None else folder / COUNTS_FILE
        self._counts: defaultdict[tuple[int, int], int] = defaultdict(int, _read_counts(self._file, self._shape()))
        self._replaced: list[tuple[Any, dict[str, Any]]] = []
        for place, mixture in enumerate(self._mixtures):
            self._replace(place, mixture)

    def tensor(self, place: int, expert: int, leaf: str) -> Tensor:
        """A parameter of an expert, (…): of `sources[leaf]` without its first dimension. Waits until it is read."""
        key = (place, expert)
        if key != self._current or key not in self._by_key:
            if key in self._plan:
                del self._plan[: self._plan.index(key) + 1]
            self._current = key
            slot = self._slot(key)
            assert slot is not None
            self._read_on()
            with self._ledger.span(EXPERTS_WAIT, layer=self._mixtures[place].number, expert=expert):
                assert slot.loading is not None
                slot.loading.result()
            self._link.before_use(slot.buffer)
        return self._by_key[key].views[leaf]

    def close(self) -> None:
        """Keep the counts, free the memory, put the model's parameters back; may be called twice."""
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()
        self._ledger.give("gpu", self._held)
        self._held = 0
        for module, parameters in self._replaced:
            del module.forward
            for leaf, parameter in parameters.items():
                delattr(module, leaf)
                module._parameters[leaf] = parameter
        if self._replaced:
            _write_counts(self._file, self._shape(), self._counts)
        self._replaced = []

    def __enter__(self) -> "ExpertCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The model's side

    def _replace(self, place: int, mixture: MixtureLayer) -> None:
        module = mixture.module
        own = {leaf: module._parameters.pop(leaf) for leaf in mixture.sources}
        self._replaced.append((module, own))
        for leaf in own:
            setattr(module, leaf, _Rows(self, place, leaf))
        forward = module.forward

        def routed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            chosen = next(
                each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and not each.is_floating_point()
            )
            self._route(place, chosen, hidden_states)
            return forward(hidden_states, *args, **kwargs)

        module.forward = routed

    def _route(self, place: int, chosen: Tensor, hidden_states: Tensor) -> None:
        """The loop of this layer begins: it will ask for the experts `chosen` (tokens, k), in ascending order."""
        numbers, counts = (each.tolist() for each in chosen.unique(return_counts=True))
        wanted = [(place, number) for number in numbers if number < self._mixtures[place].experts]
        for key, count in zip(wanted, counts, strict=False):
            self._counts[key] += count
            slot = self._by_key.get(key)
            if slot is None:
                self.misses += 1
            elif slot.guessed:
                self.ahead_hits += 1
                slot.guessed = False
            else:
                self.hits += 1
        self._plan, self._current = wanted, None
        if self._ahead:
            self._withdraw()
            self._guesses = list(self._likely(place + 1, hidden_states))
            self._read_on()

    def _likely(self, place: int, hidden_states: Tensor) -> Iterator[tuple[int, int]]:
        """What the next layer's router makes of these hidden states, the most likely first; they change little from
        layer to layer. Source: "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv
        2312.17238), section 3.2.
        """
        router = self._mixtures[place].router if place < len(self._mixtures) else None
        if router is None or router.weight.is_meta:
            return
        found = [each for each in router(hidden_states) if isinstance(each, Tensor)]
        chosen = next((each for each in reversed(found) if not each.is_floating_point()), None)
        if chosen is None:
            return
        weights = [each for each in found if each.is_floating_point() and each.shape == chosen.shape]
        likely = torch.zeros(self._mixtures[place].experts, device=chosen.device)
        likely.index_add_(0, chosen.flatten(), (weights[-1] if weights else torch.ones_like(chosen)).float().flatten())
        for number in likely.argsort(descending=True).tolist()[: int(likely.count_nonzero())]:
            yield place, number

    # Memory

    def _read_on(self) -> None:
        """Begin to read what the loop asks for next, and what it will probably ask for in the next layer."""
        if not self._ahead:
            return
        asked = len(self._plan)
        for number, key in enumerate(self._plan + self._guesses):
            if self._in_flight() >= (_AHEAD if number < asked else _GUESSED_AHEAD):
                return
            if key not in self._by_key:
                slot = self._slot(key, needed=False)
                if slot is None:
                    return
                slot.guessed = number >= asked

    def _withdraw(self) -> None:
        """Free the memory of guesses that are not asked for and whose reading did not begin."""
        wanted = set(self._plan)
        for slot in self._loading:
            assert slot.key is not None and slot.loading is not None
            if slot.key not in wanted and slot.loading.cancel():
                del self._by_key[slot.key]
                slot.key = slot.loading = None
                self._free.append(slot)
                self.reads -= 1
        self._loading = [slot for slot in self._loading if slot.loading is not None]

    def _in_flight(self) -> int:
        self._loading = [slot for slot in self._loading if slot.loading is not None and not slot.loading.done()]
        return len(self._loading)

    def _slot(self, key: tuple[int, int], *, needed: bool = True) -> _Slot | None:
        """The memory of an expert, which is being read if it was not there; None where it is not `needed` enough."""
        self._clock += 1
        slot = self._by_key.get(key)
        if slot is None:
            slot = self._free.pop() if self._free else self._evicted(key, needed)
            if slot is None:
                return None
            slot.key, self._by_key[key] = key, slot
            slot.loading, slot.guessed = self._pool.submit(self._load, key, slot), False
            self._loading = [each for each in self._loading if each is not slot] + [slot]
            self.reads += 1
        slot.used = self._clock
        return slot

    def _evicted(self, key: tuple[int, int], needed: bool) -> _Slot | None:
        """Memory taken from the expert that was routed least often, of those that nothing is known to ask for."""
        planned = {*self._plan, *self._guesses}
        others = [slot for slot in self._slots if slot.key != self._current]
        idle = [slot for slot in others if slot.loading is None or slot.loading.done()]
        spare = [slot for slot in idle if slot.key not in planned]
        if key in self._guesses:  # the next batch will ask for experts of the same layer
            spare = [slot for slot in spare if slot.key is None or slot.key[0] != key[0] - 1]
        if not spare and needed:
            order = {each: place for place, each in enumerate(self._plan + self._guesses)}
            spare = sorted(idle, key=lambda slot: order[slot.key or key])[-1:]
        if not spare and needed:  # all of it is being read: wait for the one that is asked for last
            last = others[-1]
            assert last.loading is not None
            last.loading.exception()
            spare = [last]
        if not spare:
            return None
        slot = min(spare, key=lambda each: (self._counts[each.key] if each.key else -1, each.used))
        if slot.key is not None:
            del self._by_key[slot.key]
            self._link.after_use(slot.buffer)
        return slot

    def _load(self, key: tuple[int, int], slot: _Slot) -> None:
        layout = self._layout(*key)
        self._link.before_fill(slot.buffer)
        with self._ledger.span("load expert", layer=self._mixtures[key[0]].number, expert=key[1]):
            moved = self._reader.read_runs(layout, slot.buffer.host) + self._reader.expand(layout, slot.buffer.host)
        self._ledger.moved("experts disk to host", moved)
        self._link.push(slot.buffer)
        slot.views = layout.views(slot.buffer.memory)

    def _layout(self, place: int, expert: int) -> Layout:
        key = (place, expert)
        if key not in self._layouts:
            sources = self._mixtures[place].sources
            own = {leaf: _of_expert(source, expert) for leaf, source in sources.items()}
            self._layouts[key] = Layout(own, gap_bytes=0)
        return self._layouts[key]

    def _shape(self) -> list[list[int]]:
        return [[mixture.number, mixture.experts] for mixture in self._mixtures]


def _of_expert(source: Source, expert: int) -> Source:
    """A fused parameter's source for one expert."""
    shape = source.shape[1:]
    own = [piece for piece in source.pieces if piece.place and piece.place[0] == expert]
    if own:
        whole = len(own) == 1
        pieces = tuple(replace(piece, place=() if whole else piece.place[1:]) for piece in own)
        return replace(source, shape=shape, pieces=pieces)
    return replace(source, shape=shape, pieces=(Piece(source.pieces[0].tensor.row(expert)),))


def _with_row_checksums(source: Source) -> Source:
    """A fused parameter's source, with a checksum of each expert where its file has one of all experts alone.

    Reads such a tensor once, as files of version 1 have it. Raises WeightsError where it is damaged.
    """
    tensor = source.pieces[0].tensor
    if source.pieces[0].place or tensor.checksum is None or tensor.row_checksums:
        return source
    rows, whole = [], 0
    for number in range(tensor.shape[0]):
        data = tensor.row(number).load()
        rows.append(crc32c(data))
        whole = crc32c(data, whole)
    if whole != tensor.checksum:
        raise tensor.error("it is damaged: its checksum is another")
    return replace(source, pieces=(replace(source.pieces[0], tensor=replace(tensor, row_checksums=tuple(rows))),))


def _read_counts(file: Path | None, shape: list[list[int]]) -> Mapping[tuple[int, int], int]:
    """The counts in a file; none where there is none, or it is of other layers. Raises StateError."""
    if file is None or not file.exists():
        return {}
    what = f"counts of experts {file}"
    layers, counts = check_fields(what, read_json(file, StateError, "remove it"), layers=list, counts=list)
    if layers != shape:
        return {}
    if len(counts) != len(shape):
        raise StateError(f"{what} must have {len(shape)} rows, not {len(counts)}: remove it")
    kept = {}
    for place, row in enumerate(counts):
        for expert, count in enumerate(check_integers(what, row)):
            kept[place, expert] = count // 2  # what was long ago counts for less
    return kept


def _write_counts(file: Path | None, shape: list[list[int]], counts: Mapping[tuple[int, int], int]) -> None:
    """Keep the counts, where the folder can be written to; they only save time."""
    if file is None:
        return
    rows = [[counts.get((place, expert), 0) for expert in range(experts)] for place, (_, experts) in enumerate(shape)]
    with suppress(OSError):
        write_durably(file, json.dumps({"layers": shape, "counts": rows}))
