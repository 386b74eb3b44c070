"""The operation orders of docs/numerics.md as numpy calls on blocks, without temporaries.

An order takes g, p and the rule's state, and writes the new p and state to `results`, which are none of the inputs;
`spare` are three more blocks.
"""

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any, TypeAlias

import numpy as np

from nearflash.abi.rules import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.device.vector.fma import F32, Fma

__all__ = ["Order", "order_of"]

Blocks: TypeAlias = Sequence[F32]
Order: TypeAlias = Callable[[F32, F32, Blocks, Blocks, Blocks], None]


@singledispatch
def order_of(rule: Any, fma: Fma) -> Order:
    """The operations of a rule: (g, p, state, results, spare) -> None."""
    raise TypeError(f"rule must be one of nearflash.abi.rules, not {rule!r}")


@order_of.register
def _adam(adam: AdamStep, fma: Fma) -> Order:
    orders = {Profile.IEEE: _AdamIeee, Profile.TORCH_FUSED: _AdamTorch, Profile.DEEPSPEED: _AdamDeepSpeed}
    return orders[adam.profile](adam, fma)


@order_of.register
def _sgd(sgd: SgdStep, fma: Fma) -> Order:
    return _Sgd(sgd, fma)


@order_of.register
def _adagrad(adagrad: AdagradStep, fma: Fma) -> Order:
    return _Adagrad(adagrad, fma)


@order_of.register
def _lion(lion: LionStep, fma: Fma) -> Order:
    return _Lion(lion, fma)


class _Decay:
    """L2 decay: g + wd·p, fused or not."""

    def __init__(self, rule: AdamStep | SgdStep | AdagradStep, fma: Fma) -> None:
        self._active, self._fused = bool(rule.weight_decay), rule.profile is not Profile.IEEE
        self._decay, self._fma = np.float32(rule.decay), fma

    def __call__(self, g: F32, p: F32, out: F32) -> F32:
        """The gradient with decay, in `out`, or `g` where there is none."""
        if not self._active:
            return g
        if self._fused:
            return self._fma(p, self._decay, g, out)
        np.multiply(p, self._decay, out=out)
        return np.add(g, out, out=out)


class _Adam:
    def __init__(self, adam: AdamStep, fma: Fma) -> None:
        self._adam, self._fma, self._l2 = adam, fma, _Decay(adam, fma)
        self._beta1, self._beta2 = np.float32(adam.beta1), np.float32(adam.beta2)
        self._gain1, self._gain2 = np.float32(adam.one_minus_beta1), np.float32(adam.one_minus_beta2)
        self._decay, self._eps = np.float32(adam.decay), np.float32(adam.eps)
        self._step_size, self._root = np.float32(adam.step_size), np.float32(adam.bias_correction2_sqrt)
        self._inverse_root = np.float32(adam.inverse_bias_correction2_sqrt)

    def __call__(self, g: F32, p: F32, state: Blocks, results: Blocks, spare: Blocks) -> None:
        decayed, t, u = spare
        if not self._adam.decoupled:
            g = self._l2(g, p, decayed)
        elif self._adam.weight_decay:
            p = self._decayed(p, decayed)
        self._step(g, p, state, results, t, u)

    def _decayed(self, p: F32, out: F32) -> F32:
        return np.multiply(p, self._decay, out=out)

    def _step(self, g: F32, p: F32, state: Blocks, results: Blocks, t: F32, u: F32) -> None:
        raise NotImplementedError

    def _denominator(self, v: F32, out: F32) -> None:
        np.sqrt(v, out=out)
        np.divide(out, self._root, out=out)
        np.add(out, self._eps, out=out)


class _AdamIeee(_Adam):
    def _step(self, g: F32, p: F32, state: Blocks, results: Blocks, t: F32, u: F32) -> None:
        (m, v), (new_p, new_m, new_v) = state, results
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


class _AdamTorch(_Adam):
    def _step(self, g: F32, p: F32, state: Blocks, results: Blocks, t: F32, u: F32) -> None:
        (m, v), (new_p, new_m, new_v) = state, results
        np.subtract(g, m, out=t)
        self._fma(t, self._gain1, m, new_m)
        np.multiply(g, self._gain2, out=t)
        np.multiply(v, self._beta2, out=u)
        self._fma(t, g, u, new_v)
        self._denominator(new_v, t)
        np.multiply(new_m, self._step_size, out=u)
        np.divide(u, t, out=u)
        np.subtract(p, u, out=new_p)


