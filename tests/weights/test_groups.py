"""Codes without a bitmap, and their numbers against the formula of the paper, computed another way."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.errors import ShapeError, StreamError
from nearflash.abi.topk import StreamFault
from nearflash.weights.groups import expand_groups, pack_groups
from nearflash.weights.quantize import quantize

OUTPUTS = {ElementFormat.FP16: np.dtype(np.float16), ElementFormat.BF16: np.dtype(ml_dtypes.bfloat16)}


def matrix_of(output, shape=(6, 130), seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(OUTPUTS[output])


def packed(values, bits):
    return np.frombuffer(pack_groups(quantize(values, bits, present=np.ones(values.shape, bool))), np.uint8)


def expanded(data, shape, bits, output):
    out = np.empty(shape, np.uint16)
    expand_groups(data, out, bits, output)
    return out.view(OUTPUTS[output])


def by_the_formula(values, bits, dtype):
    """round((x - min) / (max - min) · (2^b - 1)), each operation exact but for the rounding of scale and minimum."""
    top, found = (1 << bits) - 1, np.empty_like(values)
    for row, first in np.ndindex(len(values), -(-values.shape[1] // 64)):
        group = values[row, 64 * first : 64 * first + 64].astype(np.float64)
        scale = Fraction(float(dtype.type(np.float32(group.max() - group.min()) / np.float32(top))))
        low = Fraction(float(dtype.type(group.min())))
        for column, value in enumerate(group):
            code = round((Fraction(value) - low) / scale) if scale else 0
            code = min(max(code, 0), top)
            found[row, 64 * first + column] = dtype.type(np.float32(float(code * scale)) + np.float32(float(low)))
    return found


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("output", OUTPUTS)
def test_values_are_those_of_the_papers_formula(bits, output):
    values = matrix_of(output)
    found = expanded(packed(values, bits), values.shape, bits, output)
    assert np.array_equal(found, by_the_formula(values, bits, OUTPUTS[output]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("output", OUTPUTS)
def test_no_value_is_further_away_than_half_a_step_and_its_rounding(bits, output):
    values = matrix_of(output, (40, 640), seed=2).astype(np.float32)
    narrow = values.astype(OUTPUTS[output])
    found = expanded(packed(narrow, bits), values.shape, bits, output).astype(np.float32)
    grouped, wide = found.reshape(40, 10, 64), narrow.astype(np.float32).reshape(40, 10, 64)
    step = (wide.max(2) - wide.min(2)) / ((1 << bits) - 1)
    epsilon = float(ml_dtypes.finfo(OUTPUTS[output]).eps)
    room = 0.5 * step + epsilon * (1 << bits) * step + epsilon * np.abs(wide).max(2)
    assert (np.abs(grouped - wide) <= room[..., None]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0])
def test_a_constant_group_gives_its_constant_and_not_nan(bits, value):
    values = np.full((3, 100), value, np.float16)
    assert np.array_equal(expanded(packed(values, bits), values.shape, bits, ElementFormat.FP16), values)


@pytest.mark.parametrize(("columns", "bits", "size"), [(64, 8, 4 + 64), (65, 8, 8 + 65), (64, 4, 4 + 32), (65, 4, 41)])
def test_the_size_of_a_row(columns, bits, size):
    assert len(packed(matrix_of(ElementFormat.FP16, (5, columns)), bits)) == 5 * size


@pytest.mark.parametrize("bits", [8, 4])
def test_another_length_is_named(bits):
    values = matrix_of(ElementFormat.FP16)
    data = packed(values, bits)
    for wrong in (data[:-1], np.append(data, np.uint8(0)), data[:0]):
        with pytest.raises(StreamError, match=rf"a matrix of 6 x 130 int{bits} codes must have {len(data)} bytes") as e:
            expanded(wrong, values.shape, bits, ElementFormat.FP16)
        assert e.value.fault is StreamFault.LENGTH


def test_any_scale_and_code_expands_to_something():
    rng = np.random.default_rng(3)
    for bits, size in ((8, 4 + 64), (4, 4 + 32)):
        data = rng.integers(0, 256, 50 * size, np.uint8)  # scales that are infinite or NaN among them
        found = expanded(data, (50, 64), bits, ElementFormat.FP16)
        assert set(found[np.isnan(found)].view(np.uint16)) <= {0x7E00}


def test_a_pruned_matrix_needs_a_bitmap():
    values = matrix_of(ElementFormat.FP16)
    values[2, 2] = 0
    with pytest.raises(ShapeError, match="matrix must have a value everywhere, not pruned: pack it as a bitmap"):
        pack_groups(quantize(values, 8))


def test_many_rows_are_expanded_in_threads_to_the_same_values():
    values = matrix_of(ElementFormat.FP16, (3001, 900), seed=3)
    found = expanded(packed(values, 4), values.shape, 4, ElementFormat.FP16)
    for first in (0, 1499, 2990):
        part = values[first : first + 11]
        assert np.array_equal(found[first : first + 11], expanded(packed(part, 4), part.shape, 4, ElementFormat.FP16))


def test_a_thread_that_flushes_subnormals_gets_the_same_codes_back():
    """The caller's own thread computes; it flushed what torch.set_flush_denormal(True) had made it flush."""
    torch = pytest.importorskip("torch")
    values = (np.random.default_rng(5).standard_normal((4, 200)) * 1e-38).astype(ml_dtypes.bfloat16)
    data = packed(values, 8)
    expected = expanded(data, values.shape, 8, ElementFormat.BF16)
    assert (expected != 0).any()
    torch.set_flush_denormal(True)
    try:
        assert expanded(data, values.shape, 8, ElementFormat.BF16).tobytes() == expected.tobytes()
    finally:
        torch.set_flush_denormal(False)
