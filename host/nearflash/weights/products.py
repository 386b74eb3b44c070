"""Products with some of a model's weights watched as they are computed: what comes to each of its matrices.

A linear layer could be watched by a hook; the experts that transformers fuses into one parameter are no modules.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WatchedProducts"]

_ROWS = torch.nn.functional.linear
"""Takes a weight (outputs, inputs)."""
_COLUMNS = {torch.matmul: 0, Tensor.matmul: 0, Tensor.__matmul__: 0, torch.bmm: 0, torch.addmm: 1}
"""Take one (…, inputs, outputs), behind their inputs; the place of those among the arguments."""
_EXPERTS_DIMENSIONS = 3


class WatchedProducts(TorchFunctionMode):
    """While it is entered, it sums over the inputs of products with parameters, or with parts of them.

    parameters: (outputs, inputs) or (inputs, outputs), or of experts (experts, …), contiguous, by name. products: sums
    of all products of two inputs (inputs, inputs), as SparseGPT wants, not of squares (inputs,), as Wanda does; fp32.
    """

    def __init__(self, parameters: Mapping[str, Tensor], products: bool) -> None:
        super().__init__()
        self._products = products
        self._parameters = sorted(parameters.items(), key=lambda named: named[1].data_ptr())
        self._starts = [parameter.data_ptr() for _, parameter in self._parameters]
        self.sums: dict[tuple[str, int], Tensor] = {}
        """By name and number of the expert, which is 0 where there are none."""
        self.transposed: dict[str, bool] = {}
        """Whether a parameter has its inputs before its outputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchFunctionMode."""
        if func is _ROWS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self._look(args[0] if args else kwargs["input"], weight, weight.stride(-1) == 1)
        elif func in _COLUMNS and len(args) > _COLUMNS[func] + 1:
            inputs, weight = args[_COLUMNS[func] :][:2]
            if weight.ndim > 1:
                self._look(inputs, weight, weight.stride(-1) != 1)
        return func(*args, **(kwargs or {}))

    def _look(self, inputs: Tensor, weight: Tensor, inputs_are_last: bool) -> None:
        at = bisect_right(self._starts, weight.data_ptr()) - 1
        if at < 0:
            return
        name, parameter = self._parameters[at]
        before = (weight.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        if before >= parameter.numel():
            return
        first = before // parameter.stride(0) if parameter.ndim == _EXPERTS_DIMENSIONS else 0
        self.transposed[name] = not inputs_are_last
        several = weight.ndim == _EXPERTS_DIMENSIONS
        for number, rows in enumerate(inputs if several else [inputs.reshape(-1, inputs.shape[-1])]):
            self._add((name, first + number), rows.float())

    def _add(self, key: tuple[str, int], rows: Tensor) -> None:
        new = rows.T @ rows if self._products else rows.square().sum(0)
        self.sums[key] = self.sums[key] + new if key in self.sums else new
