"""The reference against torch's optimizers and against a composition of softfloat operations."""

import math
from itertools import product

import numpy as np
import pytest
import softfloatpy as sf
import torch

from nearflash.abi.errors import CommandError, FormatError, ShapeError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.model.update.lane import BLOCK_PARAMS, low_precision, optimizer_step

SPECIAL_BITS = [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00FFFFFF, 0x1F800000, 0x3F7FFFFF, 0x3F800000,
                0x3F800001, 0x5F7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001]  # fmt: skip
SPECIALS = np.array(SPECIAL_BITS + [b | 0x80000000 for b in SPECIAL_BITS], np.uint32).view(np.float32)
HYPERPARAMETERS = [
    dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0),
    dict(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1),
    dict(lr=0.1, beta1=0.51, beta2=0.3, eps=1e-12, weight_decay=2.0),
    dict(lr=1.0, beta1=0.999, beta2=0.9999, eps=0.0, weight_decay=1e-4),
]


def random_fp32(rng: np.random.Generator, n: int, decades: float = 4.0) -> np.ndarray:
    """Normal values over about +-`decades` decades."""
    return (rng.standard_normal(n) * 10.0 ** rng.uniform(-decades, decades, n)).astype(np.float32)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("hyper", HYPERPARAMETERS)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_torch_fused_equals_torch(optimizer, hyper):
    rng = np.random.default_rng(11)
    n, steps = 16 * 1031, 5
    p = random_fp32(rng, n)
    m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    torch_optimizer = optimizer([parameter], lr=hyper["lr"], betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["eps"],
                                weight_decay=hyper["weight_decay"], fused=True)  # fmt: skip
    for step in range(1, steps + 1):
        g = random_fp32(rng, n)
        adam = AdamStep(step=step, decoupled=optimizer is torch.optim.AdamW, profile=Profile.TORCH_FUSED, **hyper)
        new = optimizer_step(adam, g, p, m, v)
        p, m, v = new.p, new.m, new.v
        parameter.grad = torch.from_numpy(g)
        torch_optimizer.step()
        state = torch_optimizer.state[parameter]
        same_bits(p, parameter.detach().numpy())
        same_bits(m, state["exp_avg"].numpy())
        same_bits(v, state["exp_avg_sq"].numpy())


def run_both(torch_optimizer, make_rule, n, steps=4):
    """Steps of torch's optimizer and of the reference from the same state; yields p, m, v of each after every step."""
    rng = np.random.default_rng(12)
    p = random_fp32(rng, n)
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch_optimizer([parameter])
    state: dict[str, np.ndarray] = {}
    for step in range(1, steps + 1):
        rule, g = make_rule(step), random_fp32(rng, n)
        state = state or {role: np.zeros(n, np.float32) for role in rule.torch_names}
        before, new = p, optimizer_step(rule, g, p, **state)
        p, state = new.p, {role: new.state[role] for role in rule.torch_names}
        parameter.grad = torch.from_numpy(g)
        optimizer.step()
        theirs = {role: optimizer.state[parameter][name].numpy() for role, name in rule.torch_names.items()}
        yield before, p, state, parameter.detach().numpy(), theirs


SGD = [dict(lr=0.013), dict(lr=0.013, weight_decay=0.1), dict(lr=0.1, momentum=0.9),
       dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
       dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]  # fmt: skip
ADAGRAD = [dict(lr=0.01), dict(lr=0.1, lr_decay=0.01, eps=1e-6, weight_decay=0.1)]
OTHERS = [*((torch.optim.SGD, SgdStep, hyper) for hyper in SGD),
          *((torch.optim.Adagrad, AdagradStep, hyper) for hyper in ADAGRAD)]  # fmt: skip


@pytest.mark.parametrize(("torch_class", "rule_class", "hyper"), OTHERS)
def test_torch_fused_equals_torchs_other_optimizers(torch_class, rule_class, hyper):
    make = lambda step: rule_class(step=step, profile=Profile.TORCH_FUSED, **hyper)  # noqa: E731
    runs = run_both(lambda params: torch_class(params, fused=True, **hyper), make, 16 * 257)
    for _, p, state, theirs, their_state in runs:
        same_bits(p, theirs)
        for role, array in state.items():
            same_bits(array, their_state[role])


