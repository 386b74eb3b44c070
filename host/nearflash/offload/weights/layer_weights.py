"""The weights of a model's layers, each on its tier, in memory by the time the layer is computed.

    gpu    in the memory of what computes, from the start
    host   in the host's memory: as stored, where they are compressed; used where they lie, where the host computes
    disk   in the checkpoint, read anew at each visit, into one of two buffers that the layers take turns with

With `bits` 4, matrices of the first two tiers are kept as codes of 4 bits and expanded at each visit.

Where what computes has a memory of its own, buffers are pushed there: compressed tensors as they are stored, if they
can be expanded there (nearflash.weights.crossing), which each visit does, into memory that all layers use in turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.offload.tiers.ledger import WEIGHTS_WAIT, Ledger
from nearflash.offload.tiers.link import DeviceLink, StagedBuffer
from nearflash.offload.weights.groups import quantize_source
from nearflash.offload.weights.layout import BufferLayout, LayoutReader
from nearflash.offload.weights.staging import StagedReads
from nearflash.offload.weights.storage_to_gpu import choose_reader
from nearflash.planning.policy import STAGED_TENSORS
from nearflash.support.buffers import BufferPool
from nearflash.support.closing import Closing
from nearflash.support.prefetch import Prefetcher
from nearflash.weights.crossing import CheckedTensor
from nearflash.weights.sources import Source

__all__ = ["LayerWeights"]

_BUFFERS = 2


@dataclass
class _Layer:
    """One layer's weights."""

    module: Any
    tier: str
    layout: BufferLayout
    home: Tensor | None = None
    """Where its buffer's stored bytes stay in the host's memory, if they do."""
    buffer: StagedBuffer | None = None
    """The one that stays."""
    checked: list[CheckedTensor] = field(default_factory=list)
    """What is expanded in the far memory, as it was found in the bytes that stay, or that were read last."""
    views: dict[str, Tensor] = field(default_factory=dict)
    empty: dict[str, Any] = field(default_factory=dict)
    """Its parameters without memory."""


