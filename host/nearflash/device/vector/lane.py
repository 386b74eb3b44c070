"""An update on vectors of the host: state in any format in, one step of a rule, state and copy out.

Equal to nearflash.model.update to the bit. A lane belongs to one thread: it has the scratch for a block.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.formats import FP16, FP32, NumberFormat
from nearflash.abi.rules import LionStep, OptimizerStep, StateFormat
from nearflash.device.bf16 import bf16_patterns
from nearflash.device.vector.fma import F32, Fma
from nearflash.device.vector.orders import order_of
from nearflash.device.vector.state import VectorState

__all__ = ["NAN", "Arrays", "VectorLane", "low_precision", "nonfinite_count"]

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

NAN = np.uint32(FP32.canonical_nan).view(np.float32)


class VectorLane:
    """The lane of one thread: scratch for a block, and one step's scalars."""

    BLOCK_PARAMS = 1 << 16
    """Most parameters a call: shorter calls spend their time in Python, longer ones in memory."""
    THREADS = 1
    """Threads hand the interpreter's lock to and fro: two on two cores were no faster than one."""

    def __init__(self, rule: OptimizerStep, copy: CopyFormat) -> None:
        self._roles = tuple(rule.torch_names)
        self._scales = rule.state_format is StateFormat.MX8
        self._copy = copy.number_format
        self._order = order_of(rule, Fma(self.BLOCK_PARAMS))
        self._states = {
            role: VectorState(role, rule.state_format, rule.step, self.BLOCK_PARAMS) for role in self._roles
        }
        # A NaN in the state reaches p, but Lion's p sees another sum than its m.
        self._hides_nan = isinstance(rule, LionStep)
        self._scratch = np.empty((8, self.BLOCK_PARAMS), np.float32)

    @staticmethod
    def claim_thread() -> None:
        """Before the first lane of a thread is used; nothing to be done for this kind."""

    def step(self, inputs: Arrays, outputs: Arrays, first_param: int = 0) -> tuple[int, int]:
        """Update a block of n parameters of the flat vector, from its `first_param` on.

        inputs: g and p, fp32, (n,), and the rule's arrays in its state format. outputs: p, the arrays, and `copy`,
        uint16, (n,), where there is one; an output may be the same array as an input. Returns the numbers of non-finite
        gradients and of finite parameters whose copy is infinite.
        """
        g, p = inputs["g"], inputs["p"]
        *rows, decoded_m, decoded_v = self._scratch[:, : g.size]
        spare, results = rows[:3], rows[3 : 4 + len(self._roles)]
        overflows = 0
        with np.errstate(all="ignore"):
            state = [
                self._states[role].decode(self._stored(role, inputs), out)
                for role, out in zip(self._roles, (decoded_m, decoded_v), strict=False)
            ]
            self._order(g, p, state, results, spare)
            if any(np.isnan(result.min()) for result in results[: 2 if self._hides_nan else 1]):
                for result in results:
                    result[np.isnan(result)] = NAN
            nonfinite = nonfinite_count(g)
            if self._copy:
                overflows = low_precision(results[0], self._copy, outputs["copy"])
            for role, result in zip(self._roles, results[1:], strict=True):
                self._states[role].encode(result, first_param, self._stored(role, outputs))
        outputs["p"][:] = results[0]
        return nonfinite, overflows

    def _stored(self, role: str, arrays: Arrays) -> list[NDArray[Any]]:
        return [arrays[role], arrays[f"{role}_scale"]] if self._scales else [arrays[role]]


def nonfinite_count(g: F32) -> int:
    """Infinities and NaN of a vector, (n,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return 0 if np.isfinite(np.dot(g, g)) else int(np.count_nonzero(~np.isfinite(g)))


def low_precision(p: F32, number_format: NumberFormat, out: NDArray[np.uint16]) -> int:
    """Write the bits of p's copy, (n,); returns how many finite elements became infinite."""
    # The canonical fp32 NaN becomes the canonical one of the copy by itself.
    if number_format is FP16:
        out.view(np.float16)[:] = p
    else:
        out[:] = bf16_patterns(p)
    infinity = ((1 << number_format.exponent_bits) - 1) << number_format.mantissa_bits
    if (out & np.uint16(0x7FFF)).max() < infinity:
        return 0
    return int(np.count_nonzero((out & 0x7FFF == infinity) & np.isfinite(p)))
