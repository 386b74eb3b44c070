from fractions import Fraction

import numpy as np
import pytest

from nearflash.gateware.fp.raw import RAW, RawLayout
from nearflash.gateware.fp.sum import Sum

ROWS = 1_500
KEPT_BITS = 25


def numbers(layout: RawLayout, exps: np.ndarray, seed: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(seed)
    top = 1 << (layout.sig_bits - 1)
    sigs = [
        top | int(rng.integers(0, top)) >> int(s) << int(s) for s in rng.integers(0, layout.sig_bits - 1, len(exps))
    ]
    return [{"sig": s, "exp": int(e), "sign": int(rng.integers(0, 2))} for s, e in zip(sigs, exps, strict=True)]


def words(layout: RawLayout, fields: list[dict[str, int]]) -> list[int]:
    return [layout.const(field).as_value().value for field in fields]


def value(fields: dict[str, int], bits: int) -> Fraction:
    return (-1) ** fields["sign"] * fields["sig"] * Fraction(2) ** (fields["exp"] - bits + 1)


@pytest.mark.parametrize("a_bits", [24, 30, 48])
def test_sum_is_exact_down_to_the_guard_bit(simulate, a_bits):
    total, layout = Sum(a_bits), RawLayout(a_bits)
    exps = np.random.default_rng(61).integers(-298, 256, ROWS)
    near = exps + np.random.default_rng(62).integers(-4, 5, ROWS) * np.repeat([1, 14], ROWS // 2)
    a, b = numbers(layout, exps, 63), numbers(RAW, near, 64)
    found = simulate(total, {"a": words(layout, a), "b": words(RAW, b)}, ["o"])["o"]
    for x, y, word in zip(a, b, found, strict=True):
        raw = total.o.shape().from_bits(word)
        low_bits = raw.shape().sig_bits - KEPT_BITS
        exact = value(x, a_bits) + value(y, 24)
        assert raw.zero == (exact == 0)
        if exact:
            kept, rest = divmod(abs(exact) / Fraction(2) ** (raw.exp - KEPT_BITS + 1), 1)
            assert raw.sign == (exact < 0)
            assert kept >> (KEPT_BITS - 1) == 1
            assert (raw.sig >> low_bits, raw.sig % (1 << low_bits) != 0) == (kept, rest != 0)


def test_signs_of_zero(simulate):
    zeros = [{"zero": 1, "sign": s} for s in (0, 0, 1, 1)]
    one = [{"sig": 1 << 23, "sign": s} for s in (0, 1)]
    a, b = [*zeros, *one], [zeros[0], zeros[2], zeros[0], zeros[2], *reversed(one)]
    found = simulate(Sum(), {"a": words(RAW, a), "b": words(RAW, b)}, ["o"])["o"]
    raws = [Sum().o.shape().from_bits(word) for word in found]
    assert [(raw.zero, raw.sign) for raw in raws] == [(1, 0), (1, 0), (1, 0), (1, 1), (1, 0), (1, 0)]


def test_width_message():
    with pytest.raises(ValueError, match="a_bits must be at least 24, not 23"):
        Sum(23)
