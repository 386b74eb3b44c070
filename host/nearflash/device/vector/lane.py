"""An update on vectors of the host: state in any format in, one step of a rule, state and copy out.

One pass of a compiled loop does a block: a parameter is read, updated, written and rounded to its copy while it is in
the processor. Equal to nearflash.model.update to the bit. A lane belongs to one thread: it has the scratch for a block.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.formats import FP32
from nearflash.abi.rules import OptimizerStep, StateFormat
from nearflash.device.vector.compiled import bf16_pattern, compiled, fp16_pattern, number, pattern
from nearflash.device.vector.orders import order_of
from nearflash.device.vector.state import F32, VectorState

__all__ = ["Arrays", "VectorLane"]

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

INT = np.int32
NAN, INFINITY, MAGNITUDE = INT(FP32.canonical_nan), INT(0x7F800000), INT(0x7FFFFFFF)
OVERFLOW = {CopyFormat.NONE: INFINITY, CopyFormat.FP16: INT(0x477FF000), CopyFormat.BF16: INT(0x7F7F8000)}
"""Pattern of the smallest magnitude that rounds to infinity."""
EMPTY = np.empty(0, np.float32), np.empty(0, np.uint16)


class VectorLane:
    """The lane of one thread: scratch for a block of narrow state, and one step's scalars."""

    BLOCK_PARAMS = 1 << 18
    """Most parameters a call: shorter calls spend their time in Python (2^16: a third), longer ones never stop."""

    def __init__(self, rule: OptimizerStep, copy: CopyFormat) -> None:
        self._roles = tuple(rule.torch_names)
        self._format = rule.state_format
        function, self._scalars = order_of(rule)
        self._loop = _loop(function, "m" in self._roles, "v" in self._roles, copy)
        self._states = {role: VectorState(role, rule.state_format, rule.step) for role in self._roles}
        narrow = 0 if rule.state_format is StateFormat.FP32 else self.BLOCK_PARAMS
        self._wide = {role: np.empty(narrow, np.float32) for role in self._roles}

    def step(self, inputs: Arrays, outputs: Arrays, first_param: int = 0) -> tuple[int, int]:
        """Update a block of n parameters of the flat vector, from its `first_param` on.

        inputs: g and p, fp32, (n,), and the rule's arrays in its state format. outputs: p, the arrays, and `copy`,
        uint16, (n,), where there is one; an output may be the same array as an input. Returns the numbers of non-finite
        gradients and of finite parameters whose copy is infinite.
        """
        inputs = _apart(inputs, outputs)
        g, p = inputs["g"], _brought(inputs["p"], outputs["p"])
        with np.errstate(all="ignore"):
            state = {role: self._decoded(role, inputs, outputs, g.size) for role in self._roles}
            m, v = (state.get(role, EMPTY[0]) for role in ("m", "v"))
            counts = self._loop(g, p, m, v, outputs.get("copy", EMPTY[1]), self._scalars)
            if self._format is not StateFormat.FP32:
                for role, values in state.items():
                    self._states[role].encode(values, first_param, self._stored(role, outputs))
        return counts

    def _decoded(self, role: str, inputs: Arrays, outputs: Arrays, params: int) -> F32:
        """State in fp32, where the loop changes it."""
        if self._format is StateFormat.FP32:
            return _brought(inputs[role], outputs[role])
        return self._states[role].decode(self._stored(role, inputs), self._wide[role][:params])

    def _stored(self, role: str, arrays: Arrays) -> list[NDArray[Any]]:
        scales = [f"{role}_scale"] if self._format is StateFormat.MX8 else []
        return [arrays[name] for name in (role, *scales)]


def _apart(inputs: Arrays, outputs: Arrays) -> Arrays:
    """Inputs that no output of another name writes over."""
    shared = any(
        np.may_share_memory(out, array)
        for name, out in outputs.items()
        for key, array in inputs.items()
        if key != name
    )  # fmt: skip
    return {name: array.copy() for name, array in inputs.items()} if shared else inputs


def _brought(values: F32, out: F32) -> F32:
    """Values in the memory where they are changed."""
    if values.ctypes.data != out.ctypes.data:
        np.copyto(out, values)
    return out


@cache
def _loop(order: Callable[..., Any], has_m: bool, has_v: bool, copy: CopyFormat) -> Callable[..., tuple[int, int]]:
    """The order over a block, compiled: p, m and v change in place; counts as of VectorLane.step."""
    overflow, makes_copy, fp16 = OVERFLOW[copy], copy is not CopyFormat.NONE, copy is CopyFormat.FP16
    zero, none = np.float32(0), INT(0)

    def run(g: Any, p: Any, m: Any, v: Any, out: Any, scalars: Any) -> Any:
        nonfinite = overflows = none
        for i in range(g.size):
            new_p, new_m, new_v = order(g[i], p[i], m[i] if has_m else zero, v[i] if has_v else zero, scalars)
            new_p = number(NAN) if new_p != new_p else new_p
            p[i] = new_p
            if has_m:
                m[i] = number(NAN) if new_m != new_m else new_m
            if has_v:
                v[i] = number(NAN) if new_v != new_v else new_v
            nonfinite = INT(nonfinite + INT(INT(pattern(g[i]) & MAGNITUDE) >= INFINITY))
            if makes_copy:
                out[i] = fp16_pattern(new_p) if fp16 else bf16_pattern(new_p)
                magnitude = INT(pattern(new_p) & MAGNITUDE)
                overflows = INT(overflows + INT((magnitude >= overflow) & (magnitude < INFINITY)))
        return nonfinite, overflows

    return compiled(run)
