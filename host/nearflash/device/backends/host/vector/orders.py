"""The operation orders of docs/contracts/numerics.md, for one parameter.

The loops of nearflash.device.backends.host.vector.lane compile these functions.

An order is called with g, p, m, v and a tuple of scalars, all fp32, and returns the new p, m and v; what a rule has no
part for comes and goes as zero. Flags that do not change within a run are settled when it is compiled.
"""

from collections.abc import Callable
from functools import cache, singledispatch
from typing import Any, NamedTuple

import numpy as np

from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.device.backends.host.vector.compiled import compiled, fma

__all__ = ["Order", "operation_order"]

ZERO = np.float32(0)


class Order(NamedTuple):
    """A compiled function, the same one for all steps of a kind, and the scalars of one step."""

    function: Callable[..., Any]
    scalars: tuple[np.float32, ...]


@singledispatch
def operation_order(rule: Any) -> Order:
    """The operations of a rule."""
    raise TypeError(f"rule must be one of nearflash.abi.optimizers, not {rule!r}")


@operation_order.register
def _(adam: AdamStep) -> Order:
    make = {Profile.IEEE: _adam_ieee, Profile.TORCH_FUSED: _adam_torch, Profile.DEEPSPEED: _adam_deepspeed}
    root = adam.inverse_bias_correction2_sqrt if adam.profile is Profile.DEEPSPEED else adam.bias_correction2_sqrt
    scalars = (
        adam.beta1, adam.one_minus_beta1, adam.beta2, adam.one_minus_beta2, root, adam.eps, adam.step_size, adam.decay
    )  # fmt: skip
    return Order(make[adam.profile](adam.decoupled, bool(adam.weight_decay)), _fp32(scalars))


@operation_order.register
def _(sgd: SgdStep) -> Order:
    function = _sgd(sgd.profile, bool(sgd.momentum), sgd.nesterov, bool(sgd.weight_decay))
    return Order(function, _fp32((sgd.lr, sgd.momentum, sgd.retained, sgd.gain, sgd.decay)))


@operation_order.register
def _(adagrad: AdagradStep) -> Order:
    function = _adagrad(adagrad.profile, bool(adagrad.weight_decay))
    return Order(function, _fp32((adagrad.step_size, adagrad.eps, adagrad.decay)))


@operation_order.register
def _(lion: LionStep) -> Order:
    scalars = lion.lr, lion.beta1, lion.one_minus_beta1, lion.beta2, lion.one_minus_beta2, lion.decay
    return Order(_lion(bool(lion.weight_decay)), _fp32(scalars))


def _fp32(scalars: tuple[float, ...]) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, scalars))


@cache
def _decay(profile: Profile, decays: bool, decoupled: bool = False) -> Callable[..., Any]:
    """Weight decay: the gradient with it, or the parameter after it where it is decoupled."""
    fused, deepspeed = profile is not Profile.IEEE, profile is Profile.DEEPSPEED

    def decayed(g: Any, p: Any, decay: Any) -> Any:
        if not decays:
            return g, p
        if decoupled:
            return g, fma(p, decay, p) if deepspeed else p * decay
        return fma(p, decay, g) if fused else g + p * decay, p

    return compiled(decayed)


@cache
def _adam_ieee(decoupled: bool, decays: bool) -> Callable[..., Any]:
    decayed = _decay(Profile.IEEE, decays, decoupled)

    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        beta1, gain1, beta2, gain2, root, eps, step_size, decay = scalars
        g, p = decayed(g, p, decay)
        m = m * beta1 + g * gain1
        v = v * beta2 + (g * gain2) * g
        return p - (m / (np.sqrt(v) / root + eps)) * step_size, m, v

    return compiled(order)


@cache
def _adam_torch(decoupled: bool, decays: bool) -> Callable[..., Any]:
    decayed = _decay(Profile.TORCH_FUSED, decays, decoupled)

    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        _, gain1, beta2, gain2, root, eps, step_size, decay = scalars
        g, p = decayed(g, p, decay)
        m = fma(g - m, gain1, m)
        v = fma(g * gain2, g, v * beta2)
        return p - (m * step_size) / (np.sqrt(v) / root + eps), m, v

    return compiled(order)


@cache
def _adam_deepspeed(decoupled: bool, decays: bool) -> Callable[..., Any]:
    decayed = _decay(Profile.DEEPSPEED, decays, decoupled)

    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        beta1, gain1, beta2, gain2, inverse_root, eps, step_size, decay = scalars
        g, p = decayed(g, p, decay)
        m = fma(g, gain1, m * beta1)
        v = fma(g * g, gain2, v * beta2)
        return fma(m / fma(np.sqrt(v), inverse_root, eps), -step_size, p), m, v

    return compiled(order)


@cache
def _sgd(profile: Profile, momentum: bool, nesterov: bool, decays: bool) -> Callable[..., Any]:
    fused, decayed = profile is not Profile.IEEE, _decay(profile, decays)

    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        lr, factor, retained, gain, decay = scalars
        g, p = decayed(g, p, decay)
        direction = g
        if momentum:
            m = fma(g, gain, m * retained) if fused else m * retained + g * gain
            direction = m
            if nesterov:
                direction = fma(m, factor, g) if fused else g + m * factor
        return fma(direction, -lr, p) if fused else p - direction * lr, m, v

    return compiled(order)


@cache
def _adagrad(profile: Profile, decays: bool) -> Callable[..., Any]:
    fused, decayed = profile is not Profile.IEEE, _decay(profile, decays)

    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        step_size, eps, decay = scalars
        g, p = decayed(g, p, decay)
        v = fma(g, g, v) if fused else v + g * g
        root = np.sqrt(v) + eps
        return p - ((g * step_size) / root if fused else (g / root) * step_size), m, v

    return compiled(order)


@cache
def _lion(decays: bool) -> Callable[..., Any]:
    def order(g: Any, p: Any, m: Any, v: Any, scalars: Any) -> Any:
        lr, beta1, gain1, beta2, gain2, decay = scalars
        if decays:
            p = p * decay
        direction = m * beta1 + g * gain1
        if direction > ZERO:
            move = lr
        elif direction < ZERO:
            move = -lr
        else:  # a zero changes nothing, a NaN stays one
            move = ZERO if direction == ZERO else direction
        return p - move, m * beta2 + g * gain2, v

    return compiled(order)
