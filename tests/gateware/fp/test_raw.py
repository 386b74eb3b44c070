import numpy as np
import pytest

from nearflash.gateware.fp.raw import EXP_ZERO, RAW, Pack, RawLayout, Unpack, widen
from nearflash.model.fp.bits import canonical, is_signaling
from nearflash.verify.fixtures.vectors import corner_values, operands

BITS = np.concatenate([corner_values(), *operands(800, 1, seed=41)])


@pytest.fixture(scope="module")
def unpacked(simulate):
    return simulate(Unpack(), {"i": BITS}, ["o", "signaling"])


def test_unpack(unpacked):
    value = BITS.view(np.float32)
    for bits, exact, word in zip(BITS.tolist(), value.tolist(), unpacked["o"], strict=True):
        raw = RAW.from_bits(word)
        assert (raw.zero, raw.inf, raw.nan) == (exact == 0, np.isinf(exact), np.isnan(exact))
        assert np.isnan(exact) or raw.sign == bits >> 31
        if exact == 0:
            assert (raw.sig, raw.exp) == (0, EXP_ZERO)
        elif np.isfinite(exact):
            assert raw.sig >> 23 == 1
            assert raw.sig * 2.0 ** (raw.exp - 23) == abs(exact)


def test_unpack_tells_signaling_nans(unpacked):
    np.testing.assert_array_equal(unpacked["signaling"], is_signaling(BITS))


def test_pack_is_the_inverse(unpacked, simulate):
    packed = simulate(Pack(), {"i": unpacked["o"]}, ["o"])["o"]
    np.testing.assert_array_equal(packed, canonical(BITS.view(np.float32)))


def test_a_constant_zero_aligns_as_the_smallest():
    assert RAW.const({"zero": 1, "sign": 1}).exp == EXP_ZERO
    assert RAW.const({"sig": 1 << 23, "exp": 3}).exp == 3


def test_widened_keeps_the_value(simulate):
    one = RAW.const({"sig": 1 << 23, "exp": -5, "sign": 1})
    wide = RawLayout(51).from_bits(int.from_bytes(bytes(7), "little"))
    assert wide.sig == 0
    assert widen(RAW(one.as_value()), RawLayout(51)).shape().sig_bits == 51


def test_width_message():
    with pytest.raises(ValueError, match="sig_bits must be at least 2, not 1"):
        RawLayout(1)
