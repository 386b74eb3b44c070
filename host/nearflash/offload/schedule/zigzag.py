"""The zig-zag schedule: a layer's weights are loaded once, and all batches of a block are computed with them.

    for each token:  for each layer j:  wait for the weights of j, begin those of j + 1
                         for each batch k:  wait for the KV cache of (j, k), begin those of the next VISITS_AHEAD
                                            begin the hidden states of the next batch, where they are on disk
                                            compute (j, k), begin to store its new keys, values and hidden states

Where the host attends beside a GPU, (j, k) stops at its attention, and goes on after (j, k + 1) came as far.

Each batch is somebody's generation loop in a fiber, which stops at every module of `Interception`. Source: FlexGen
(arXiv 2303.06865), section 4.1, algorithm 1.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch

from nearflash.abi.errors import UnsupportedError
from nearflash.offload.cache.kv_cache import BlockMover, TieredLayer
from nearflash.offload.schedule.fiber import COMPUTED, Call, Fiber
from nearflash.offload.schedule.pipeline import PipelineStage
from nearflash.offload.schedule.prefill import compute_layer
from nearflash.offload.tiers.activations import Parked
from nearflash.offload.tiers.ledger import BETWEEN_LAYERS, CACHE_WAIT, COMPUTE, RANKS_WAIT, STATES_WAIT, Ledger
from nearflash.offload.weights.layer_weights import LayerWeights
from nearflash.planning.policy import VISITS_AHEAD
from nearflash.support.prefetch import Prefetcher

__all__ = ["Interception", "ScheduledBatch", "ZigZag", "attend_beside"]

_ON_HOST = object()
"""Subject of a call that the host computes beside the GPU."""


def attend_beside(attend: Callable[[], None]) -> None:
    """Have the host attend while the schedule goes on with another batch, and return when it has."""
    Fiber.wait_for(Call(_ON_HOST, attend))


class Interception:
    """The forward of some modules stops the fiber that calls it. Undone at the end of the block."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self._modules = list(modules)

    def __enter__(self) -> Self:
        for module in self._modules:
            module.forward = _stopping(module, module.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            del module.forward


def _stopping(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_join_rows(value) if isinstance(value, torch.Tensor) else value for value in args)
        return Fiber.wait_for(Call(module, forward, args, kwargs))

    return stop


def _join_rows(states: torch.Tensor) -> torch.Tensor:
    """States with their rows one behind the other; the same tensor where they are.

    Those of each sequence's last token are not: torch would multiply them one by one, with a copy of the output layer's
    weights for each. So it would those of one sequence, which count as contiguous whatever the distance of rows that
    are not there.
    """
    joined = torch.empty_like(states, device="meta", memory_format=torch.contiguous_format)
    return states if states.stride() == joined.stride() else states.clone(memory_format=torch.contiguous_format)


class ScheduledBatch:
    """One batch of a block: its generation, its cache's layers by number, where its hidden states wait."""

    def __init__(
        self, run: Callable[[], Any], name: str, layers: dict[int, TieredLayer], parked: Parked, passes: int
    ) -> None:
        self.fiber, self.layers, self.parked = Fiber(run, name), layers, parked
        self.passes_left = passes
        """Forward passes that it makes at most."""
        self.call: Call | None = None
        self.other_outputs: tuple[Any, ...] | None = None
        """What a layer returns beside hidden states; None where it returns them alone."""

    def go_on(self, value: Any = None) -> None:
        """Run its own code up to the next module."""
        self.call = self.fiber.resume(value)


class _Visit(NamedTuple):
    """A layer that a batch has computed as far as the attention of the host."""

    batch: ScheduledBatch
    layer: TieredLayer
    number: int
    attention: Call


class ZigZag:
    """Computes the batches of a block; layers are a model's decoder layers, in their order.

    stage: of several ranks, `head` is then the output layer, and each rank's batches are in as many groups as there are
    ranks. after_pass: called whenever all batches of a group have passed all layers. split: prefill may compute a batch
    in parts.
    """

    def __init__(
        self, layers: Sequence[Any], weights: LayerWeights, mover: BlockMover, ledger: Ledger,
        stage: PipelineStage, head: Any = None, after_pass: Callable[[], None] | None = None, *, split: bool = True,
    ) -> None:  # fmt: skip
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._last = len(layers) - 1
        self._weights, self._mover, self._ledger, self._after_pass = weights, mover, ledger, after_pass
        self._stage, self._head, self._split = stage, head, split
        self._attending: Prefetcher[Call, None] = Prefetcher("nearflash-host-attention", Call.compute)

    @torch.no_grad()
    def run(self, batches: Sequence[ScheduledBatch], *, more: bool = False) -> None:
        """Run all batches to their end, once; `more` blocks follow. Raises what computing, loading and storing raise;
        no batch goes on then.
        """
        try:
            for batch in batches:
                batch.go_on()
            groups = [batches[first :: self._stage.ranks] for first in range(self._stage.ranks)]
            while any(batch.call is not None for batch in batches):
                for group in groups:
                    self._advance(group, more)
            self._stage.finish()
            self._mover.drain()
        finally:
            self._attending.close()
            for batch in batches:
                batch.fiber.close()

    def _advance(self, batches: Sequence[ScheduledBatch], more: bool) -> None:
        """Run a group up to where it would wait for another rank; to its end where there is none."""
        begun = False
        while live := [batch for batch in batches if batch.call is not None]:
            assert live[0].call is not None
            subject = live[0].call.subject
            number = self._numbers.get(id(subject))
            if begun and self._waits(subject, number):
                return
            begun = True
            together = [batch for batch in live if batch.call is not None and batch.call.subject is subject]
            if number is not None and self._stage.owns(number):
                self._visit(number, together, more)
            elif number is not None:
                self._pass_by(number, together)
            else:
                for batch in together:
                    self._compute(batch)

    def _waits(self, subject: Any, number: int | None) -> bool:
        """Whether something comes from another rank there."""
        if number is None:
            return subject is self._head and not self._stage.is_last
        return number == self._stage.first and number > 0

    def _pass_by(self, number: int, batches: Sequence[ScheduledBatch]) -> None:
        """A layer of another rank: hidden states go to it where it is the next one's first."""
        for batch in batches:
            assert batch.call is not None
            states = batch.call.hidden_states
            assert states is not None
            batch.parked.restore()
            if number == self._stage.end:
                self._stage.send_states(states)
            if number in batch.layers:
                batch.layers[number].length += states.shape[1]
            if number == self._last:
                batch.passes_left -= 1
            batch.go_on((states, *batch.other_outputs) if batch.other_outputs is not None else states)
        if number == self._last and self._after_pass is not None:
            self._after_pass()

    def _visit(self, number: int, batches: Sequence[ScheduledBatch], more: bool) -> None:
        last_pass = not more and max(batch.passes_left for batch in batches) <= 1
        with self._weights.use(number, last=last_pass):
            visits, begun = self._caches_from(number, batches), deque[_Visit]()
            for index, batch in enumerate(batches):
                for visited in visits[index : index + VISITS_AHEAD + 1]:
                    if visited is not None:  # a drive that waits for computing is lost
                        self._mover.begin(visited)
                if number == self._stage.first and number > 0:
                    self._receive(batch)
                layer = batch.layers.get(number)
                if layer is not None:
                    self._mover.ready(layer)
                with self._ledger.span(STATES_WAIT):
                    batch.parked.restore()
                batches[(index + 1) % len(batches)].parked.begin()
                if number == self._last:
                    batch.passes_left -= 1
                if layer is not None and layer.attends_on_host:
                    begun.append(self._begin(batch, layer, number))
                    if self._mover.overlap and len(begun) == 1:
                        continue
                    self._end(begun.popleft())
                else:
                    self._compute(batch, layer, number)
            while begun:
                self._end(begun.popleft())
        if number == self._last and self._after_pass is not None:
            self._after_pass()

    def _caches_from(self, number: int, batches: Sequence[ScheduledBatch]) -> list[TieredLayer | None]:
        """The KV cache of each visit of a layer and of the next ones, as far as caches are loaded ahead."""
        layers = [layer for layer in range(number, number + VISITS_AHEAD + 1) if self._stage.owns(layer)]
        return [batch.layers.get(layer) for layer in layers for batch in batches]

    def _receive(self, batch: ScheduledBatch) -> None:
        """A batch's hidden states come from the rank before, those of its own code are of no layer's."""
        call = batch.call
        assert call is not None
        states = call.hidden_states
        assert states is not None
        batch.parked.restore()
        call.replace_states(self._stage.receive_states(states))

    def _compute(self, batch: ScheduledBatch, layer: TieredLayer | None = None, number: int = -1) -> None:
        """Compute what a batch waits for, and let it go on to its next module."""
        call = batch.call
        assert call is not None
        if call.subject is self._head and not self._stage.is_last:
            with self._ledger.span(RANKS_WAIT):
                value: Any = self._stage.receive_logits(call.args[0], len(self._head.weight))
        else:
            with self._ledger.span(COMPUTE, layer=number):
                value = compute_layer(call, layer, self._split)
        self._go_on(batch, layer, number, value)

    def _begin(self, batch: ScheduledBatch, layer: TieredLayer, number: int) -> "_Visit":
        """Have a batch's fiber compute a layer up to the attention, which the host begins."""
        with self._ledger.span(COMPUTE, layer=number):
            stopped = batch.fiber.resume(batch.call)
        if stopped is None or stopped.subject is not _ON_HOST:
            raise UnsupportedError(
                f"layer {number} must attend by transformers' AttentionInterface for attention on the host beside a "
                "GPU: leave the KV cache in the GPU's memory, or make it of 4 bits"
            )
        self._attending.begin(stopped)
        return _Visit(batch, layer, number, stopped)

    def _end(self, visit: "_Visit") -> None:
        """Wait for the host, and have the layer computed from there on."""
        with self._ledger.span(CACHE_WAIT):
            self._attending.take(visit.attention)
        with self._ledger.span(COMPUTE, layer=visit.number):
            computed = visit.batch.fiber.resume()
        assert computed is not None and computed.subject is COMPUTED
        self._go_on(visit.batch, visit.layer, visit.number, computed.compute())

    def _go_on(self, batch: ScheduledBatch, layer: TieredLayer | None, number: int, value: Any) -> None:
        """Keep what a visit added, and run a batch's own code with its result up to the next module."""
        if number >= 0:
            batch.other_outputs = tuple(value[1:]) if isinstance(value, tuple) else None
        if layer is not None:
            with self._ledger.span(CACHE_WAIT):
                self._mover.finish(layer)
        with self._ledger.span(BETWEEN_LAYERS):
            batch.call = None
            batch.go_on(value)
        if batch.call is not None and id(batch.call.subject) in self._numbers:
            with self._ledger.span(STATES_WAIT):
                batch.parked.park(batch.call.hidden_states)
