import numpy as np
import pytest
import torch

from nearflash.abi.bitmap import ElementFormat
from nearflash.model.fp.convert import from_narrow
from nearflash.model.weights.dequantize import dequantize, quantize

FP16, BF16, INT8, INT4 = ElementFormat
DTYPES = {FP16: torch.float16, BF16: torch.bfloat16}


def by_torch(codes, scale, minimum, output):
    q = torch.from_numpy(codes)
    s, m = (torch.from_numpy(x.view(np.int16)).view(DTYPES[output]) for x in (scale, minimum))
    return (q.float() * s.float() + m.float()).to(DTYPES[output])


@pytest.mark.parametrize("output", [FP16, BF16])
def test_equals_torch(output):
    """Any patterns; scales and minima of close exponents, where sums cancel and halves are met; few codes."""
    rng, count = np.random.default_rng(output), 300_000
    codes = rng.integers(0, 256, count, np.uint8)
    scale, minimum = rng.integers(0, 1 << 16, (2, count), np.uint16)
    near, bits = slice(0, 2 * count // 3), output.number_format.mantissa_bits
    top = (1 << output.number_format.exponent_bits) - 1
    exponent = (scale[near] >> bits & top).astype(np.int64) + rng.integers(-3, 11, near.stop)
    minimum[near] = minimum[near] & (0x8000 | (1 << bits) - 1) | (exponent.clip(0, top) << bits).astype(np.uint16)
    found = dequantize(codes, True, scale, minimum, output)
    expected = by_torch(codes, scale, minimum, output)
    nan = expected.isnan().numpy()
    np.testing.assert_array_equal(found[~nan], expected.view(torch.int16).numpy().view(np.uint16)[~nan])
    assert (found[nan] == output.number_format.canonical_nan).all()
    assert 0 < nan.sum() < count / 4


def test_absent_elements_are_plus_zero():
    present = np.array([True, False, True])
    found = dequantize(np.array([0, 7, 0], np.uint8), present, 0x8001, np.array([0x8000, 0xFC00, 0], np.uint16), FP16)
    assert found.tolist() == [0x8000, 0, 0]  # -0 + -0, absent, -0 + 0


@pytest.mark.parametrize("element", [INT8, INT4])
@pytest.mark.parametrize("output", [FP16, BF16])
def test_values_come_back_to_half_a_step(element, output):
    """Half a step and the output's rounding away, but above the largest code, where the scale was rounded down."""
    rng = np.random.default_rng(3)
    values = torch.from_numpy(rng.normal(0, 0.02, (5, 130))).to(DTYPES[output])
    matrix = values.view(torch.int16).numpy().view(np.uint16) * (rng.random((5, 130)) < 0.5)
    scaled = quantize(matrix, element, output)
    np.testing.assert_array_equal(scaled.present, matrix != 0)
    assert scaled.scales.shape == (5, 3, 2) and not scaled.codes[~scaled.present].any()
    number = output.number_format
    given, found = (from_narrow(x, number).view(np.float32) for x in (matrix.astype(np.uint16), scaled.dense()))
    step = np.repeat(from_narrow(scaled.scales[..., 0], number).view(np.float32), 64, axis=1)[:, :130]
    top, epsilon = (1 << element.number_format.bits) - 1, 2.0 ** -(number.mantissa_bits + 1)
    assert (np.abs(found - given) <= step * max(0.51, 0.01 + top * epsilon) + epsilon * np.abs(given)).all()


def test_a_constant_group_has_scale_zero():
    """And one without values is all zero; neither gives a NaN."""
    matrix = np.zeros((1, 128), np.uint16)
    matrix[0, :3] = 0x3C00
    scaled = quantize(matrix, INT4, FP16)
    assert scaled.scales.tolist() == [[[0, 0x3C00], [0, 0]]] and not scaled.codes.any()
    np.testing.assert_array_equal(scaled.dense(), matrix)
