"""The zig-zag schedule: a layer's weights are loaded once, and all batches of a block are computed with them.

    for each token:  for each layer j:  wait for the weights of j, begin those of j + 1
                         for each batch k:  wait for the KV cache of (j, k), begin that of (j, k + 1)
                                            compute (j, k), begin to store its new keys and values

Each batch is somebody's generation loop in a fiber, which stops at every module of `Interception`. Source: FlexGen
(arXiv 2303.06865), section 4.1, algorithm 1.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch

from nearflash.offload.activations import Parked, hidden_states
from nearflash.offload.fiber import Call, Fiber
from nearflash.offload.kv_cache import CacheMover, TieredLayer
from nearflash.offload.layer_weights import LayerWeights
from nearflash.offload.report import COMPUTE, STATES_WAIT, Ledger

__all__ = ["Batch", "Interception", "ZigZag"]


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
        # The states of each sequence's last token are no contiguous rows: torch would multiply them one by one, with a
        # copy of the output layer's weights for each.
        args = tuple(each.contiguous() if isinstance(each, torch.Tensor) else each for each in args)
        return Fiber.wait_for(Call(module, forward, args, kwargs))

    return stop


class Batch:
    """One batch of a block: its generation, its cache's layers by number, where its hidden states wait."""

    def __init__(
        self, run: Callable[[], Any], name: str, layers: dict[int, TieredLayer], parked: Parked, passes: int
    ) -> None:
        self.fiber, self.layers, self.parked = Fiber(run, name), layers, parked
        self.passes_left = passes
        """Forward passes that it makes at most."""
        self.call: Call | None = None

    def go_on(self, value: Any = None) -> None:
        """Run its own code up to the next module."""
        self.call = self.fiber.resume(value)


class ZigZag:
    """Computes the batches of a block; layers are a model's decoder layers, in their order.

    after_pass: called whenever all batches have passed all layers.
    """

    def __init__(
        self, layers: Sequence[Any], weights: LayerWeights, mover: CacheMover, ledger: Ledger,
        after_pass: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._numbers = {id(layer): number for number, layer in enumerate(layers)}
        self._last = len(layers) - 1
        self._weights, self._mover, self._ledger, self._after_pass = weights, mover, ledger, after_pass

    @torch.no_grad()
    def run(self, batches: Sequence[Batch], *, more: bool = False) -> None:
        """Run all batches to their end; `more` blocks follow. Raises what computing, loading and storing raise; no
        batch goes on then.
        """
        try:
            for batch in batches:
                batch.go_on()
            while live := [batch for batch in batches if batch.call is not None]:
                assert live[0].call is not None
                subject = live[0].call.subject
                together = [batch for batch in live if batch.call is not None and batch.call.subject is subject]
                number = self._numbers.get(id(subject))
                if number is None:
                    for batch in together:
                        self._compute(batch)
                else:
                    self._visit(number, together, more)
            self._mover.drain(layer for batch in batches for layer in batch.layers.values())
        finally:
            for batch in batches:
                batch.fiber.close()

    def _visit(self, number: int, batches: Sequence[Batch], more: bool) -> None:
        last_pass = not more and max(batch.passes_left for batch in batches) <= 1
        with self._weights.use(number, last=last_pass):
            for place, batch in enumerate(batches):
                layer = batch.layers.get(number)
                if layer is not None:
                    self._mover.begin(layer)
                following = batches[place + 1].layers.get(number) if place + 1 < len(batches) else None
                if following is not None:
                    self._mover.begin(following)
                elif place + 1 == len(batches) and number < self._last and number + 1 in batches[0].layers:
                    self._mover.begin(batches[0].layers[number + 1])
                if layer is not None:
                    self._mover.ready(layer)
                with self._ledger.span(STATES_WAIT):
                    batch.parked.restore()
                if number == self._last:
                    batch.passes_left -= 1
                self._compute(batch, layer, number)
        if number == self._last and self._after_pass is not None:
            self._after_pass()

    def _compute(self, batch: Batch, layer: TieredLayer | None = None, number: int = -1) -> None:
        """Compute what a batch waits for, and let it go on to its next module."""
        call = batch.call
        assert call is not None
        with self._ledger.span(COMPUTE, layer=number):
            value = call.compute()
        if layer is not None:
            self._mover.finish(layer)
        with self._ledger.span("between layers"):
            batch.call = call = None
            batch.go_on(value)
        if batch.call is not None and id(batch.call.subject) in self._numbers:
            batch.parked.park(hidden_states(batch.call.args, batch.call.kwargs))
