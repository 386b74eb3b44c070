"""The update kernel's program: what a rule makes of the lane, as values of registers.

The lane (gateware.update.lane) has a fixed datapath; `program` says which operand goes where and which sums round once.
"""

from enum import IntEnum
from functools import singledispatch

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_bits
from nearflash.abi.registers import FACTOR_BITS, UPDATE
from nearflash.abi.rules import AdamStep, OptimizerStep, Profile

__all__ = ["DecayMode", "denominator_factor", "program_registers"]


class DecayMode(IntEnum):
    """What the decay operation makes (field `decay_mode`)."""

    SCALE = 0
    SELF = 1
    GRADIENT = 2


@singledispatch
def program_registers(rule: OptimizerStep) -> dict[str, int]:
    """Values of the registers that a rule sets: `program` without the copy, the scalars, `denominator_factor`."""
    raise CommandError(f"rule must be one that the lane has a program for, not {rule!r}; use device host or model")


@program_registers.register
def _adam(adam: AdamStep) -> dict[str, int]:
    torch = adam.profile is Profile.TORCH_FUSED
    scalars = {
        "decay": adam.decay if adam.weight_decay else 1.0,
        "m_decay": 1.0 if torch else adam.beta1,
        "m_gain": adam.one_minus_beta1,
        "v_decay": adam.beta2,
        "v_gain": adam.one_minus_beta2,
        "eps": adam.eps,
        "pre_scale": adam.step_size if torch else 1.0,
        "post_scale": -1.0 if torch else -adam.step_size,
    }
    return {
        "program": _adam_program(adam),
        **{name: fp32_bits(value) for name, value in scalars.items()},
        "denominator_factor": denominator_factor(adam),
    }


def denominator_factor(adam: AdamStep) -> int:
    """Register `denominator_factor`: what multiplies sqrt(v).

    Profile deepspeed: the fp32 scalar 1/sqrt(1 - beta2^t), exact. Others: the reciprocal of the fp32 scalar
    s = sqrt(1 - beta2^t), cut (not rounded) to 51 bits: times a 24-bit significand and rounded to nearest that equals
    the division by s, since a quotient of two 24-bit significands is at least 2^-49 (relative) off any rounding
    boundary.
    """
    inverse = adam.profile is not Profile.DEEPSPEED
    bits = fp32_bits(adam.bias_correction2_sqrt if inverse else adam.inverse_bias_correction2_sqrt)
    exponent, significand = (bits >> 23) - 127, (bits & 0x7FFFFF) | 0x800000
    if not 0 < bits < 0x7F800000 or bits >> 23 == 0:
        raise CommandError(f"1 - beta2^step must be a normal positive fp32 number; beta2 is {adam.beta2!r}")
    if not inverse:
        significand <<= FACTOR_BITS - 24
    elif significand == 1 << 23:
        significand, exponent = 1 << FACTOR_BITS - 1, -exponent
    else:
        significand, exponent = (1 << FACTOR_BITS + 23) // significand, -exponent - 1
    return UPDATE["denominator_factor"].pack({"significand": significand, "exponent": exponent & 0x3FF})


def _adam_program(adam: AdamStep) -> int:
    fused = adam.profile is not Profile.IEEE
    torch, deepspeed = adam.profile is Profile.TORCH_FUSED, adam.profile is Profile.DEEPSPEED
    mode = DecayMode.SCALE
    if adam.weight_decay and not adam.decoupled:
        mode = DecayMode.GRADIENT
    elif adam.weight_decay and deepspeed:
        mode = DecayMode.SELF
    return UPDATE["program"].pack(
        {
            "decay_mode": mode,
            "decay_fused": fused,
            "m_difference": torch,
            "m_fused": fused,
            "v_square_first": deepspeed,
            "v_fused": fused,
            "denominator_fused": deepspeed,
            "p_fused": deepspeed,
            "copy_format": 0,
        }
    )