@pytest.mark.parametrize(("torch_class", "rule_class", "hyper"), OTHERS)
def test_ieee_is_near_torchs_other_optimizers(torch_class, rule_class, hyper):
    """The first step, element by element: within a few roundings of the update's terms and one ulp of p."""
    make = lambda step: rule_class(step=step, **hyper)  # noqa: E731
    ((before, p, state, theirs, their_state),) = run_both(lambda params: torch_class(params, **hyper), make, 4096, 1)
    decay = hyper.get("weight_decay", 0) * np.abs(before)  # a term of the gradient, which the other may cancel
    update = np.abs(theirs.astype(np.float64) - before) + hyper["lr"] * decay
    assert np.all(np.abs(p.astype(np.float64) - theirs) <= 1e-6 * update + np.spacing(np.abs(theirs)))
    for role, array in state.items():
        assert np.all(np.abs(array - their_state[role]) <= 3e-6 * np.abs(their_state[role]) + 1e-6 * decay)


def test_lion_is_that_of_the_paper():
    """Algorithm 2 of Chen et al. in doubles, far from sign changes; and signs of zeros and NaN."""
    rng = np.random.default_rng(2)
    g, p, m = (rng.standard_normal(4096).astype(np.float32) for _ in range(3))
    lr, b1, b2, wd = 0.03125, 0.75, 0.875, 0.5
    new = optimizer_step(LionStep(lr, 1, beta1=b1, beta2=b2, weight_decay=wd), g, p, m)
    direction = b1 * m.astype(np.float64) + (1 - b1) * g
    np.testing.assert_allclose(new.p, p.astype(np.float64) * (1 - lr * wd) - lr * np.sign(direction), atol=1e-6)
    np.testing.assert_allclose(new.m, b2 * m.astype(np.float64) + (1 - b2) * g, rtol=1e-5, atol=1e-7)
    zeros = np.float32([0.0, -0.0, np.nan, np.inf])
    same_bits(optimizer_step(LionStep(lr, 1), zeros, np.float32([-0.0] * 4), zeros).p,
              np.float32([-0.0, -0.0, np.nan, -lr]))  # fmt: skip


def test_torch_fused_refuses_a_small_beta1():
    """torch.lerp rounds in another order from a weight of 0.5 up."""
    AdamStep(1e-3, 1, beta1=0.5000001, profile=Profile.TORCH_FUSED)
    AdamStep(1e-3, 1, beta1=0.5, profile=Profile.IEEE)
    with pytest.raises(CommandError, match=r"beta1 must be over 0.5 .*profile ieee.*, not 0.5"):
        AdamStep(1e-3, 1, beta1=0.5, profile=Profile.TORCH_FUSED)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("profile", "weight_decay", "ulps"), [
    (Profile.IEEE, 0.01, 1), (Profile.TORCH_FUSED, 0.01, 1), (Profile.DEEPSPEED, 0.0, 1), (Profile.DEEPSPEED, 0.01, 2),
])  # fmt: skip
def test_one_step_is_near_default_torch(profile, weight_decay, ulps, foreach):
    """torch's default kernels are not reproducible; one step stays within 1e-6 of the update's terms and `ulps` of p.

    The terms are those of m, beta1·m and (1-beta1)·g: where they cancel, orders other than torch's keep fewer digits
    of the update (torch_fused stays within 1e-6 of the update itself). DeepSpeed does not round 1 - lr·wd: one more
    ulp of p.
    """
    rng = np.random.default_rng(5)
    n = 1 << 16
    p, g, m = (rng.standard_normal(n, dtype=np.float32) for _ in range(3))
    m *= np.float32(0.1)
    v = (rng.random(n, dtype=np.float32) + np.float32(0.1)) * np.float32(0.01)
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=weight_decay, foreach=foreach)
    optimizer.state[parameter] = {"step": torch.tensor(9.0), "exp_avg": torch.from_numpy(m.copy()),
                                  "exp_avg_sq": torch.from_numpy(v.copy())}  # fmt: skip
    parameter.grad = torch.from_numpy(g)
    optimizer.step()
    theirs = parameter.detach().numpy()
    new = optimizer_step(AdamStep(1e-3, 10, weight_decay=weight_decay, profile=profile), g, p, m, v)
    update = np.abs(theirs.astype(np.float64) - p)
    if profile is not Profile.TORCH_FUSED:
        update *= (0.9 * np.abs(m.astype(np.float64)) + 0.1 * np.abs(g)) / np.abs(new.m)
    excess = np.abs(new.p.astype(np.float64) - theirs) - ulps * np.spacing(np.abs(theirs))
    assert np.all(excess <= 1e-6 * update)


