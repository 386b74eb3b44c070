"""The host's vector lane against the model, on operands that make double rounding and NaN show."""

from itertools import product

import numpy as np
import pytest

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep, StateFormat
from nearflash.abi.optimizers.state import TILE_PARAMS
from nearflash.device.backends.host.vector.lane import VectorLane
from nearflash.model.update.lane import optimizer_step
from nearflash.model.update.state import decode, dither, encode

SPECIAL_BITS = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF,
                0x7F800000, 0x7FC00001]  # fmt: skip
SPECIALS = np.array(SPECIAL_BITS + [b | 0x80000000 for b in SPECIAL_BITS], np.uint32).view(np.float32)
KINDS = ("wide", "special", "tiny", "short")

# Scalars of few bits make exact ties of sums likely.
RULES = [
    *(AdamStep(step=1, decoupled=decoupled, profile=profile, **scalars)
      for profile, decoupled in product(Profile, (True, False))
      for scalars in (dict(lr=1e-3, weight_decay=0.1),
                      dict(lr=0.25, beta1=0.75, beta2=0.9375, weight_decay=0.5))),
    *(rule(profile=profile, **scalars)
      for profile in (Profile.IEEE, Profile.TORCH_FUSED)
      for rule, scalars in (
          (SgdStep, dict(lr=0.1, step=1)),
          (SgdStep, dict(lr=0.25, step=1, momentum=0.75, weight_decay=0.5)),
          (SgdStep, dict(lr=0.1, step=2, momentum=0.9, dampening=0.25)),
          (SgdStep, dict(lr=0.25, step=9, momentum=0.75, nesterov=True, weight_decay=0.1)),
          (AdagradStep, dict(lr=0.25, step=1, eps=0.0)),
          (AdagradStep, dict(lr=0.1, step=4, lr_decay=0.01, weight_decay=0.5)))),
    LionStep(0.25, 1), LionStep(1e-3, 5, beta1=0.75, beta2=0.9375, weight_decay=0.5),
    LionStep(1e-3, 5, beta1=0.0, beta2=0.0),
]  # fmt: skip


def operands(kind: str, n: int = 8192) -> np.ndarray:
    """g, p, m, v: fp32, (4, n)."""
    rng = np.random.default_rng(len(kind))
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


