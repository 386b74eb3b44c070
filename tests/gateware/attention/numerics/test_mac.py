import numpy as np
import pytest

from nearflash.gateware.attention.numerics.mac import ExactMac
from nearflash.model.attention.numerics.dot import dot_truncated, exact_dot
from nearflash.model.attention.numerics.product import exceeds

LANES = 4


@pytest.fixture(scope="module")
def unit(num_unit):
    return num_unit(ExactMac())


def run(unit, a, b, lengths, *, cut=0, limit_shift=8, idle_percent=0, seed=0):
    """Feed dot products of `lengths` beats, idle beats between with other values; the output rows that are valid."""
    rng = np.random.default_rng(seed)
    beats = len(a) // LANES
    ends = np.cumsum(lengths) - 1
    rows = np.flatnonzero(rng.integers(0, 100, 4 * beats) >= idle_percent)[:beats]
    count = rows[-1] + 1
    inputs = {"truncate": cut, "limit_shift": limit_shift}
    for name, values in (("a", a), ("b", b)):
        for lane in range(LANES):
            column = rng.integers(0, 1 << 16, count, dtype=np.uint16)
            column[rows] = values[lane::LANES]
            inputs[f"{name}__{lane}"] = column
    first, last = np.zeros(beats, np.uint8), np.zeros(beats, np.uint8)
    last[ends], first[0], first[ends[:-1] + 1] = 1, 1, 1
    for name, values in (("valid", np.ones(beats, np.uint8)), ("first", first), ("last", last)):
        column = rng.integers(0, 2, count, dtype=np.uint8) if name != "valid" else np.zeros(count, np.uint8)
        column[rows] = values
        inputs[name] = column
    got = unit.run(inputs)
    np.testing.assert_array_equal(got["o_valid"], (inputs["valid"] & inputs["last"]) != 0)  # LATENCY, too
    return {name: values[rows[ends]] for name, values in got.items()}


def pieces(lengths):
    ends = np.cumsum(lengths) * LANES
    return [slice(end - length * LANES, end) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("idle_percent", [0, 50])
def test_group_sums_equal_the_model(unit, fp16_bits, signed_integers, idle_percent):
    lengths = np.random.default_rng(1).integers(1, 65, 600)
    a, b = (fp16_bits(lengths.sum() * LANES, seed) for seed in (2, 3))
    got = run(unit, a, b, lengths, idle_percent=idle_percent)
    x, y = a.view(np.float16), b.view(np.float16)
    expected = [exact_dot(x[part][None], y[part])[0] for part in pieces(lengths)]
    assert signed_integers(got["o"], 90).tolist() == expected
    assert not got["o_nonfinite"].any()


def test_cut_sums_equal_the_model(unit, fp16_bits, signed_integers):
    lengths = np.random.default_rng(4).integers(1, 65, 300)
    a, b = (fp16_bits(lengths.sum() * LANES, seed) for seed in (5, 6))
    got = run(unit, a, b, lengths, cut=1)
    x, y = a.view(np.float16), b.view(np.float16)
    expected = [int(dot_truncated(x[part], y[part])) << 32 for part in pieces(lengths)]
    assert signed_integers(got["o"], 90).tolist() == expected


def test_widest_sums(unit, signed_integers):
    largest = np.full(64 * LANES, 0x7BFF, np.uint16)
    for sign in (0, 0x8000):
        got = run(unit, largest, largest ^ np.uint16(sign), [64])
        assert signed_integers(got["o"], 90).tolist() == [(-1 if sign else 1) * 256 * 65504**2 << 48]


@pytest.mark.parametrize("limit_shift", range(9))
def test_range_rule_equals_the_model(unit, signed_integers, limit_shift):
    rng = np.random.default_rng(limit_shift)
    lengths = rng.integers(1, 9, 200)
    size = lengths.sum() * LANES
    edge = (19 - limit_shift) / 2
    a = np.ldexp(rng.integers(1024, 2049, size) / 2048, 1 + round(edge)).astype(np.float16)
    factor = rng.choice([0.25, 0.5, 0.99, 1, 1.002], size, p=[0.5, 0.4, 0.05, 0.025, 0.025])
    b = (2.0 ** (19 - limit_shift) / a.astype(float) * factor * rng.choice([-1, 1], size)).astype(np.float16)
    got = run(unit, a.view(np.uint16), b.view(np.uint16), lengths, limit_shift=limit_shift, idle_percent=30)
    expected = [exceeds(a[part], b[part], 1 << limit_shift).any() for part in pieces(lengths)]
    assert got["o_exceeds"].astype(bool).tolist() == expected
    assert 0.1 < np.mean(expected) < 0.9


def test_nonfinite_anywhere_in_a_sum_is_flagged(unit, fp16_bits):
    rng = np.random.default_rng(9)
    lengths = rng.integers(1, 9, 200)
    a, b = (fp16_bits(lengths.sum() * LANES, seed) for seed in (10, 11))
    special = np.array([0x7C00, 0xFC00, 0x7E00, 0x7C01], np.uint16)
    for values in (a, b):
        hit = rng.integers(0, 40, len(values)) == 0
        values[hit] = rng.choice(special, hit.sum())
    got = run(unit, a, b, lengths, idle_percent=30)
    bad = ~(np.isfinite(a.view(np.float16)) & np.isfinite(b.view(np.float16)))
    assert got["o_nonfinite"].astype(bool).tolist() == [bad[part].any() for part in pieces(lengths)]
