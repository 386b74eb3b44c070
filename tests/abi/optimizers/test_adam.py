"""Adam's scalars: double precision once, then one rounding to fp32."""

import math
import struct
from dataclasses import replace
from fractions import Fraction

import pytest

from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep, Profile, StateFormat
from nearflash.abi.optimizers.program import DecayMode, denominator_factor
from nearflash.abi.registers import UPDATE


def test_one_minus_beta_is_taken_in_double_precision() -> None:
    step = AdamStep(lr=1e-3, step=1, beta2=0.999)
    assert step.one_minus_beta2 == struct.unpack("f", struct.pack("f", 1 - 0.999))[0]
    assert step.one_minus_beta2 != 1 - struct.unpack("f", struct.pack("f", 0.999))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, not -1.0"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"step": 0}, "step must be at least 1, not 0"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), not 1.0"),
        ({"beta2": -0.1}, "beta2 must be in"),
        ({"eps": math.inf}, "eps must be finite"),
        ({"weight_decay": -1e-3}, "weight_decay must be"),
        ({"eps": 1e-40}, "eps must be zero or a normal fp32 number"),
        ({"lr": 1e-39}, "lr must be zero or a normal"),
    ],
)
def test_hyper_parameters_out_of_range_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        AdamStep(**{"lr": 1e-3, "step": 1, **change})


def _factor(adam: AdamStep) -> tuple[Fraction, int]:
    parts = UPDATE["denominator_factor"].unpack(denominator_factor(adam))
    exponent = parts["exponent"] - (1 << 10) * (parts["exponent"] >> 9)
    assert parts["significand"] >> 50 == 1
    return Fraction(parts["significand"]) * Fraction(2) ** (exponent - 50), exponent


@pytest.mark.parametrize("step", [1, 2, 3, 10, 1000, 100_000])
def test_the_reciprocal_is_below_and_within_a_51_bit_ulp(step: int) -> None:
    adam = AdamStep(lr=1e-3, step=step)
    exact = 1 / Fraction(adam.bias_correction2_sqrt)
    factor, exponent = _factor(adam)
    assert 0 <= exact - factor < Fraction(2) ** (exponent - 50)


def test_deepspeed_multiplies_by_the_fp32_scalar_itself() -> None:
    adam = AdamStep(lr=1e-3, step=7, profile=Profile.DEEPSPEED)
    assert _factor(adam)[0] == Fraction(adam.inverse_bias_correction2_sqrt)


@pytest.mark.parametrize(
    ("profile", "decoupled", "decay", "mode"),
    [
        ("ieee", True, 0.01, DecayMode.SCALE),
        ("deepspeed", True, 0.01, DecayMode.SELF),
        ("deepspeed", True, 0.0, DecayMode.SCALE),
        ("torch_fused", False, 0.01, DecayMode.GRADIENT),
        ("torch_fused", False, 0.0, DecayMode.SCALE),
    ],
)
def test_the_program_says_what_the_decay_makes(profile: str, decoupled: bool, decay: float, mode: DecayMode) -> None:
    adam = AdamStep(lr=1e-3, step=1, weight_decay=decay, decoupled=decoupled, profile=Profile(profile))
    values = UpdateCommand(adam, 1, {}, {}).registers()
    assert UPDATE["program"].unpack(values["program"])["decay_mode"] == mode
    if not decay:
        assert values["decay"] == 0x3F800000


def test_registers_of_a_command_all_exist_in_the_map() -> None:
    inputs, outputs = {"g": 0, "p": 64, "m": 128, "v": 192}, {"p": 256, "m": 320, "v": 384, "copy": 448}
    values = UpdateCommand(AdamStep(lr=1e-3, step=1), 5, inputs, outputs, CopyFormat.BF16).registers()
    assert all(
        UPDATE[name].access == "rw" and 0 <= value < 1 << UPDATE[name].width_bits for name, value in values.items()
    )
    assert {register.name for register in UPDATE if register.access == "rw"} == set(values)


def test_a_command_is_checked_before_anything_starts() -> None:
    adam, config = AdamStep(lr=1e-3, step=1), CONFIGS["update-smartssd"]
    outputs = dict.fromkeys(("p", "m", "v"), 0)
    good = UpdateCommand(adam, 1, outputs | {"g": 0}, outputs)
    good.check(config)
    with pytest.raises(CommandError, match="params must be between 1"):
        replace(good, params=0).check(config)
    with pytest.raises(CommandError, match=r"first_param must be between 0 and 2\^40 - 1, not -1"):
        replace(good, first_param=-1).check(config)
    with pytest.raises(AlignmentError, match="v write address must be a multiple of 64 bytes, not 0x20"):
        replace(good, outputs=outputs | {"v": 0x20}).check(config)
    with pytest.raises(CommandError, match="inputs must be addresses of g, m, p, v, not of m, p, v"):
        replace(good, inputs=outputs).check(config)
    with pytest.raises(CommandError, match="outputs must be addresses of copy, m, p, v, not of m, p, v"):
        replace(good, copy=CopyFormat.BF16).check(config)
    with pytest.raises(CommandError, match="gradient must be fp32 on update-smartssd, not topk"):
        replace(good, gradient=GradientFormat.TOPK).check(replace(config, gradients=("fp32",)))


def test_what_a_build_does_not_compute_is_refused_and_software_computes_all() -> None:
    config = replace(CONFIGS["update-smartssd"], state_formats=("fp32",))
    narrow = AdamStep(1e-3, 1, state_format=StateFormat.MX8)
    arrays = dict.fromkeys(("p", *narrow.arrays), 0)
    command = UpdateCommand(narrow, 32, arrays | {"g": 0}, arrays)
    with pytest.raises(CommandError, match="state_format must be fp32 on update-smartssd, not mx8"):
        command.check(config)
    command.check(config.in_software())
    with pytest.raises(CommandError, match="params must be a multiple of 32 in state format mx8, not 33"):
        replace(command, params=33).check(config.in_software())
