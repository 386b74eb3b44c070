"""Narrow state: what a format can hold stays, all else is rounded between its neighbours, without bias."""

import numpy as np
import pytest

from nearflash.abi.optimizers.state import BLOCK_PARAMS, MX8, TILE_PARAMS, StateFormat
from nearflash.model.update.state import decode, dither, encode, join_master, split_master

NARROW = [StateFormat.BF16, StateFormat.MX8]
ZERO, ALMOST_ONE = 0, 0xFFFF


def values(role: str, n: int, decades: float, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-decades, decades, n)).astype(np.float32)
    return np.abs(x) if role == "v" else x


def constant(value: int, n: int) -> np.ndarray:
    return np.full(n, value, np.int64)


@pytest.mark.parametrize("role", ["m", "v"])
@pytest.mark.parametrize("state_format", NARROW)
def test_what_was_decoded_is_encoded_as_it_was(state_format, role):
    """Under any dither; so a state that nothing moves stands still. mx8: every code, at the largest in its block."""
    if state_format is StateFormat.BF16:
        stored = [np.arange(1 << 16, dtype=np.uint16)]
        stored[0] = stored[0][(stored[0] & 0x7FFF) <= 0x7F80]
    else:
        codes = np.arange(256, dtype=np.uint8)
        codes = codes[(codes != 0x80) | (MX8[role].signed is False)]
        codes = (
            codes[codes & 0x7F <= MX8[role].top << 3 | 7]
            if MX8[role].signed
            else codes[codes <= MX8[role].top << 3 | 7]
        )
        scale = np.uint8([MX8[role].least_scale, 100, 127, 254])
        top = np.uint8(MX8[role].top << 3)
        blocks = np.stack([np.concatenate([[top], codes[i : i + 31], np.zeros(31 - codes[i : i + 31].size, np.uint8)])
                           for i in range(0, codes.size, 31)]).astype(np.uint8)  # fmt: skip
        stored = [np.tile(blocks, (len(scale), 1)).ravel(), np.repeat(scale, len(blocks))]
    x = decode(stored, role, state_format)
    for dithers in (ZERO, 0x1234, ALMOST_ONE):
        again = encode(x, role, state_format, constant(dithers, x.size))
        for actual, expected in zip(again, stored, strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("role", ["m", "v"])
@pytest.mark.parametrize("state_format", NARROW)
@pytest.mark.parametrize("decades", [0.5, 4, 30])
def test_rounding_goes_to_one_of_two_neighbours_by_the_dither(state_format, role, decades):
    x = values(role, 4096, decades)
    down, up = (decode(encode(x, role, state_format, constant(d, x.size)), role, state_format)
                for d in (ZERO, ALMOST_ONE))  # fmt: skip
    assert np.all(np.abs(up) >= np.abs(down))
    small = np.zeros(x.size, bool)
    if state_format is StateFormat.MX8:
        element = MX8[role]
        _, scales = encode(x, role, state_format, constant(0, x.size))
        quantum = np.ldexp(1.0, np.repeat(scales, BLOCK_PARAMS).astype(int) - 127 - element.top - 2)
        gap = np.maximum(np.abs(x.astype(np.float64)) / 8, quantum)
        small = np.abs(x) < quantum
    else:
        gap = np.maximum(np.abs(x.astype(np.float64)) / 128, 2.0**-133)
    assert np.all(np.abs(down[~small]) <= np.abs(x[~small]))
    assert np.all((np.abs(up) >= np.abs(x) * (1 - 2.0**-16)) | (np.abs(x) < gap * 2.0**-15))
    assert np.all(np.abs(up.astype(np.float64)) - np.abs(down) <= gap * (1 + 1e-9))


@pytest.mark.parametrize(("role", "state_format", "bound"), [
    ("m", StateFormat.BF16, 2.0**-7), ("v", StateFormat.BF16, 2.0**-7),
    ("m", StateFormat.MX8, 2.0**-3), ("v", StateFormat.MX8, 2.0**-3),
])  # fmt: skip
def test_the_mean_over_the_steps_is_the_value(role, state_format, bound):
    """Within four standard errors of a fair dither, for each of 64 parameters, over 4,000 steps."""
    x, steps = values(role, 64, 1, seed=3), 4000
    seen = np.stack([decode(encode(x, role, state_format, dither(role, step, 512, x.size)), role, state_format)
                     for step in range(1, steps + 1)]).astype(np.float64)  # fmt: skip
    gap = seen.max(axis=0) - seen.min(axis=0)
    assert np.all(gap <= bound * np.abs(x) * 1.0001)
    assert np.all(np.abs(seen.mean(axis=0) - x) <= 4 * 0.5 * gap / np.sqrt(steps) + 2.0**-15 * gap)


def test_the_errors_of_a_tile_nearly_cancel():
    """The dithers of a tile are equally spaced: so many go up as the fraction says, to one."""
    x = np.full(TILE_PARAMS, 1 + 2.0**-7 * 0.3, np.float32)
    (stored,) = encode(x, "m", StateFormat.BF16, dither("m", 9, 3 * TILE_PARAMS, TILE_PARAMS))
    assert abs(np.count_nonzero(stored == 0x3F81) - 0.3 * TILE_PARAMS) <= 1


def test_dithers_differ_between_arrays_steps_and_tiles():
    runs = [dither(role, step, tile * TILE_PARAMS, 256) for role in "mv" for step in (1, 2) for tile in (0, 1)]
    assert len({run.tobytes() for run in runs}) == len(runs)
    whole = dither("m", 5, 100, 2 * TILE_PARAMS)
    np.testing.assert_array_equal(whole[300:400], dither("m", 5, 400, 100))


def test_a_small_v_never_becomes_zero_and_a_small_m_may():
    x = np.full(BLOCK_PARAMS, 1e-30, np.float32)
    x[0], x[1] = 1.0, 0.0
    for dithers in (ZERO, ALMOST_ONE):
        for role, least in (("v", 2.0**-32), ("m", 0.0)):
            seen = decode(encode(x, role, StateFormat.MX8, constant(dithers, x.size)), role, StateFormat.MX8)
            assert (seen[0], seen[1]) == (1.0, 0.0)
            assert np.all(seen[2:] == least)


def test_infinities_and_nan_have_a_code_and_spare_their_neighbours():
    x = np.full(BLOCK_PARAMS, 0.5, np.float32)
    x[:2] = np.inf, np.nan
    for role in "mv":
        codes, scales = encode(x, role, StateFormat.MX8, constant(ZERO, x.size))
        assert codes[0] == codes[1] == MX8[role].not_a_number and scales.tolist() == [126]
        seen = decode([codes, scales], role, StateFormat.MX8)
        assert np.isnan(seen[:2]).all() and np.all(seen[2:] == 0.5)


def test_what_a_new_file_holds_is_zero():
    for role in "mv":
        stored = [np.zeros(BLOCK_PARAMS, np.uint8), np.zeros(1, np.uint8)]
        assert decode(stored, role, StateFormat.MX8).tobytes() == bytes(4 * BLOCK_PARAMS)


@pytest.mark.parametrize("sign", [0, 1])
def test_a_split_master_comes_back_and_its_weight_is_the_nearest_with_ties_away(sign):
    """Every exponent, even and odd weights, every rest: the largest finite numbers too, whose weight is infinite."""
    rests = np.arange(1 << 16, dtype=np.uint32)
    for exponent in range(256):
        for upper in (0, 0x7F):
            words = np.uint32(sign << 31 | exponent << 23 | upper << 16) + rests
            weight, rest = split_master(words)
            nan = (words & 0x7FFFFFFF > 0x7F800000) & (rests > 0)
            np.testing.assert_array_equal(join_master(weight, rest), np.where(nan, 0x7FC00000, words))
            if exponent == 255:
                np.testing.assert_array_equal(weight[nan], 0x7FC0)
                continue
            # In integers, as magnitudes are: the distance to the weight is half a unit of it at most.
            away = (words >> 16).astype(np.int64) + (rests >= 0x8000)
            np.testing.assert_array_equal(weight, away)


def test_what_a_bf16_weight_holds_has_no_rest():
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    weight, rest = split_master(words)
    np.testing.assert_array_equal(weight, words >> 16)
    assert not rest.any()
