"""fp16 conversion against SoftFloat; keys against the order of the numbers."""

import numpy as np

from nearflash.model.attention.numerics.fp16 import order_key, to_fp16
from nearflash.verify.fixtures.softfloat import softfloat


def test_to_fp16_equals_softfloat():
    rng = np.random.default_rng(1)
    value = rng.integers(-(1 << 24), 1 << 24, 20_000) >> rng.integers(0, 24, 20_000)
    for lsb in (-24, -12, -8, -3):
        exact = np.ldexp(value.astype(np.float32), lsb)  # 24 bits: exact in fp32
        expected, _ = softfloat("to_fp16", exact.view(np.uint32))
        expected = np.where(value == 0, 0, expected)
        np.testing.assert_array_equal(to_fp16(value, lsb).view(np.uint16), expected)


def test_a_value_longer_than_fp32_rounds_once():
    value = (np.array([1 << 11, 1]) * 2 + 1 << 30) + np.array([0, 1])
    assert to_fp16(value, -30).tolist() == [4096, 3]
    tie = ((1 << 11) + 1 << 30) + np.array([-1, 0, 1])
    assert to_fp16(tie, -30).tolist() == [2048, 2048, 2050]


def test_keys_order_as_the_numbers():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]
    by_key = values[np.argsort(order_key(values), kind="stable")]
    assert (np.diff(by_key[np.isfinite(by_key)].astype(np.float64)) >= 0).all()
    assert len(np.unique(order_key(values))) == len(values) - 1, "only -0 and +0 share a key"
    assert order_key(np.array([-0.0, 0.0, 1.0, -1.0], np.float16)).tolist() == [0x8000, 0x8000, 0xBC00, 0x43FF]