def test_the_bound_of_deepspeed_is_of_the_larger_p():
    """Where p crosses to a smaller binade, the result's own ulp is half of what the decay was rounded to."""
    rng = np.random.default_rng(11)
    p, g = (rng.standard_normal(1 << 18, dtype=np.float32) for _ in range(2))
    p *= np.float32(0.02)
    parameter = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01)
    parameter.grad = torch.from_numpy(g)
    optimizer.step()
    theirs = parameter.detach().numpy()
    zero = np.zeros_like(p)
    new = optimizer_step(AdamStep(1e-4, 1, weight_decay=0.01, profile=Profile.DEEPSPEED), g, p, zero, zero)
    error, update = np.abs(new.p.astype(np.float64) - theirs), np.abs(theirs.astype(np.float64) - p)
    after = np.spacing(np.abs(theirs))
    assert np.any(error - 2 * after > 1e-6 * update)
    assert np.all(error - 2 * np.maximum(after, np.spacing(np.abs(p))) <= 1e-6 * update)


# --- an independent composition, one element at a time ---


def _soft(x) -> sf.Float32:
    return sf.Float32.from_bytes(np.array(x, ">f4").tobytes())


def soft_step(hyper: dict, profile: Profile, decoupled: bool, step: int, *operands) -> list[int]:
    """(p, m, v) bit patterns of one element, from softfloat's operations; every NaN as the canonical one."""
    g, p, m, v = (_soft(x) for x in operands)
    b1, b2, lr, decay = hyper["beta1"], hyper["beta2"], hyper["lr"], hyper["weight_decay"]
    gain1, gain2, eps, size = _soft(1 - b1), _soft(1 - b2), _soft(hyper["eps"]), lr / (1 - b1**step)
    correction = math.sqrt(1 - b2**step)
    fma, add, sub, mul, div, sqrt = sf.f32_mul_add, sf.f32_add, sf.f32_sub, sf.f32_mul, sf.f32_div, sf.f32_sqrt
    b1, b2 = _soft(b1), _soft(b2)
    if decay and not decoupled:
        wd = _soft(decay)
        g = add(g, mul(wd, p)) if profile is Profile.IEEE else fma(p, wd, g)
    elif decay:
        p = fma(p, _soft(-lr * decay), p) if profile is Profile.DEEPSPEED else mul(p, _soft(1 - lr * decay))
    if profile is Profile.IEEE:
        m = add(mul(b1, m), mul(gain1, g))
        v = add(mul(b2, v), mul(mul(gain2, g), g))
        d = add(div(sqrt(v), _soft(correction)), eps)
        p = sub(p, mul(_soft(size), div(m, d)))
    elif profile is Profile.TORCH_FUSED:
        m = fma(gain1, sub(g, m), m)
        v = fma(mul(gain2, g), g, mul(b2, v))
        d = add(div(sqrt(v), _soft(correction)), eps)
        p = add(p, div(mul(_soft(-size), m), d))
    else:
        m = fma(g, gain1, mul(b1, m))
        v = fma(mul(g, g), gain2, mul(b2, v))
        d = fma(sqrt(v), _soft(1 / correction), eps)
        p = fma(div(m, d), _soft(-size), p)
    return [0x7FC00000 if sf.f32_is_nan(x) else int.from_bytes(x.to_bytes(), "big") for x in (p, m, v)]


