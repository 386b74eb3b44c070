"""An update on vectors of the host: state in any format in, one step of a rule, state and copy out.

One pass of update.cpp does a block: a parameter is read, updated, written and rounded to its copy while it is in the
processor. Equal to nearflash.model.update to the bit.
"""

import ctypes
from collections.abc import Mapping
from functools import lru_cache, singledispatch
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, MasterFormat, OptimizerStep, Profile, SgdStep
from nearflash.device.backends.host.vector.state import load_update_loops
from nearflash.support.native import find_address

__all__ = ["Arrays", "VectorLane"]

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
_I32, _I64, _F32, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Rule(ctypes.Structure):
    """`Rule` of update.cpp."""

    _fields_ = (
        *((name, _I32) for name in ("kind", "profile", "state_format", "copy_format", "master", "step")),
        *((name, _I32) for name in ("decoupled", "decays", "has_momentum", "nesterov")),
        *((name, _F32) for name in ("lr", "eps", "decay", "root", "beta1", "gain1", "beta2", "gain2")),
    )


class _Block(ctypes.Structure):
    """`Block` of update.cpp."""

    _fields_ = (
        ("params", _I64),
        ("first_param", _I64),
        *((name, _ADDRESS) for name in ("g", "p", "m", "v", "m_scale", "v_scale", "copy", "weight", "rest", "g_bf16")),
        ("g_scale", _F32),
    )


class _Counts(ctypes.Structure):
    """`Counts` of update.cpp."""

    _fields_ = (("nonfinite_gradients", _I64), ("copy_overflows", _I64))


class VectorLane:
    """The lane of one step's scalars, for any thread."""

    BLOCK_PARAMS = 1 << 18
    """Most parameters a call: shorter calls spend their time in Python (2^16: a third), longer ones never stop."""

    def __init__(self, rule: OptimizerStep, copy: CopyFormat, master: MasterFormat = MasterFormat.FP32) -> None:
        self._rule = _rule_of(rule, copy, master)
        self._loops = load_update_loops()

    def step(
        self, inputs: Arrays, outputs: Arrays, first_param: int = 0, gradient_scale: float = 1.0
    ) -> tuple[int, int]:
        """Update a block of n parameters of the flat vector, from its `first_param` on.

        inputs: g, fp32 or (uint16) bf16 to be multiplied by the fp32 `gradient_scale`; p, fp32, (n,), or the halves of
        p, uint16; and the rule's arrays in its state format. outputs: all but g, and `copy`, uint16, (n,), where there
        is one; an output may be the same array as an input. All are contiguous. Returns the numbers of non-finite
        gradients and of finite parameters whose copy (or weight) is infinite.
        """
        inputs = _apart(inputs, outputs)
        g, counts = inputs["g"], _Counts()
        block = _Block(g.size, first_param, g_scale=gradient_scale)
        setattr(block, "g_bf16" if g.dtype == np.uint16 else "g", find_address(g))
        for name, out in outputs.items():
            place = find_address(out)
            if name != "copy" and find_address(inputs[name]) != place:
                np.copyto(out, inputs[name])
            setattr(block, name, place)
        self._loops.update_block(ctypes.byref(self._rule), ctypes.byref(block), ctypes.byref(counts))
        return counts.nonfinite_gradients, counts.copy_overflows


@lru_cache(maxsize=64)
def _rule_of(rule: OptimizerStep, copy: CopyFormat, master: MasterFormat) -> _Rule:
    """The same for all commands of a step with like parameters; loops only read it."""
    return _Rule(
        **_scalars(rule),
        profile=tuple(Profile).index(rule.profile),
        state_format=rule.state_format.code,
        copy_format=tuple(CopyFormat).index(copy),
        master=tuple(MasterFormat).index(master),
        step=rule.step,
        decays=bool(rule.weight_decay),
    )


def _apart(inputs: Arrays, outputs: Arrays) -> Arrays:
    """Inputs that no output of another name writes over."""
    shared = any(
        np.may_share_memory(out, array)
        for name, out in outputs.items()
        for key, array in inputs.items()
        if key != name
    )  # fmt: skip
    return {name: array.copy() for name, array in inputs.items()} if shared else inputs


@singledispatch
def _scalars(rule: Any) -> dict[str, Any]:
    """The values that a rule has of the fields of `Rule`, beside those of all."""
    raise TypeError(f"rule must be one of nearflash.abi.optimizers, not {rule!r}")


@_scalars.register
def _(adam: AdamStep) -> dict[str, Any]:
    root = adam.inverse_bias_correction2_sqrt if adam.profile is Profile.DEEPSPEED else adam.bias_correction2_sqrt
    return _momenta(adam) | {
        "kind": 0,
        "decoupled": adam.decoupled,
        "lr": adam.step_size,
        "eps": adam.eps,
        "root": root,
    }


@_scalars.register
def _(sgd: SgdStep) -> dict[str, Any]:
    return {
        "kind": 1, "lr": sgd.lr, "decay": sgd.decay, "has_momentum": bool(sgd.momentum), "nesterov": sgd.nesterov,
        "beta1": sgd.retained, "gain1": sgd.gain, "beta2": sgd.momentum,
    }  # fmt: skip


@_scalars.register
def _(adagrad: AdagradStep) -> dict[str, Any]:
    return {"kind": 2, "lr": adagrad.step_size, "eps": adagrad.eps, "decay": adagrad.decay}


@_scalars.register
def _(lion: LionStep) -> dict[str, Any]:
    return _momenta(lion) | {"kind": 3, "decoupled": True, "lr": lion.lr}


def _momenta(rule: AdamStep | LionStep) -> dict[str, Any]:
    betas = {"beta1": rule.beta1, "gain1": rule.one_minus_beta1, "beta2": rule.beta2, "gain2": rule.one_minus_beta2}
    return betas | {"decay": rule.decay}
