"""The global norm and what follows from it, against fractions and torch."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from nearflash.abi.errors import NonFiniteError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.storage import ADAM_ARRAYS
from nearflash.training.step.norm import clip_scalar, reject_nonfinite, squares_and_fingerprints, sum_of_squares
from nearflash.training.step.parameters import FlatParameters


def flat_of(gradients):
    tensors = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float32)) for g in gradients]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.float()
    return FlatParameters([{"params": tensors}], CopyFormat.NONE, 1024, ADAM_ARRAYS)


def test_squares_are_nearly_exact_at_any_scale():
    rng = np.random.default_rng(5)
    gradients = [torch.from_numpy((rng.standard_normal(n) * s).astype(np.float32)) for n, s in
                 ((1, 1e30), (70_000, 1e-30), (200_001, 1.0), (0, 1.0), (17, 1e-3))]  # fmt: skip
    for chosen in ([1], [2, 4], [0, 1, 2, 3, 4]):
        exact = math.fsum(x * x for i in chosen for x in gradients[i].double().tolist())  # no square is rounded
        assert abs(Fraction(sum_of_squares(gradients[i] for i in chosen)) / Fraction(exact) - 1) < Fraction(1, 10**14)


def test_squares_do_not_depend_on_threads_or_neighbours():
    generator = torch.Generator().manual_seed(9)
    gradients = [torch.randn(n, generator=generator) for n in (300_000, 5, 65_536)]
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(sum_of_squares(gradients))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found == {sum_of_squares([gradients[2], gradients[0], gradients[1]])}, "of whole tensors in any order"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_squares_are_finite_exactly_when_all_elements_are(value):
    """Also next to the largest numbers, whose squares overflow in fp32."""
    gradients = [torch.full((100_000,), 3.4e38), torch.zeros(3)]
    assert math.isfinite(sum_of_squares(gradients))
    gradients[1][2] = value
    assert not math.isfinite(sum_of_squares(gradients))
    assert math.isfinite(sum_of_squares(gradients[:1]))


def test_damage_is_named_also_where_it_is_elsewhere():
    flat = flat_of([torch.ones(5), torch.tensor([1.0, float("nan"), float("inf")])])
    with pytest.raises(NonFiniteError, match=r"gradient of '0.1' must be finite, .* in 2 elements \(2 in 1 tensors\)"):
        reject_nonfinite(flat, [0, 1])
    with pytest.raises(NonFiniteError, match="another rank has some that are not"):
        reject_nonfinite(flat, [0])


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.9999, 1.0, 3.7, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
def test_clip_scalar(norm, scale):
    """1/(clip·scale) with clip = max(1, (norm/scale + 1e-6)/max_norm), rounded to fp32 once."""
    expected = 1 / (max(1.0, (norm + 1e-6) / 0.5) * scale)
    assert clip_scalar(norm * scale, 0.5, scale) == float(np.float32(expected))
    assert clip_scalar(norm * scale, None, scale) == 1 / scale


def test_products_are_rounded_once(set_gradients):
    """Gathered gradients are rn(g·scalar), padding and neighbours untouched."""
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(n, generator=generator).to(torch.bfloat16) for n in (33, 700, 500)]
    flat = flat_of(gradients)
    scalar = clip_scalar(7.3, 1.1, 3.0)
    out = np.full(1024, np.nan, np.float32)
    flat.put_gradients(0, 1024, scalar, out)
    for gradient, entry in zip(gradients, flat.entries, strict=True):
        inside = slice(entry.start, min(entry.start + entry.params, 1024))
        exact = gradient.double().numpy()[: inside.stop - inside.start] * scalar
        assert np.array_equal(out[inside], exact.astype(np.float32))
        out[inside] = 0
    assert not out.any(), "padding is zero"


@pytest.mark.parametrize("gradients", [[], [torch.empty(0)], [torch.empty(0, 3), torch.empty(0)]])
def test_no_element_at_all(gradients):
    assert squares_and_fingerprints(gradients) == (0.0, [0] * len(gradients))
