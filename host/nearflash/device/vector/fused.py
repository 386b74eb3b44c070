"""torch's fused kernels as a lane: profile `torch_fused` at the speed of compiled code, where torch is installed.

Blocks are multiples of 16 parameters, which the kernels compute on the path that the profile is named for; a rest goes
to the vector lane. Torch is imported when such a lane is made, not before.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial, singledispatch
from importlib.util import find_spec
from typing import Any

import numpy as np

from nearflash.abi.commands import CopyFormat
from nearflash.abi.rules import AdagradStep, AdamStep, OptimizerStep, Profile, SgdStep, StateFormat
from nearflash.device.vector.fma import F32
from nearflash.device.vector.lane import NAN, Arrays, VectorLane, low_precision, nonfinite_count

__all__ = ["FusedLane"]

GRANULE = 16
"""Parameters: the widest vector of torch's kernels."""


class FusedLane:
    """As VectorLane, for rules that `serves` says."""

    BLOCK_PARAMS = 1 << 16
    THREADS = 2

    def __init__(self, rule: OptimizerStep, copy: CopyFormat) -> None:
        import torch

        self._tensor: Callable[[F32], Any] = torch.from_numpy
        self._names = ("p", *rule.arrays)
        self._kernel = _kernel(rule, torch)
        self._copy = copy.number_format
        self._tail = VectorLane(rule, copy)

    @staticmethod
    def serves(rule: OptimizerStep) -> bool:
        """Whether there is a fused kernel for the rule here; it is for fp32 state."""
        fused = rule.profile is Profile.TORCH_FUSED and rule.state_format is StateFormat.FP32
        return fused and find_spec("torch") is not None

    @staticmethod
    def claim_thread() -> None:
        """Let torch use this thread alone for what it computes in it: teams of two threads only slow others down.

        OpenMP keeps that number by thread; torch's own call would change it for the whole process.
        """
        import torch

        torch.get_num_threads()  # torch sets the thread's number at its first use, and not again
        with suppress(OSError, AttributeError):  # a build without OpenMP
            ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)

    def step(self, inputs: Arrays, outputs: Arrays, first_param: int = 0) -> tuple[int, int]:
        """As VectorLane.step."""
        params = inputs["g"].size
        body = params // GRANULE * GRANULE
        with np.errstate(all="ignore"):
            nonfinite, overflows = self._body(_part(inputs, slice(body)), _part(outputs, slice(body)))
        if body < params:
            counts = self._tail.step(_part(inputs, slice(body, None)), _part(outputs, slice(body, None)))
            nonfinite, overflows = nonfinite + counts[0], overflows + counts[1]
        return nonfinite, overflows

    def _body(self, inputs: Arrays, outputs: Arrays) -> tuple[int, int]:
        if any(np.may_share_memory(outputs[name], other)
               for name in self._names for key, other in inputs.items() if key != name):  # fmt: skip
            inputs = {name: x.copy() for name, x in inputs.items()}
        nonfinite = nonfinite_count(inputs["g"])
        results = [outputs[name] for name in self._names]
        for name, result in zip(self._names, results, strict=True):
            np.copyto(result, inputs[name])
        self._kernel(*([self._tensor(x)] for x in (results[0], inputs["g"], *results[1:])))
        if results[0].size and np.isnan(results[0].min()):  # a NaN in the state reaches p
            for result in results:
                result[np.isnan(result)] = NAN
        return nonfinite, low_precision(results[0], self._copy, outputs["copy"]) if self._copy else 0


def _part(arrays: Arrays, part: slice) -> Arrays:
    return {name: x[part] for name, x in arrays.items()}


@singledispatch
def _kernel(rule: Any, torch: Any) -> Callable[..., None]:
    """The kernel with its scalars: of lists of p, g, m, v as far as the rule has them."""
    raise TypeError(f"rule must be one with a fused kernel, not {rule!r}")


@_kernel.register
def _adam(adam: AdamStep, torch: Any) -> Callable[..., None]:
    kernel = torch._fused_adamw_ if adam.decoupled else torch._fused_adam_
    step = [torch.tensor(float(adam.step))]
    scalars = dict(lr=adam.lr, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay)

    def run(p: list[Any], g: list[Any], m: list[Any], v: list[Any]) -> None:
        kernel(p, g, m, v, [], step, **scalars, amsgrad=False, maximize=False)

    return run


@_kernel.register
def _sgd(sgd: SgdStep, torch: Any) -> Callable[..., None]:
    scalars = dict(lr=sgd.lr, momentum=sgd.momentum, dampening=sgd.dampening, weight_decay=sgd.weight_decay)
    flags = dict(nesterov=sgd.nesterov, maximize=False, is_first_step=sgd.step == 1)
    run = partial(torch._fused_sgd_, **scalars, **flags)
    return run if sgd.momentum else lambda p, g: run(p, g, [])


@_kernel.register
def _adagrad(adagrad: AdagradStep, torch: Any) -> Callable[..., None]:
    step = [torch.tensor(float(adagrad.step))]
    return lambda p, g, v: torch._fused_adagrad_(
        p, g, v, step, lr=adagrad.lr, lr_decay=adagrad.lr_decay, weight_decay=adagrad.weight_decay, eps=adagrad.eps,
        maximize=False,
    )  # fmt: skip