class LayerWeights(Closing):
    """Weights of the layers by tier. Close it, or use it as a context manager.

    layers, sources, tiers: one each for every layer; of a layer without sources nothing is held. direct: past the page
    cache. Memory is counted in `ledger` before it is filled, which raises CommandError beyond a budget. Raises
    WeightsError for damaged tensors, CommandError for bits of 4 of a layer on disk that is not stored so.
    """

    def __init__(
        self, layers: Sequence[Any], sources: Sequence[Mapping[str, Source]], tiers: Sequence[str], *, link: DeviceLink,
        ledger: Ledger, bits: int = 16, overlap: bool = True, direct: bool = True,
    ) -> None:  # fmt: skip
        self._link, self._ledger, self._overlap = link, ledger, overlap
        self._direct, self.path = choose_reader(link, direct)
        """The path that weights on disk take to a GPU, in a sentence; empty where a processor computes."""
        self._reader, self._closed, self._opened = LayoutReader(direct), False, ExitStack()
        self._opened.callback(self._reader.close)
        if self._direct is not None:
            self._opened.callback(self._direct.close)
        try:
            self._layers = [
                self._place(layer, own, tier, bits) for layer, own, tier in zip(layers, sources, tiers, strict=True)
            ]
            self._passing = [n for n, own in enumerate(self._layers) if own.buffer is None and own.empty]
            largest = max((self._layers[number].layout.size_bytes for number in self._passing), default=0)
            self._room = min(_BUFFERS if overlap else 1, len(self._passing))
            self._take("gpu", self._room * largest, "buffers of weights")
            passing = [self._layers[number] for number in self._passing]
            staged = largest if any(each.home is None or each.layout.expanded for each in passing) else 0
            if not link.one_memory:
                self._take("host", self._room * staged, "staging buffers of weights")
            largest_staged = max((each.layout.largest_staged for each in passing), default=0)
            self._take("host", STAGED_TENSORS * largest_staged, "stored tensors that are read to be expanded")
            self._free = BufferPool("weights", (link.buffer(largest, staged) for _ in range(self._room)))
            work = max((layer.layout.compressed.work_bytes for layer in self._layers), default=0)
            self._take("gpu", work, "the weights of a layer that are expanded")
            self._work = link.far_memory(work)
            # Where layers are expanded, the next one's bytes are read while one's last tensors still are.
            any_expanded = any(self._layers[number].layout.expanded for number in self._passing)
            self._loads = Prefetcher("nearflash-weights", self._load, limit=self._room, pool=self._free,
                                     threads=max(1, self._room) if any_expanded else 1)  # fmt: skip
            self._opened.callback(self._loads.close)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def use(self, number: int, *, last: bool = False) -> Iterator[None]:
        """Layer `number` has its weights inside of the block; the next ones are loaded meanwhile, unless it is `last`
        that no layer before it will be wanted again.
        """
        if self._closed:
            raise CommandError("weights must not be used any more: they are closed")
        layer = self._layers[number]
        if layer.buffer is None:
            with self._ledger.span(WEIGHTS_WAIT, layer=number):
                if number not in self._loads:
                    self._loads.drop()  # after an error another layer may come than the next one
                buffer = self._loads.take(number)
        else:
            buffer = layer.buffer
        if self._overlap:
            self._begin_next(number, last)
        self._link.before_use(buffer)
        try:
            self._bind(layer, layer.views or layer.layout.views(buffer.memory))
            if layer.checked:
                self._bind(layer, layer.layout.compressed.expand(buffer.memory, self._work, layer.checked))
            yield
        finally:
            self._bind(layer, layer.empty)
            self._link.after_use(buffer)
            if layer.buffer is None:
                self._free.release(buffer)

    def close(self) -> None:
        """End what is being read, free the memory; may be called twice."""
        self._closed = True
        self._opened.close()

    # Placement

    def _place(self, module: Any, sources: Mapping[str, Source], tier: str, bits: int) -> _Layer:
        """A layer on its tier; what stays in memory is loaded."""
        if bits == 4:
            sources = {name: quantize_source(source, read=tier != "disk") for name, source in sources.items()}
        layout = BufferLayout(sources, far=not self._link.one_memory)
        empty = {name: _parameter(module, name) for name in sources}
        layer = _Layer(module, tier, layout, empty=empty)
        if tier == "disk":
            return layer
        compressed = any(piece.tensor.form != "dense" for each in sources.values() for piece in each.pieces)
        if tier == "host" if not self._link.one_memory else compressed:
            self._take(tier, layout.stored_bytes, "weights as they are stored")
            layout.expanded = {name: source.keep() for name, source in layout.expanded.items()}
            if layout.stored_end:
                layer.home = self._link.host_memory(layout.stored_end)
                layer.checked = self._read(layout, layer.home)
            return layer
        self._take(tier, layout.size_bytes, "weights")
        layer.buffer = self._link.buffer(layout.size_bytes)
        with self._reader.begin(layout) as reads:
            self._fill(layer, layer.buffer, reads)
        layer.views = layout.views(layer.buffer.memory)
        self._link.before_fill(layer.buffer)
        layer.buffer.host = layer.buffer.memory  # nothing is staged any more
        return layer

    def _take(self, tier: str, size_bytes: int, what: str) -> None:
        self._ledger.take(tier, size_bytes, what)
        self._opened.callback(self._ledger.give, tier, size_bytes)

    # Loading

    def _begin_next(self, number: int, last: bool) -> None:
        """Begin the next layers that pass through buffers, as many as there are buffers for."""
        after = [each for each in self._passing if each > number]
        order = after if last else after + [each for each in self._passing if each <= number]
        for each in order[: self._room]:
            self._loads.begin(each)

    def _load(self, number: int) -> StagedBuffer:
        layer = self._layers[number]
        with self._reader.begin(layer.layout) as reads, self._free.fill() as buffer:
            self._link.before_fill(buffer)
            with self._ledger.span("load weights", layer=number):
                try:
                    self._fill(layer, buffer, reads)
                except WeightsError as error:
                    raise WeightsError(f"layer {number}: {error}") from error
        return buffer

    def _fill(self, layer: _Layer, buffer: StagedBuffer, reads: StagedReads) -> None:
        layout = layer.layout
        if self._direct is not None and layer.tier == "disk" and self._direct.takes(layout):
            self._ledger.count_bytes("weights disk to gpu", self._direct.read_runs(layout, buffer.memory))
            return
        if layer.home is None:
            layer.checked = self._read(layout, buffer.host)
        elif self._link.one_memory:
            buffer.host[: len(layer.home)].copy_(layer.home)
        stored = self._reader.expand(layout, buffer.host, reads)
        if layer.tier == "disk" or layer.buffer is not None:
            self._ledger.count_bytes("weights disk to host", stored)
        if not self._link.one_memory:
            self._push(layer, buffer)
        elif layer.tier == "host":
            self._ledger.count_bytes("weights host to gpu", stored)

    def _push(self, layer: _Layer, buffer: StagedBuffer) -> None:
        """Copy a layer to the far memory: what is kept in the host's from there, else what was read to the buffer."""
        layout, home = layer.layout, buffer.host if layer.home is None else layer.home
        read, expanded = layout.dense_spans
        with self._link.filling(buffer):
            self._link.push("weights", home, buffer.memory, [*read, *layout.compressed.spans(layer.checked)])
            self._link.push("weights", buffer.host, buffer.memory, expanded)

    def _read(self, layout: BufferLayout, memory: Tensor) -> list[CheckedTensor]:
        """Read a layer's runs, and find what is expanded in the far memory."""
        self._ledger.count_bytes("weights disk to host", self._reader.read_runs(layout, memory))
        return layout.compressed.check(memory)

    @staticmethod
    def _bind(layer: _Layer, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            owner, _, leaf = name.rpartition(".")
            parameters = layer.module.get_submodule(owner)._parameters
            parameters[leaf] = value if isinstance(value, Parameter) else Parameter(value, requires_grad=False)


def _parameter(module: Any, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    parameter = module.get_submodule(owner)._parameters.get(leaf)
    if parameter is None:
        raise CommandError(f"{name!r} must be a parameter of {type(module).__name__}")
    return parameter
