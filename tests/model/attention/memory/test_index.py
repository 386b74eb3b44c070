"""The quantised index: half a step of error, extremes kept, the order of the nibbles."""

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import FormatError
from nearflash.model.attention.memory.index import QuantisedBlock, quantise


@pytest.mark.parametrize("form", [IndexFormat.INT8, IndexFormat.INT4])
def test_error_is_half_a_step(form):
    rng = np.random.default_rng(1)
    k = (rng.standard_normal((256, 32)) * 10.0 ** rng.uniform(-3, 3, 32)).astype(np.float16)
    block, levels = quantise(k, form), (1 << form.bits) - 1
    scale, zero = block.scale.astype(np.float64), block.zero.astype(np.float64)
    near = zero + scale * block.codes
    clipped = levels * np.abs((k.max(0) - zero) / levels - scale)  # what rounding the scale takes off the largest
    assert (np.abs(near - k) <= scale * 0.5 + clipped).all()
    assert (block.codes.min(0) == 0).all() and (block.codes.max(0) == levels).all()


def test_constant_tiny_and_signed_zero_rows():
    k = np.zeros((16, 4), np.float16)
    k[:, 0] = -7.5
    k[::2, 1] = 2.0**-24  # a range that no scale can tell apart
    k[3, 2] = -0.0
    k[:, 3] = np.linspace(-65504, 65504, 16)
    block = quantise(k, IndexFormat.INT4)
    assert block.scale[:3].tolist() == [0, 0, 0] and block.zero[:3].view(np.uint16).tolist() == [0xC780, 0, 0]
    assert not block.codes[:, :3].any() and block.codes[:, 3].tolist() == list(range(16))


def test_infinities_and_nan_pass_into_the_factors():
    for bad in (np.inf, -np.inf, np.nan):
        k = np.ones((16, 1), np.float16)
        k[5] = bad
        block = quantise(k, IndexFormat.INT8)
        assert not np.isfinite([block.scale, block.zero]).all()


def test_low_nibble_first():
    codes = np.array([[1, 2], [3, 4], [5, 6], [15, 8]], np.uint8)
    for form, rows in ((IndexFormat.INT4, [[0x31, 0xF5], [0x42, 0x86]]), (IndexFormat.INT8, codes.T.tolist())):
        assert QuantisedBlock(codes, *np.zeros((2, 2), np.float16), form).rows().tolist() == rows


def test_fp16_is_no_quantised_format():
    with pytest.raises(FormatError, match="index format must be INT8 or INT4 to quantise, not FP16"):
        quantise(np.zeros((16, 4), np.float16), IndexFormat.FP16)
