from itertools import product

import numpy as np
import pytest

from nearflash.abi.bitmap import Coding, ElementFormat
from nearflash.abi.errors import CommandError, FormatError, NonFiniteError, ShapeError
from nearflash.model.weights import bitmap, dequantize
from nearflash.weights import QuantizedMatrix, compress_tensor, pack, quantize

FP16, BF16, INT8, INT4 = ElementFormat
SHAPES = [(1, 1), (5, 513), (3, 512), (4, 100), (33, 64)]


def random_patterns(seed, shape, density, element, *, normal):
    """Normal values as weights have them, or any patterns: subnormals, infinities, NaNs."""
    rng = np.random.default_rng(seed)
    if normal and element is not INT8:
        values = rng.normal(0, 0.02, shape).astype(np.float32)
        drawn = values.astype(np.float16).view(np.uint16) if element is FP16 else values.view("<u2")[..., 1::2]
    else:
        bits = element.number_format.bits
        drawn = rng.integers(1, 1 << bits, shape, f"u{bits // 8}")
    return np.where(rng.random(shape) < density, drawn, drawn.dtype.type(0))


@pytest.mark.parametrize(("shape", "density"), [*product(SHAPES, (0.0, 0.3, 1.0))])
@pytest.mark.parametrize(("element", "dtype"), [(FP16, np.float16), (BF16, np.uint16), (INT8, np.int8)])
@pytest.mark.parametrize("normal", [True, False])
def test_packing_equals_the_model(element, dtype, shape, density, normal):
    found = random_patterns(1, shape, density, element, normal=normal)
    for coding in ("plain",) if element is INT8 else ("plain", "exponents"):
        for group_rows in (1, 2, 100):
            expected = bitmap.pack(found, element, group_rows, Coding[coding.upper()])
            assert pack(found.view(dtype), coding=coding, group_rows=group_rows) == expected


@pytest.mark.parametrize(("shape", "density"), [*product(SHAPES, (0.0, 0.3, 1.0))])
@pytest.mark.parametrize(("output", "dtype"), [(FP16, np.float16), (BF16, np.uint16)])
@pytest.mark.parametrize(("bits", "element"), [(8, INT8), (4, INT4)])
def test_quantised_matrices_equal_the_models(bits, element, output, dtype, shape, density):
    found = random_patterns(2, shape, density, output, normal=True)
    for present in (None, np.random.default_rng(3).random(shape) < 0.5):
        expected = dequantize.quantize(found, element, output, present)
        actual = quantize(found.view(dtype), bits, present=present)
        for name in ("codes", "present", "scales"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert pack(actual, group_rows=2) == bitmap.pack_scaled(expected, 2)


def test_exponents_are_coded_unless_there_are_none():
    matrix = np.ones((4, 600), np.float16)
    assert pack(matrix) == pack(matrix, coding="exponents") != pack(matrix, coding="plain")
    assert pack(matrix.astype(np.int8)) == pack(matrix.astype(np.uint8), coding="plain")


def test_a_view_packs_as_its_copy_does():
    matrix = np.random.default_rng(1).standard_normal((64, 40)).astype(np.float16)
    assert pack(matrix.T[::2]) == pack(matrix.T[::2].copy())


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (np.ones((2, 2), np.float32), {}, FormatError, "matrix must be of float16, .*, not of float32"),
        (np.ones(4, np.float16), {}, ShapeError, r"must have the shape \(rows, columns\), both at least 1, not \(4,\)"),
        (np.ones((0, 4), np.float16), {}, ShapeError, r"both at least 1, not \(0, 4\)"),
        (np.ones((2, 2), np.float16), {"coding": "lz4"}, CommandError, "one of exponents, plain, not 'lz4'"),
        (np.ones((2, 2), np.int8), {"coding": "exponents"}, FormatError, "must be 'plain' for int8"),
        (np.ones((2, 2), np.float16), {"group_rows": 0}, ShapeError, "group_rows must be between 1 and .*, not 0"),
    ],
)
def test_bad_matrices_raise_named_errors(matrix, options, error, message):
    with pytest.raises(error, match=message):
        pack(matrix, **options)


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (np.ones((2, 2), np.float16), {"bits": 3}, CommandError, "bits must be 4 or 8, not 3"),
        (np.ones((2, 2), np.int8), {"bits": 4}, FormatError, "must be of fp16 or bf16 to be quantised, not of int8"),
        (np.full((2, 2), np.nan, np.float16), {"bits": 4}, NonFiniteError, "matrix must be finite"),
        (
            np.ones((2, 2), np.float16),
            {"bits": 4, "present": np.ones(2, bool)},
            ShapeError,
            "not bool",
        ),
    ],
)
def test_what_has_no_scale_raises_named_errors(matrix, options, error, message):
    with pytest.raises(error, match=message):
        quantize(matrix, **options)


def test_the_tensor_without_a_scale_is_named():
    """Regression: of a model's hundreds the error did not state which."""
    with pytest.raises(NonFiniteError, match=r"tensor 'layers.1.up': matrix must be finite, not NaN"):
        compress_tensor("layers.1.up", np.full((2, 2), np.nan, np.float16), "groups", 8)


def test_quantised_matrices_have_no_exponents_to_code():
    quantised = quantize(np.ones((1, 1), np.float16), 4)
    assert isinstance(quantised, QuantizedMatrix)
    with pytest.raises(FormatError, match="'plain' for int4"):
        pack(quantised, coding="exponents")
