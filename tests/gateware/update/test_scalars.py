"""Register words become the operands that the same fp32 numbers would unpack to."""

from fractions import Fraction

import numpy as np
from amaranth.sim import Simulator

from nearflash.abi.kernel.commands import UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.gateware.fp.raw import EXP_ZERO
from nearflash.gateware.update.scalars import SCALARS, UpdateScalars


def _unpacked(words: dict[str, int]) -> dict[str, dict[str, int]]:
    unit, seen = UpdateScalars(), {}

    async def drive(ctx):  # type: ignore[no-untyped-def]
        for name, word in words.items():
            ctx.set(getattr(unit.i, name), word)
        for name in words:
            raw = ctx.get(unit.o[name])
            seen[name] = {member: int(raw[member]) for member in ("sig", "exp", "sign", "zero", "inf", "nan")}

    sim = Simulator(unit)
    sim.add_testbench(drive)
    sim.run()
    return seen


def test_fp32_scalars_keep_their_value() -> None:
    values = np.float32([1.0, -0.1, 1e-30, 3e38, -(2.0**-126), 0.999, 12345.678, -1.0])
    words = dict(zip(SCALARS, (int(v) for v in values.view(np.uint32)), strict=True))
    for value, raw in zip(values, _unpacked(words).values(), strict=True):
        exact = Fraction(raw["sig"], 1 << 23) * Fraction(2) ** raw["exp"] * (-1) ** raw["sign"]
        assert exact == Fraction(float(value))
        assert raw["sig"] >> 23 == 1
        assert not (raw["zero"] or raw["inf"] or raw["nan"])


def test_zeros_keep_their_sign() -> None:
    raw = _unpacked({"decay": 0, "post_scale": 1 << 31})
    for name, sign in (("decay", 0), ("post_scale", 1)):
        assert raw[name] == {"sig": 0, "exp": EXP_ZERO, "sign": sign, "zero": 1, "inf": 0, "nan": 0}


def test_the_denominators_factor_is_the_reciprocal() -> None:
    adam = AdamStep(lr=1e-3, step=2)
    word = UpdateCommand(adam, 1, {}, {}).registers()["denominator_factor"]
    raw = _unpacked({"denominator_factor": word})["denominator_factor"]
    value = Fraction(raw["sig"], 1 << 50) * Fraction(2) ** raw["exp"]
    assert 0 <= 1 / Fraction(adam.bias_correction2_sqrt) - value < Fraction(2) ** (raw["exp"] - 50)