def soft_others(rule, g, p, m, v) -> list[int]:
    """(p, m or v) bit patterns of one element for the rules beside Adam, from softfloat's operations."""
    g, p, m, v = (_soft(x) for x in (g, p, m, v))
    fma, add, sub, mul, div, sqrt = sf.f32_mul_add, sf.f32_add, sf.f32_sub, sf.f32_mul, sf.f32_div, sf.f32_sqrt
    fused, decay = rule.profile is Profile.TORCH_FUSED, _soft(rule.decay)
    accumulate = (lambda x, y, z: fma(x, y, z)) if fused else (lambda x, y, z: add(z, mul(x, y)))
    if isinstance(rule, LionStep):
        p = mul(p, decay)
        direction = float(add(mul(_soft(rule.beta1), m), mul(_soft(rule.one_minus_beta1), g)).to_float())
        sign = _soft(direction if math.isnan(direction) else float(direction > 0) - float(direction < 0))
        results = [
            sub(p, mul(_soft(rule.lr), sign)),
            add(mul(_soft(rule.beta2), m), mul(_soft(rule.one_minus_beta2), g)),
        ]
    elif isinstance(rule, SgdStep):
        g = accumulate(p, decay, g)
        m = accumulate(g, _soft(rule.gain), mul(_soft(rule.retained), m))
        direction = accumulate(m, _soft(rule.momentum), g) if rule.nesterov else m
        results = [accumulate(direction, _soft(-rule.lr), p), m]
    else:
        g = accumulate(p, decay, g)
        v = accumulate(g, g, v)
        d, size = add(sqrt(v), _soft(rule.eps)), _soft(rule.step_size)
        results = [sub(p, div(mul(size, g), d) if fused else mul(size, div(g, d))), v]
    return [0x7FC00000 if sf.f32_is_nan(x) else int.from_bytes(x.to_bytes(), "big") for x in results]


@pytest.mark.parametrize("profile", [Profile.IEEE, Profile.TORCH_FUSED])
@pytest.mark.parametrize(("rule", "hyper"), [
    (SgdStep, dict(lr=0.1, step=3, momentum=0.9, dampening=0.25, weight_decay=0.1)),
    (SgdStep, dict(lr=0.1, step=1, momentum=0.9, dampening=0.25, weight_decay=0.1)),
    (SgdStep, dict(lr=0.1, step=3, momentum=0.9, nesterov=True, weight_decay=0.1)),
    (AdagradStep, dict(lr=0.1, step=3, lr_decay=0.1, weight_decay=0.1)),
    (LionStep, dict(lr=0.1, step=3, weight_decay=0.1)),
])  # fmt: skip
def test_other_rules_equal_softfloat(rule, hyper, profile):
    if profile not in rule.PROFILES:
        return
    made, (g, p, m, v) = rule(profile=profile, **hyper), operand_sets(np.random.default_rng(4))
    state = {"m": m} if "m" in made.torch_names else {"v": v}
    new = optimizer_step(made, g, p, **state)
    expected = np.array([soft_others(made, *x) for x in zip(g, p, m, v, strict=True)], np.uint32)
    for i, actual in enumerate(new.state.values()):
        same_bits(actual, np.ascontiguousarray(expected[:, i]))


