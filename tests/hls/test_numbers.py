"""Fp32, half and bfloat16 of the templates against the model, on edge values in every combination and random bits."""

import ctypes
import itertools

import numpy as np
import pytest

from nearflash.model.fp.convert import to_bf16, to_fp16
from nearflash.model.fp.muladd import fma
from nearflash.sim.hls.build import build_shim, shim

NAN = np.uint32(0x7FC00000)
EDGES = np.array([sign << 31 | bits for sign in (0, 1) for bits in (
    0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x33800000, 0x33800001, 0x34000000, 0x3F7FFFFF,
    0x3F800000, 0x3F800001, 0x40490FDB, 0x477FF000, 0x7F000000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7FC00000,
    0x7F800001)], np.uint32)  # fmt: skip
REFERENCE = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "square_root": lambda a, b, c: np.sqrt(a), "fused": fma,
}  # fmt: skip


@pytest.fixture(scope="module")
def numbers():
    return ctypes.CDLL(str(build_shim("numbers", shim("hls_numbers.cpp"))))


@pytest.fixture(scope="module")
def operands():
    """Three operands, uint32, (3, n): edges in every pair, random patterns, and near each other (cancellation)."""
    rng = np.random.default_rng(5)
    edges = np.array(list(itertools.product(EDGES, EDGES, EDGES[::3])), np.uint32).T
    patterns = rng.integers(0, 1 << 32, (3, 200_000), np.uint32)
    near = (
        rng.integers(0x3F000000, 0x40000000, (3, 100_000), np.uint32)
        | rng.integers(0, 2, (3, 100_000), np.uint32) << 31
    )
    small = rng.integers(0, 0x4000000, (3, 100_000), np.uint32)
    return np.ascontiguousarray(np.concatenate([edges, patterns, near, small], axis=1))


def run(library, name, operands):
    out = np.empty(operands.shape[1], np.uint32)
    getattr(library, name)(ctypes.c_int64(out.size), *(ctypes.c_void_p(x.ctypes.data) for x in (*operands, out)))
    return out


@pytest.mark.parametrize("name", REFERENCE)
def test_every_operation_is_rounded_once_and_keeps_subnormals(numbers, operands, name):
    a, b, c = operands.view(np.float32)
    with np.errstate(all="ignore"):
        binary = isinstance(REFERENCE[name], np.ufunc)
        expected = np.asarray(REFERENCE[name](a, b) if binary else REFERENCE[name](a, b, c), np.float32)
    bits = np.where(np.isnan(expected), NAN, expected.view(np.uint32))
    np.testing.assert_array_equal(run(numbers, name, operands), bits)


def test_a_product_that_cancels_the_addend_is_exact(numbers):
    """fma(a, b, -rn(a·b)) is the rounding error of the product."""
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((2, 100_000)).astype(np.float32)
    operands = np.stack([a, b, -(a * b)]).view(np.uint32)
    expected = (a.astype(np.float64) * b - (a * b).astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(run(numbers, "fused", operands).view(np.float32), expected)


def test_comparisons(numbers, operands):
    a, b, _ = operands.view(np.float32)
    expected = (a < b) | (a <= b).astype(np.uint32) << 1 | (a == b).astype(np.uint32) << 2
    np.testing.assert_array_equal(run(numbers, "compare", operands), expected)


@pytest.mark.parametrize(("name", "reference"), [("to_half", to_fp16), ("to_bfloat16", to_bf16)])
def test_copies_are_rounded_to_nearest_even(numbers, name, reference):
    """Every sign, exponent and leading bit, with the tails around each half-way."""
    tops = np.arange(1 << 20, dtype=np.uint32) << np.uint32(12)
    values = (tops[:, None] | np.array([0, 1, 0x7FF, 0x800, 0x801, 0xFFF], np.uint32)).ravel()
    operands = np.stack([values] * 3)
    np.testing.assert_array_equal(run(numbers, name, operands), reference(values.view(np.float32)))