def same_bits(actual, expected, name=""):
    np.testing.assert_array_equal(actual.view("u1"), expected.view("u1"), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equals_the_model(rule, kind):
    n = 8187
    values = dict(zip("gpmv", operands(kind, n), strict=True))
    inputs = {name: values[name] for name in ("g", "p", *rule.arrays)}
    for copy in (CopyFormat.FP16, CopyFormat.BF16):
        expected = optimizer_step(rule, **inputs, copy=copy)
        outputs = {name: np.empty(n, np.float32) for name in ("p", *rule.arrays)} | {"copy": np.empty(n, np.uint16)}
        counts = VectorLane(rule, copy).step(inputs, outputs)
        for name, array in (expected.state | {"copy": expected.copy}).items():
            same_bits(outputs[name], array, name)
        assert counts == (expected.nonfinite_gradients, expected.copy_overflows)


@pytest.mark.parametrize("state_format", [StateFormat.BF16, StateFormat.MX8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda **k: AdamStep(1e-3, 3, **k), lambda **k: SgdStep(0.1, 3, momentum=0.9, **k),
                                  lambda **k: AdagradStep(0.1, 3, **k), lambda **k: LionStep(1e-3, 3, **k)],
                         ids=["adam", "sgd", "adagrad", "lion"])  # fmt: skip
def test_narrow_state_equals_the_models(make, kind, state_format):
    """Decoded, stepped in fp32, encoded with the dither of the parameter's place."""
    rule, n, first = make(state_format=state_format), 8192, 5 * TILE_PARAMS + 4096
    values = dict(zip("gpmv", operands(kind, n), strict=True))
    values["v"] = np.abs(values["v"])
    values = {name: np.where(np.isnan(x), np.float32(np.nan), x) for name, x in values.items()}
    inputs, state, dithers = {"g": values["g"], "p": values["p"]}, {}, {}
    for role in rule.torch_names:
        dithers[role] = dither(role, rule.step, first, n)
        stored = encode(values[role], role, state_format, dithers[role][::-1])
        inputs |= zip((role, f"{role}_scale"), stored, strict=False)
        state[role] = decode(stored, role, state_format)
    outputs = {name: np.empty_like(x) for name, x in inputs.items() if name != "g"}
    VectorLane(rule, CopyFormat.NONE).step(inputs, outputs, first)
    expected = optimizer_step(rule, values["g"], values["p"], **state)
    same_bits(outputs["p"], expected.p, "p")
    for role in rule.torch_names:
        parts = encode(expected.state[role], role, state_format, dithers[role])
        for name, part in zip((role, f"{role}_scale"), parts, strict=False):
            same_bits(outputs[name], part, name)


@pytest.mark.parametrize("profile", Profile)
def test_outputs_may_be_any_of_the_inputs(profile):
    """Even another's: then nothing is written before it was read."""
    adam = AdamStep(1e-2, 3, weight_decay=0.1, profile=profile)
    g, p, m, v = operands("short")
    expected = optimizer_step(adam, g, p, m, v)
    VectorLane(adam, CopyFormat.NONE).step({"g": g, "p": p, "m": m, "v": v}, {"p": v, "m": p, "v": m})
    for actual, name in ((v, "p"), (p, "m"), (m, "v")):
        same_bits(actual, expected.state[name], name)


def test_fused_operations_round_once():
    """(1 + e)(1 - e) is just below one: c and half an ulp, less a little that a double cannot hold, is no tie."""
    e, n = 2.0**-20, 1 << 12
    rng = np.random.default_rng(2)
    for ulp, c in (
        (2.0**-23, rng.uniform(1, 2, n)),
        (2.0**-149, rng.uniform(2.0**-134, 2.0**-126, n)),  # subnormal results
    ):
        c = c.astype(np.float32)
        g = np.full(n, 2.0**-75 * (1 + e), np.float32)
        lr = np.float32(ulp * 2.0**74 * (1 - e))
        twice = (c + g.astype(np.float64) * lr).astype(np.float32)  # what two roundings would have given
        sgd, out = SgdStep(float(lr), 1, profile=Profile.TORCH_FUSED), np.empty(n, np.float32)
        VectorLane(sgd, CopyFormat.NONE).step({"g": -g, "p": c}, {"p": out})
        same_bits(out, c)  # just under half an ulp more
        assert np.count_nonzero(twice != c) > n / 3


@pytest.mark.parametrize("state_format", StateFormat)
@pytest.mark.parametrize("n", [32, 8192 + 32])
def test_bf16_gradients_are_those_in_fp32_times_their_factor(state_format, n):
    rng, scale = np.random.default_rng(n), np.float32(0.3)
    words = rng.integers(0, 1 << 16, n, np.uint16)
    words[:2] = 0x7F80, 0xFFC1  # infinity, NaN
    with np.errstate(over="ignore", invalid="ignore"):
        gradients = {"fp32": (words.astype(np.uint32) << 16).view(np.float32) * scale, "bf16": words}
    lane = VectorLane(AdamStep(1e-3, 2, state_format=state_format), CopyFormat.NONE)
    values = (rng.standard_normal((3, n)) * 0.1).astype(np.float32)
    found = {}
    for kind, g in gradients.items():
        arrays = {"p": values[0].copy()}
        for role, wide in zip("mv", np.abs(values[1:]), strict=True):
            names = (role, f"{role}_scale") if state_format is StateFormat.MX8 else (role,)
            arrays |= zip(
                names, (x.copy() for x in encode(wide, role, state_format, dither(role, 1, 0, n))), strict=True
            )
        counts = lane.step({"g": g, **arrays}, arrays, 0, scale if kind == "bf16" else 1.0)
        found[kind] = counts, [array.tobytes() for array in arrays.values()]
    assert found["bf16"] == found["fp32"] and found["bf16"][0][0] > 0
