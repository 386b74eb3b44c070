"""The update kernel's program: what a rule makes of the lane, as values of registers.

The lane (gateware.update.lane) has a fixed datapath; `program` says which operand goes where and which sums round once.
"""

from enum import IntEnum
from functools import singledispatch

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_bits
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, OptimizerStep, Profile, SgdStep
from nearflash.abi.registers import FACTOR_BITS, UPDATE

__all__ = ["DecayMode", "Direction", "denominator_factor", "program_registers"]


class DecayMode(IntEnum):
    """Result of the decay operation (field `decay_mode`)."""

    SCALE = 0
    SELF = 1
    GRADIENT = 2


class Direction(IntEnum):
    """Along what the parameters move (field `direction`)."""

    RATIO = 0
    MOMENT = 1
    LOOKAHEAD = 2
    SIGN = 3


@singledispatch
def program_registers(rule: OptimizerStep) -> dict[str, int]:
    """Values of the registers that a rule sets: `program` without the copy, the scalars, `denominator_factor`."""
    raise CommandError(f"rule must be one that the lane has a program for, not {rule!r}")


@program_registers.register
def _adam(adam: AdamStep) -> dict[str, int]:
    torch, deepspeed = adam.profile is Profile.TORCH_FUSED, adam.profile is Profile.DEEPSPEED
    fused = adam.profile is not Profile.IEEE
    mode = DecayMode.SCALE
    if adam.weight_decay and not adam.decoupled:
        mode = DecayMode.GRADIENT
    elif adam.weight_decay and deepspeed:
        mode = DecayMode.SELF
    return _registers(
        adam,
        program=dict(decay_mode=mode, decay_fused=fused, m_difference=torch, m_fused=fused, v_square_first=deepspeed,
                     v_fused=fused, denominator_fused=deepspeed, p_fused=deepspeed),
        scalars=dict(decay=adam.decay if adam.weight_decay else 1.0, m_decay=1.0 if torch else adam.beta1,
                     m_gain=adam.one_minus_beta1, v_decay=adam.beta2, v_gain=adam.one_minus_beta2, eps=adam.eps,
                     pre_scale=adam.step_size if torch else 1.0, post_scale=-1.0 if torch else -adam.step_size),
        factor=denominator_factor(adam),
    )  # fmt: skip


@program_registers.register
def _sgd(sgd: SgdStep) -> dict[str, int]:
    fused = sgd.profile is Profile.TORCH_FUSED
    direction = Direction.LOOKAHEAD if sgd.nesterov else Direction.MOMENT
    retained, gain = (sgd.retained, sgd.gain) if sgd.momentum else (-0.0, 1.0)
    return _registers(
        sgd,
        program=dict(direction=direction, m_fused=fused, denominator_fused=fused, p_fused=fused) | _l2_decay(sgd),
        scalars=dict(decay=sgd.decay or 1.0, m_decay=retained, m_gain=gain, post_scale=-sgd.lr),
        factor=_exact_factor(sgd.momentum or 1.0),
    )


@program_registers.register
def _adagrad(adagrad: AdagradStep) -> dict[str, int]:
    fused = adagrad.profile is Profile.TORCH_FUSED
    return _registers(
        adagrad,
        program=dict(v_fused=fused) | _l2_decay(adagrad),
        scalars=dict(decay=adagrad.decay or 1.0, m_decay=-0.0, m_gain=1.0, v_decay=1.0, v_gain=1.0, eps=adagrad.eps,
                     pre_scale=adagrad.step_size if fused else 1.0, post_scale=-1.0 if fused else -adagrad.step_size),
        factor=_exact_factor(1.0),
    )  # fmt: skip


@program_registers.register
def _lion(lion: LionStep) -> dict[str, int]:
    return _registers(
        lion,
        program=dict(direction=Direction.SIGN, v_square_first=True),
        scalars=dict(decay=lion.decay if lion.weight_decay else 1.0, m_decay=lion.beta2, m_gain=lion.one_minus_beta2,
                     v_decay=lion.beta1, v_gain=lion.one_minus_beta1, post_scale=-lion.lr),
        factor=_exact_factor(1.0),
    )  # fmt: skip


def _l2_decay(rule: SgdStep | AdagradStep) -> dict[str, int]:
    mode = DecayMode.GRADIENT if rule.weight_decay else DecayMode.SCALE
    return {"decay_mode": mode, "decay_fused": rule.profile is not Profile.IEEE}


_DEFAULTS = {"decay": 1.0, "m_decay": -0.0, "m_gain": 1.0, "v_decay": 0.0, "v_gain": 0.0, "eps": 0.0, "pre_scale": 1.0}


def _registers(rule: OptimizerStep, program: dict[str, int], scalars: dict[str, float], factor: int) -> dict[str, int]:
    """A new m is the gradient itself unless said otherwise: -0 times an absent m, which is zero, adds nothing."""
    absent = {f"{role}_absent": role not in rule.torch_names for role in ("m", "v")}
    fields = dict.fromkeys((field.name for field in UPDATE["program"].fields), 0)
    return {
        "program": UPDATE["program"].pack(fields | absent | program),
        **{name: fp32_bits(value) for name, value in (_DEFAULTS | scalars).items()},
        "denominator_factor": factor,
    }


def _exact_factor(value: float) -> int:
    """Register `denominator_factor` of an fp32 number."""
    bits = fp32_bits(value)
    significand = (bits & 0x7FFFFF | 0x800000) << FACTOR_BITS - 24
    return UPDATE["denominator_factor"].pack({"significand": significand, "exponent": (bits >> 23) - 127 & 0x3FF})


def denominator_factor(adam: AdamStep) -> int:
    """Register `denominator_factor`: what multiplies sqrt(v).

    Profile deepspeed: the fp32 scalar 1/sqrt(1 - beta2^t), exact. Others: the reciprocal of the fp32 scalar
    s = sqrt(1 - beta2^t), cut (not rounded) to 51 bits: times a 24-bit significand and rounded to nearest that equals
    the division by s, since a quotient of two 24-bit significands is at least 2^-49 (relative) off any rounding
    boundary.
    """
    inverse = adam.profile is not Profile.DEEPSPEED
    bits = fp32_bits(adam.bias_correction2_sqrt if inverse else adam.inverse_bias_correction2_sqrt)
    if not 1 << 23 <= bits < 0x7F800000:
        raise CommandError(f"1 - beta2^step must be a normal positive fp32 number; beta2 is {adam.beta2!r}")
    exponent, significand = (bits >> 23) - 127, (bits & 0x7FFFFF) | 0x800000
    if not inverse or significand == 1 << 23:
        return _exact_factor(adam.inverse_bias_correction2_sqrt if not inverse else 2.0**-exponent)
    significand = (1 << FACTOR_BITS + 23) // significand
    return UPDATE["denominator_factor"].pack({"significand": significand, "exponent": -exponent - 1 & 0x3FF})
