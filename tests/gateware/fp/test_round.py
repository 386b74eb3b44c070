"""The rounder alone, on its raw ports: what Pack would hide shows here."""

import numpy as np
import pytest

from nearflash.abi.formats import BF16, FP16, FP32
from nearflash.gateware.fp.raw import EXP_ZERO, FLAGS, RAW
from nearflash.gateware.fp.round import UNROUNDED, Round

ROWS = 4_000


def unrounded(rng: np.random.Generator, low: int, high: int) -> tuple[list[int], np.ndarray]:
    """Random words in UNROUNDED with exponents in [low, high), and their exact values (26 bits: exact as doubles)."""
    sig = rng.integers(1 << 25, 1 << 26, ROWS)
    sig[: ROWS // 2] &= ~((1 << rng.integers(0, 26, ROWS // 2)) - 1)  # ties
    sig[: ROWS // 4] |= rng.integers(0, 2, ROWS // 4)
    sig |= 1 << 25
    exp = rng.integers(low, high, ROWS)
    fields = [{"sig": int(s), "exp": int(e)} for s, e in zip(sig, exp, strict=True)]
    return [UNROUNDED.const(field).as_value().value for field in fields], np.ldexp(sig / 2.0**25, exp)


def check(words: list[int], expected: np.ndarray) -> None:
    """A rounded word holds exactly the expected value: also no bit below a subnormal's last one."""
    for word, value in zip(words, expected.tolist(), strict=True):
        raw = RAW.from_bits(word)
        assert (raw.zero, raw.inf) == (value == 0, np.isinf(value))
        if value == 0:
            assert (raw.sig, raw.exp) == (0, EXP_ZERO)
        elif np.isfinite(value):
            assert raw.sig >> 23 == 1
            assert raw.sig * 2.0 ** (raw.exp - 23) == value


def test_rounds_to_fp32(simulate):
    """Subnormals, values near one, near the largest one, and all."""
    ranges = ((-190, -120), (-3, 3), (120, 140), (-512, 500))
    drawn = [unrounded(np.random.default_rng(42), low, high) for low, high in ranges]
    words, values = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    with np.errstate(all="ignore"):
        check(simulate(Round(), {"i": words}, ["o"])["o"], values.astype(np.float32))


def test_rounds_to_fp32_without_subnormals(simulate):
    words, values = unrounded(np.random.default_rng(43), -126, 128)
    with np.errstate(all="ignore"):
        check(simulate(Round(subnormals=False), {"i": words}, ["o"])["o"], values.astype(np.float32))


def test_rounds_to_the_selected_format(simulate):
    words, values = unrounded(np.random.default_rng(44), -30, 20)
    select = np.arange(ROWS) % 2
    with np.errstate(all="ignore"):
        half = values.astype(np.float16).astype(np.float64)
    found = simulate(Round(formats=(FP16, FP32)), {"i": words, "select": select}, ["o"])["o"]
    check(found, np.where(select == 1, values.astype(np.float32).astype(np.float64), half))


def test_keep_passes_the_number(simulate):
    words, _ = unrounded(np.random.default_rng(45), -300, 256)
    found = simulate(Round(), {"i": words, "keep": [1] * ROWS}, ["o", "flags"])
    for word, kept in zip(words, found["o"], strict=True):
        before, after = UNROUNDED.from_bits(word), RAW.from_bits(kept)
        assert (after.sig, after.exp, after.inf, after.zero) == (before.sig >> 2, before.exp, 0, 0)
    assert not any(found["flags"])


def test_exceptions_of_the_operation_pass(simulate):
    nan = UNROUNDED.const({"nan": 1}).as_value().value
    found = simulate(Round(), {"i": [nan] * 4, "invalid": [0, 1, 0, 1], "div_by_zero": [0, 0, 1, 1]}, ["flags"])
    flags = [FLAGS.from_bits(word) for word in found["flags"]]
    assert [(f.invalid, f.div_by_zero, f.inexact) for f in flags] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]


def test_formats_message():
    with pytest.raises(ValueError, match=r"formats must be one, or several with subnormals, not \['fp16', 'bf16'\]"):
        Round(subnormals=False, formats=(FP16, BF16))
