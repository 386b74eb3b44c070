"""The host's vectorised lane against the model, on operands that make double rounding and NaN show."""

from itertools import product

import numpy as np
import pytest

from nearflash.abi.commands import CopyFormat
from nearflash.abi.rules import AdamStep, Profile
from nearflash.device.vector_lane import BLOCK_PARAMS, VectorLane
from nearflash.model.update.lane import adam_step

SPECIAL_BITS = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF,
                0x7F800000, 0x7FC00001]  # fmt: skip
SPECIALS = np.array(SPECIAL_BITS + [b | 0x80000000 for b in SPECIAL_BITS], np.uint32).view(np.float32)


def operands(kind: str) -> np.ndarray:
    """g, p, m, v: fp32, (4, n)."""
    rng = np.random.default_rng(len(kind))
    n = BLOCK_PARAMS - 5
    wide = (rng.standard_normal((4, n)) * 10.0 ** rng.uniform(-36, 36, (4, n))).astype(np.float32)
    if kind == "wide":
        return wide
    if kind == "special":
        pairs = np.array(list(product(SPECIALS, SPECIALS)), np.float32)
        wide[:, : len(pairs)] = np.stack([pairs[:, 0], pairs[:, 1], pairs[::-1, 0], pairs[:, 1]])
        return wide
    if kind == "tiny":
        return (wide[0:4] % np.float32(1)) * np.float32([1e-20, 1e-38, 1e-38, 1e-40])[:, None]
    # Short significands: sums fall on half-way points in every block.
    short = rng.integers(-4096, 4096, (4, n)).astype(np.float32) * np.exp2(rng.integers(-14, 14, (4, n)))
    return short.astype(np.float32)


@pytest.mark.parametrize("kind", ["wide", "special", "tiny", "short"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("profile", Profile)
def test_equals_the_model(profile, decoupled, kind):
    # Scalars of few bits make exact ties of sums likely.
    for scalars in (dict(lr=1e-3, weight_decay=0.1), dict(lr=0.25, beta1=0.75, beta2=0.9375, weight_decay=0.5)):
        adam = AdamStep(step=1, decoupled=decoupled, profile=profile, **scalars)
        inputs = list(operands(kind))
        for copy in (CopyFormat.FP16, CopyFormat.BF16):
            expected = adam_step(adam, *inputs, copy)
            outputs = [np.empty_like(inputs[0]) for _ in range(3)] + [np.empty(inputs[0].size, np.uint16)]
            counts = VectorLane(adam, copy).step(inputs, outputs)
            for actual, name in zip(outputs, ("p", "m", "v", "copy"), strict=True):
                np.testing.assert_array_equal(actual.view("u2"), getattr(expected, name).view("u2"), name)
            assert counts == (expected.nonfinite_gradients, expected.copy_overflows)


def test_fma_rounds_once():
    """(1 + e)(1 - e) is just below one: c and half an ulp, less a little that a double cannot hold, is no tie."""
    e, n = 2.0**-20, 1 << 12
    rng = np.random.default_rng(2)
    lane = VectorLane(AdamStep(1e-3, 1), CopyFormat.NONE)
    for ulp, c in (
        (2.0**-23, rng.uniform(1, 2, n)),
        (2.0**-149, rng.uniform(2.0**-134, 2.0**-126, n)),  # subnormal results
    ):
        c = c.astype(np.float32)
        a = np.full(n, 2.0**-75 * (1 + e), np.float32)
        b = np.float32(ulp * 2.0**74 * (1 - e))
        out = lane.fma(a, b, c, np.empty_like(a))
        np.testing.assert_array_equal(out, c)  # just under half an ulp more
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
        assert np.count_nonzero(twice != c) > n / 3  # what two roundings would have given
        np.testing.assert_array_equal(lane.fma(-a, b, -c, np.empty_like(a)), -c)
        with np.errstate(all="ignore"):
            poisoned = np.concatenate([c[:-1], np.float32([np.nan])])
            np.testing.assert_array_equal(lane.fma(a, b, poisoned, np.empty_like(a)), poisoned)


@pytest.mark.parametrize("profile", Profile)
def test_outputs_may_be_any_of_the_inputs(profile):
    adam = AdamStep(1e-2, 3, weight_decay=0.1, profile=profile)
    g, p, m, v = operands("short")
    expected = adam_step(adam, g, p, m, v)
    VectorLane(adam, CopyFormat.NONE).step([g, p, m, v], [v, p, m])
    for actual, name in ((v, "p"), (p, "m"), (m, "v")):
        np.testing.assert_array_equal(actual.view("u4"), getattr(expected, name).view("u4"))