def operand_sets(rng: np.random.Generator) -> list[np.ndarray]:
    """g, p, m, v: pairs of specials over random others, wide exponents, and values that stay subnormal."""
    pairs = np.array(list(product(SPECIALS, SPECIALS)), np.float32)
    sets = []
    for first, second in ((0, 3), (0, 1), (2, 3)):
        four = random_fp32(rng, 4 * len(pairs)).reshape(4, -1)
        four[3] = np.abs(four[3])
        four[first], four[second] = pairs.T
        sets.append(four)
    sets.append(random_fp32(rng, 4 * 600, 37).reshape(4, -1))
    tiny = random_fp32(rng, 4 * 600, 2).reshape(4, -1) * np.float32(1e-20)
    tiny[3] *= np.float32(1e-20)
    sets.append(tiny)
    return [np.ascontiguousarray(x) for x in np.concatenate(sets, axis=1)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("hyper", HYPERPARAMETERS[1:3])
@pytest.mark.parametrize("profile", Profile)
def test_equals_softfloat(profile, hyper, decoupled):
    operands = operand_sets(np.random.default_rng(3))
    step = 7
    new = optimizer_step(AdamStep(step=step, decoupled=decoupled, profile=profile, **hyper), *operands)
    expected = np.array(
        [soft_step(hyper, profile, decoupled, step, *x) for x in zip(*operands, strict=True)], np.uint32
    )
    for i, actual in enumerate((new.p, new.m, new.v)):
        same_bits(actual, np.ascontiguousarray(expected[:, i]))
    assert new.nonfinite_gradients == np.count_nonzero(~np.isfinite(operands[0]))


@pytest.mark.parametrize("profile", Profile)
def test_zero_decay_keeps_even_a_negative_zero(profile):
    """Skipped decay is no multiplication: -0 + ... and NaN aside, p only moves by the update."""
    p = np.array([-0.0, 1.5, np.inf], np.float32)
    zero = np.zeros(3, np.float32)
    new = optimizer_step(AdamStep(0.0, 1, profile=profile), zero, p, zero, zero)
    same_bits(new.p, p)


@pytest.mark.parametrize("n", [1, BLOCK_PARAMS, BLOCK_PARAMS + 1])
def test_blocks_do_not_show(n):
    rng = np.random.default_rng(n)
    g, p, m, v = (np.abs(random_fp32(rng, n)) for _ in range(4))
    adam = AdamStep(1e-3, 2, weight_decay=0.1, profile=Profile.DEEPSPEED)
    new, last = optimizer_step(adam, g, p, m, v), optimizer_step(adam, g[-1:], p[-1:], m[-1:], v[-1:])
    assert new.p.size == n
    same_bits(new.p[-1:], last.p)


@pytest.mark.parametrize(("copy", "dtype"), [(CopyFormat.FP16, torch.float16), (CopyFormat.BF16, torch.bfloat16)])
def test_copy_equals_torch_and_counts_overflows(copy, dtype):
    rng = np.random.default_rng(9)
    p = np.concatenate([random_fp32(rng, 50_000, 9), random_fp32(rng, 50_000, 38), SPECIALS,
                        np.array([65504, 65519.996, 65520, -65520, 3.3895314e38, 3.396e38], np.float32)])  # fmt: skip
    p = p[~np.isnan(p)]
    bits, overflows = low_precision(p, copy)
    expected = torch.from_numpy(p).to(dtype)
    np.testing.assert_array_equal(bits, expected.view(torch.uint16).numpy())
    assert overflows == int((torch.isinf(expected) & torch.isfinite(torch.from_numpy(p))).sum()) > 0


def test_copy_of_nan_is_canonical_and_no_overflow():
    nan = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert [hex(low_precision(nan, c)[0][1]) for c in (CopyFormat.FP16, CopyFormat.BF16)] == ["0x7e00", "0x7fc0"]
    assert low_precision(nan, CopyFormat.FP16)[1] == 0


def test_step_returns_the_copy_of_the_new_parameters():
    p, g, zero = (np.full(4, x, np.float32) for x in (1e6, 1.0, 0.0))
    new = optimizer_step(AdamStep(1.0, 1), g, p, zero, zero, CopyFormat.FP16)
    assert new.copy is not None
    assert new.copy.tolist() == [0x7C00] * 4 and new.copy_overflows == 4
    assert optimizer_step(AdamStep(1.0, 1), g, p, zero, zero).copy is None


def test_other_arrays_are_refused():
    one, two = np.zeros(1, np.float32), np.zeros(2, np.float32)
    with pytest.raises(FormatError, match="v must be float32, not float64"):
        optimizer_step(AdamStep(1.0, 1), one, one, one, np.zeros(1))
    with pytest.raises(ShapeError, match=r"m must have the shape \(1,\), not \(2,\)"):
        optimizer_step(AdamStep(1.0, 1), one, one, two, one)
    with pytest.raises(FormatError, match="copy must be FP16 or BF16"):
        low_precision(one, CopyFormat.NONE)