class _AdamDeepSpeed(_Adam):
    def _decayed(self, p: F32, out: F32) -> F32:
        return self._fma(p, self._decay, p, out)

    def _step(self, g: F32, p: F32, state: Blocks, results: Blocks, t: F32, u: F32) -> None:
        (m, v), (new_p, new_m, new_v) = state, results
        np.multiply(m, self._beta1, out=t)
        self._fma(g, self._gain1, t, new_m)
        np.multiply(g, g, out=t)
        np.multiply(v, self._beta2, out=u)
        self._fma(t, self._gain2, u, new_v)
        np.sqrt(new_v, out=t)
        self._fma(t, self._inverse_root, self._eps, u)
        np.divide(new_m, u, out=t)
        self._fma(t, -self._step_size, p, new_p)


class _Sgd:
    def __init__(self, sgd: SgdStep, fma: Fma) -> None:
        self._fma, self._l2, self._nesterov = fma, _Decay(sgd, fma), sgd.nesterov
        self._fused = sgd.profile is Profile.TORCH_FUSED
        self._lr, self._momentum = np.float32(sgd.lr), np.float32(sgd.momentum)
        self._retained, self._gain = np.float32(sgd.retained), np.float32(sgd.gain)

    def __call__(self, g: F32, p: F32, state: Blocks, results: Blocks, spare: Blocks) -> None:
        decayed, t, u = spare
        g = direction = self._l2(g, p, decayed)
        if state:
            direction = new_m = results[1]
            np.multiply(state[0], self._retained, out=t)
            self._add_product(t, g, self._gain, new_m, u)
            if self._nesterov:
                direction = self._add_product(g, new_m, self._momentum, t, u)
        if self._fused:
            self._fma(direction, -self._lr, p, results[0])
        else:
            np.multiply(direction, self._lr, out=u)
            np.subtract(p, u, out=results[0])

    def _add_product(self, addend: F32, x: F32, factor: np.float32, out: F32, spare: F32) -> F32:
        if self._fused:
            return self._fma(x, factor, addend, out)
        np.multiply(x, factor, out=spare)
        return np.add(addend, spare, out=out)


class _Adagrad:
    def __init__(self, adagrad: AdagradStep, fma: Fma) -> None:
        self._fma, self._l2 = fma, _Decay(adagrad, fma)
        self._fused = adagrad.profile is Profile.TORCH_FUSED
        self._step_size, self._eps = np.float32(adagrad.step_size), np.float32(adagrad.eps)

    def __call__(self, g: F32, p: F32, state: Blocks, results: Blocks, spare: Blocks) -> None:
        (v,), (new_p, new_v), (decayed, t, u) = state, results, spare
        g = self._l2(g, p, decayed)
        if self._fused:
            self._fma(g, g, v, new_v)
        else:
            np.multiply(g, g, out=t)
            np.add(v, t, out=new_v)
        np.sqrt(new_v, out=t)
        np.add(t, self._eps, out=t)
        if self._fused:
            np.multiply(g, self._step_size, out=u)
            np.divide(u, t, out=u)
        else:
            np.divide(g, t, out=u)
            np.multiply(u, self._step_size, out=u)
        np.subtract(p, u, out=new_p)


SIGN = np.uint32(1 << 31)


class _Lion:
    def __init__(self, lion: LionStep, fma: Fma) -> None:
        self._decays, self._decay, self._lr = bool(lion.weight_decay), np.float32(lion.decay), np.float32(lion.lr)
        self._beta1, self._gain1 = np.float32(lion.beta1), np.float32(lion.one_minus_beta1)
        self._beta2, self._gain2 = np.float32(lion.beta2), np.float32(lion.one_minus_beta2)

    def __call__(self, g: F32, p: F32, state: Blocks, results: Blocks, spare: Blocks) -> None:
        (m,), (new_p, new_m), (decayed, t, u) = state, results, spare
        if self._decays:
            p = np.multiply(p, self._decay, out=decayed)
        np.multiply(m, self._beta1, out=t)
        np.multiply(g, self._gain1, out=u)
        np.add(t, u, out=t)
        np.subtract(p, self._signed(t, u), out=new_p)
        np.multiply(m, self._beta2, out=t)
        np.multiply(g, self._gain2, out=u)
        np.add(t, u, out=new_m)

    def _signed(self, direction: F32, spare: F32) -> F32:
        """lr times the sign, over `direction`; the rate with the sign's bit where there is neither a zero nor a NaN."""
        if np.abs(direction, out=spare).min() > 0:
            word = direction.view(np.uint32)
            np.bitwise_and(word, SIGN, out=word)
            np.bitwise_or(word, self._lr.view(np.uint32), out=word)
            return direction
        np.sign(direction, out=direction)
        return np.multiply(direction, self._lr, out=direction)
