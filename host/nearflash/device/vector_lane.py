"""Adam on the host's vector units: equal to the gateware to the bit, several times the speed of the model.

numpy has no fused multiply-add. The product of two fp32 numbers is exact in a double; adding the third and rounding to
fp32 rounds twice, which can differ from rounding once only where the double lies half-way between two fp32 numbers, or
where the result is subnormal. Those elements, few in real data, are found by their bits and done again through a double
rounded to odd, which is right always.

Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd"
(2008).
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.commands import CopyFormat
from nearflash.abi.formats import FP16, FP32
from nearflash.abi.rules import AdamStep, Profile

__all__ = ["BLOCK_PARAMS", "VectorLane"]

BLOCK_PARAMS = 8192
"""Parameters a call: the scratch (350 KiB) stays in a second-level cache."""

F32: TypeAlias = NDArray[np.float32]
Factor: TypeAlias = F32 | np.float32

SMALLEST_NORMAL = 2.0**-126
CUT_SHIFT, HALF_WAY = 64 - 29, np.iinfo(np.int64).min
"""A double's low 29 bits, moved to the top: what rounding to a normal fp32 number cuts off, and its half-way case."""
NAN = np.uint32(FP32.canonical_nan).view(np.float32)


class VectorLane:
    """The lane of one thread: scratch for a block, and one step's scalars."""

    def __init__(self, adam: AdamStep, copy: CopyFormat) -> None:
        self._adam = adam
        self._copy = copy.number_format
        self._order = {Profile.IEEE: self._ieee, Profile.TORCH_FUSED: self._torch, Profile.DEEPSPEED: self._deepspeed}
        self._scratch = np.empty((7, BLOCK_PARAMS), np.float32)
        self._exact = np.empty(BLOCK_PARAMS, np.float64)
        self._cut = np.empty(BLOCK_PARAMS, np.int64)
        self._beta1, self._beta2 = np.float32(adam.beta1), np.float32(adam.beta2)
        self._gain1, self._gain2 = np.float32(adam.one_minus_beta1), np.float32(adam.one_minus_beta2)
        self._decay, self._eps = np.float32(adam.decay), np.float32(adam.eps)
        self._step_size, self._root = np.float32(adam.step_size), np.float32(adam.bias_correction2_sqrt)
        self._inverse_root = np.float32(adam.inverse_bias_correction2_sqrt)

    def step(self, inputs: list[F32], outputs: list[NDArray[Any]]) -> tuple[int, int]:
        """Update a block of n <= BLOCK_PARAMS parameters; an output may be the same array as an input.

        inputs: g, p, m, v, fp32, (n,). outputs: p, m, v, fp32, (n,), and the copy's bits, uint16, (n,), when there is
        one. Returns the numbers of non-finite gradients and of finite parameters whose copy is infinite.
        """
        g, p, m, v = inputs
        decayed_g, decayed_p, *results, t, u = self._scratch[:, : g.size]
        overflows = 0
        with np.errstate(all="ignore"):
            g, p = self._decayed(g, p, decayed_g, decayed_p)
            self._order[self._adam.profile](g, p, m, v, results, t, u)
            if np.isnan(results[0]).any():  # a NaN in m or v always reaches p
                for x in results:
                    x[np.isnan(x)] = NAN
            nonfinite = int(np.count_nonzero(~np.isfinite(inputs[0])))
            if self._copy:
                overflows = self._low_precision(results[0], outputs[3])
        for output, result in zip(outputs, results, strict=False):
            output[:] = result
        return nonfinite, overflows

    def _decayed(self, g: F32, p: F32, new_g: F32, new_p: F32) -> tuple[F32, F32]:
        ieee, deepspeed = self._adam.profile is Profile.IEEE, self._adam.profile is Profile.DEEPSPEED
        if not self._adam.weight_decay:
            return g, p
        if self._adam.decoupled:
            return g, self.fma(p, self._decay, p, new_p) if deepspeed else np.multiply(p, self._decay, out=new_p)
        if ieee:
            np.multiply(p, self._decay, out=new_g)
            return np.add(g, new_g, out=new_g), p
        return self.fma(p, self._decay, g, new_g), p

    def _ieee(self, g: F32, p: F32, m: F32, v: F32, results: list[F32], t: F32, u: F32) -> None:
        new_p, new_m, new_v = results
        np.multiply(m, self._beta1, out=t)
        np.multiply(g, self._gain1, out=u)
        np.add(t, u, out=new_m)
        np.multiply(v, self._beta2, out=t)
        np.multiply(g, self._gain2, out=u)
        np.multiply(u, g, out=u)
        np.add(t, u, out=new_v)
        self._denominator(new_v, t)
        np.divide(new_m, t, out=t)
        np.multiply(t, self._step_size, out=t)
        np.subtract(p, t, out=new_p)

    def _torch(self, g: F32, p: F32, m: F32, v: F32, results: list[F32], t: F32, u: F32) -> None:
        new_p, new_m, new_v = results
        np.subtract(g, m, out=t)
        self.fma(t, self._gain1, m, new_m)
        np.multiply(g, self._gain2, out=t)
        np.multiply(v, self._beta2, out=u)
        self.fma(t, g, u, new_v)
        self._denominator(new_v, t)
        np.multiply(new_m, self._step_size, out=u)
        np.divide(u, t, out=u)
        np.subtract(p, u, out=new_p)

    def _deepspeed(self, g: F32, p: F32, m: F32, v: F32, results: list[F32], t: F32, u: F32) -> None:
        new_p, new_m, new_v = results
        np.multiply(m, self._beta1, out=t)
        self.fma(g, self._gain1, t, new_m)
        np.multiply(g, g, out=t)
        np.multiply(v, self._beta2, out=u)
        self.fma(t, self._gain2, u, new_v)
        np.sqrt(new_v, out=t)
        self.fma(t, self._inverse_root, self._eps, u)
        np.divide(new_m, u, out=t)
        self.fma(t, -self._step_size, p, new_p)

    def _denominator(self, v: F32, out: F32) -> None:
        np.sqrt(v, out=out)
        np.divide(out, self._root, out=out)
        np.add(out, self._eps, out=out)

    def fma(self, a: F32, b: Factor, c: Factor, out: F32) -> F32:
        """a·b + c rounded once, into `out`, which is none of the operands; (n,), b and c may be scalars."""
        exact, cut = self._exact[: out.size], self._cut[: out.size]
        np.multiply(a, b, out=exact, dtype=np.float64)
        np.add(exact, c, out=exact)
        np.copyto(out, exact, casting="same_kind")
        np.left_shift(exact.view(np.int64), CUT_SHIFT, out=cut)
        # NaN makes the minimum NaN: then every element is looked at.
        if cut.min() == HALF_WAY or not np.abs(out).min() > SMALLEST_NORMAL:
            again = np.flatnonzero((cut == HALF_WAY) | ((np.abs(exact) < SMALLEST_NORMAL) & (exact != 0)))
            out[again] = _fma_to_odd(*(np.broadcast_to(x, out.shape)[again] for x in (a, b, c)))
        return out

    def _low_precision(self, p: F32, out: NDArray[np.uint16]) -> int:
        # The canonical fp32 NaN becomes the canonical one of the copy by itself.
        assert self._copy is not None
        if self._copy is FP16:
            out.view(np.float16)[:] = p
        else:
            word = p.view(np.uint32)
            odd = (word >> 16) & np.uint32(1)
            out[:] = (word + odd + np.uint32(0x7FFF)) >> 16
        infinity = ((1 << self._copy.exponent_bits) - 1) << self._copy.mantissa_bits
        return int(np.count_nonzero((out & 0x7FFF == infinity) & np.isfinite(p)))


def _fma_to_odd(a: F32, b: F32, c: F32) -> F32:
    """rn(a·b + c) of finite operands, through the exact error of the double sum."""
    product, addend = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    up = np.where((error > 0) == (total > 0), 1, -1)
    odd: NDArray[np.int64] = np.where((error != 0) & (bits & 1 == 0), bits + up, bits)
    return odd.view(np.float64).astype(np.float32)
