"""State formats: sizes, the elements of mx8, and the dither that every backend must reproduce."""

import pytest

from nearflash.abi.optimizers.state import (
    BLOCK_PARAMS,
    DITHER_BITS,
    MX8,
    ROLES,
    TILE_PARAMS,
    StateFormat,
    dither_key,
    dither_pattern,
)


def test_codes_and_sizes():
    assert [(form.code, form.element_bytes, form.block_params) for form in StateFormat] == [
        (0, 4, 1),
        (1, 2, 1),
        (2, 1, BLOCK_PARAMS),
    ]


@pytest.mark.parametrize(
    ("form", "array", "size_bytes"),
    [
        (StateFormat.MX8, "p", 4 * 33),
        (StateFormat.MX8, "m", 33),
        (StateFormat.MX8, "v_scale", 2),
        (StateFormat.BF16, "v", 66),
        (StateFormat.FP32, "m", 132),
    ],
)
def test_bytes_of_an_array(form, array, size_bytes):
    assert form.array_bytes(array, 33) == size_bytes


def test_elements_of_m_and_v():
    """m: sign, 4 and 3 bits; v: 5 and 3 bits."""
    m, v = MX8["m"], MX8["v"]
    assert (m.signed, m.exponent_bits, m.not_a_number, m.top, m.least_scale) == (True, 4, 0x7F, 14, 17)
    assert (v.signed, v.exponent_bits, v.not_a_number, v.top, v.least_scale) == (False, 5, 0xFF, 30, 33)
    assert v.keeps_small and not m.keeps_small
    for element in (m, v):
        assert element.signed + element.exponent_bits + element.MANTISSA_BITS == 8


def test_the_smallest_element_at_the_least_scale_is_a_normal_number():
    for element in MX8.values():
        exponent = 1 - element.MANTISSA_BITS - element.top + element.least_scale - 127
        assert exponent >= -126


@pytest.mark.parametrize(
    ("place", "pattern"), [(0, 0), (1, 0x8643), (2, 0x0C86), (32, 0xCA61), (TILE_PARAMS - 1, 0x9B3E)]
)
def test_pattern(place, pattern):
    assert dither_pattern(place) == pattern


def test_the_pattern_is_linear():
    for a, b in ((1, 2), (5, 4096), (8191, 77)):
        assert dither_pattern(a ^ b) == dither_pattern(a) ^ dither_pattern(b)


def test_keys_differ_by_step_array_and_tile():
    keys = {dither_key(step, role, tile) for step in (1, 2, 3) for role in ROLES for tile in (0, 1, 1 << 20)}
    assert len(keys) == 18
    assert all(0 <= key < 1 << DITHER_BITS for key in keys)
    assert dither_key(1, "m", 0) == dither_key(1 + (1 << 31), "m", 0), "the step's low bits"


def test_keys_are_spread():
    """Over 4,096 steps every sixteenth of the range has its share, within 5 standard deviations."""
    counts = [0] * 16
    for step in range(4096):
        counts[dither_key(step, "v", 3) >> 12] += 1
    assert all(abs(count - 256) < 5 * 16 for count in counts)
