"""An update on vectors of the host: state in any format in, one step of a rule, state and copy out.

One pass of a compiled loop does a block: a parameter is read, updated, written and rounded to its copy while it is in
the processor. Equal to nearflash.model.update to the bit.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import OptimizerStep, StateFormat
from nearflash.abi.optimizers.state import BLOCK_PARAMS, TILE_PARAMS
from nearflash.device.backends.host.vector.compiled import bf16_pattern, compiled, fp16_pattern, number, pattern
from nearflash.device.backends.host.vector.orders import operation_order
from nearflash.device.backends.host.vector.state import NO_SCALES, decoder, dithers, encoder, tile_keys

__all__ = ["Arrays", "VectorLane"]

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

INT = np.int32
NAN, INFINITY, MAGNITUDE = INT(FP32.canonical_nan), INT(0x7F800000), INT(0x7FFFFFFF)
OVERFLOW = {CopyFormat.NONE: INFINITY, CopyFormat.FP16: INT(0x477FF000), CopyFormat.BF16: INT(0x7F7F8000)}
"""Pattern of the smallest magnitude that rounds to infinity."""
NO_STATE, NO_COPY, NO_KEYS = np.empty(0, np.float32), np.empty(0, np.uint16), np.empty(0, INT)
"""What a rule has no part for."""


class VectorLane:
    """The lane of one step's scalars, for any thread."""

    BLOCK_PARAMS = 1 << 18
    """Most parameters a call: shorter calls spend their time in Python (2^16: a third), longer ones never stop."""

    def __init__(self, rule: OptimizerStep, copy: CopyFormat) -> None:
        self._roles, self._step = tuple(rule.torch_names), rule.step
        self._format = rule.state_format
        function, self._scalars = operation_order(rule)
        self._loop = _loop(function, "m" in self._roles, "v" in self._roles, copy)
        if self._format is not StateFormat.FP32:
            self._loop = _narrow_loop(self._loop, self._roles, self._format)

    def step(self, inputs: Arrays, outputs: Arrays, first_param: int = 0) -> tuple[int, int]:
        """Update a block of n parameters of the flat vector, from its `first_param` on.

        inputs: g and p, fp32, (n,), and the rule's arrays in its state format. outputs: p, the arrays, and `copy`,
        uint16, (n,), where there is one; an output may be the same array as an input. Returns the numbers of non-finite
        gradients and of finite parameters whose copy is infinite.
        """
        inputs = _apart(inputs, outputs)
        g, copy = inputs["g"], outputs.get("copy", NO_COPY)
        changed = {name: _brought(inputs[name], out) for name, out in outputs.items() if name != "copy"}
        p, m, v = changed["p"], changed.get("m", NO_STATE), changed.get("v", NO_STATE)
        with np.errstate(all="ignore"):
            if self._format is StateFormat.FP32:
                return self._loop(g, p, m, v, copy, self._scalars)
            scales = (changed.get(f"{role}_scale", NO_SCALES) for role in ("m", "v"))
            keys = (
                tile_keys(self._step, role, first_param, g.size) if role in self._roles else NO_KEYS
                for role in ("m", "v")
            )
            place = first_param % TILE_PARAMS
            return self._loop(g, p, m, v, copy, self._scalars, *scales, dithers(), place, *keys)


def _apart(inputs: Arrays, outputs: Arrays) -> Arrays:
    """Inputs that no output of another name writes over."""
    shared = any(
        np.may_share_memory(out, array)
        for name, out in outputs.items()
        for key, array in inputs.items()
        if key != name
    )  # fmt: skip
    return {name: array.copy() for name, array in inputs.items()} if shared else inputs


def _brought(values: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
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


@cache
def _narrow_loop(loop: Callable[..., Any], roles: tuple[str, ...], state_format: StateFormat) -> Callable[..., Any]:
    """The loop over a block whose m and v are narrow: tile by tile, in fp32 numbers that do not leave the cache."""
    has_m, has_v = "m" in roles, "v" in roles
    decode_m, decode_v = decoder("m", state_format), decoder("v", state_format)
    encode_m, encode_v = encoder("m", state_format), encoder("v", state_format)
    scaled = state_format is StateFormat.MX8

    def run(
        g: Any, p: Any, m: Any, v: Any, copy: Any, scalars: Any,
        m_scale: Any, v_scale: Any, dithers: Any, place: Any, m_keys: Any, v_keys: Any,
    ) -> Any:  # fmt: skip
        wide_m, wide_v = np.empty(TILE_PARAMS, np.float32), np.empty(TILE_PARAMS, np.float32)
        nonfinite = overflows = INT(0)
        start = tile = 0
        while start < g.size:
            stop = min(start + TILE_PARAMS - place, g.size)
            blocks = slice(start // BLOCK_PARAMS, stop // BLOCK_PARAMS if scaled else 0)
            one_m, one_v, part = wide_m[: stop - start], wide_v[: stop - start], dithers[place : place + stop - start]
            if has_m:
                decode_m(m[start:stop], m_scale[blocks], one_m)
            if has_v:
                decode_v(v[start:stop], v_scale[blocks], one_v)
            counts = loop(g[start:stop], p[start:stop], one_m, one_v, copy[start:stop], scalars)
            nonfinite, overflows = INT(nonfinite + counts[0]), INT(overflows + counts[1])
            if has_m:
                encode_m(one_m, part, m_keys[tile], m[start:stop], m_scale[blocks])
            if has_v:
                encode_v(one_v, part, v_keys[tile], v[start:stop], v_scale[blocks])
            start, place, tile = stop, 0, tile + 1
        return nonfinite, overflows

    return compiled(run)
