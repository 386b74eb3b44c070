"""What compiled loops are made of, against numpy: every fp16 number, every length around a vector."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nearflash.inference.engines.cpu import compiled

EVERY = np.arange(1 << 16, dtype=np.uint16)
LENGTHS = (0, 1, 3, 7, 8, 15, 16, 17, 31, 64, 100)


@compiled.compiled
def narrowed(values, out):
    """Bits of fp16."""
    for i in range(len(values)):
        out[i] = compiled.fp16_bits(values[i])


@compiled.compiled
def exponential(values, out):
    """e^x of each."""
    for i in range(len(values)):
        out[i] = compiled.exp(values[i])


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def numbers(rng, count):
    return rng.standard_normal(count).astype(np.float32)


def test_every_fp16_number_is_widened():
    wide = np.empty(len(EVERY), np.float32)
    compiled.widen(EVERY, 0, wide, 0, len(EVERY))
    np.testing.assert_array_equal(wide, EVERY.view(np.float16).astype(np.float32))


def test_fp32_numbers_are_rounded_to_the_nearest_even_fp16():
    """Every fp16 number, what lies between two of them, and what is just beside that; too large ones are infinite."""
    own = np.sort(EVERY.view(np.float16)[np.isfinite(EVERY.view(np.float16))]).astype(np.float32)
    middle = (own[:-1] + own[1:]) / 2
    values = np.concatenate([own, middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9)),
                             np.array([65519.9, 65520.0, 1e9, -1e9, 1e-9, -1e-9], np.float32)])  # fmt: skip
    out = np.empty(len(values), np.uint16)
    narrowed(values, out)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(out, want.view(np.uint16))


def test_exponentials_are_right_to_their_bound():
    values = np.concatenate([np.linspace(-86.99, 0, 200_001), -(2.0 ** np.arange(-30.0, 6.0)), [0.0]]).astype(
        np.float32
    )
    out = np.empty(len(values), np.float32)
    exponential(values, out)
    exact = np.exp(values.astype(np.float64))
    assert (np.abs(out - exact) <= (2 - values) * 2.0**-23 * exact).all()
    assert out[-1] == 1.0 and (out <= 1).all()


def test_exponentials_of_what_is_far_below_are_nothing():
    values = np.array([-87.5, -88.0, -1e4, -3e38], np.float32)
    out = np.ones(len(values), np.float32)
    exponential(values, out)
    assert (out == 0).all()


@pytest.mark.parametrize("count", LENGTHS)
def test_products_at_places_of_flat_arrays(rng, count):
    """Of `count` elements from places 5 and 3 on."""
    x, y = numbers(rng, count + 20), numbers(rng, count + 20).astype(np.float16)
    exact = np.dot(x[5 : 5 + count].astype(np.float64), y[3 : 3 + count].astype(np.float64))
    assert compiled.dot_half(x, 5, y.view(np.uint16), 3, count) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("count", LENGTHS)
def test_sums_of_exponentials_leave_their_terms(rng, count):
    x = numbers(rng, count + 5)
    before, most = x.copy(), np.float32(3 * x.max())
    want = np.exp(3.0 * x[2 : 2 + count].astype(np.float64) - most).sum()
    assert compiled.sum_of_exponentials(x, 2, count, np.float32(3), most) == pytest.approx(want, rel=1e-5)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("count", LENGTHS)
def test_exponentials_in_place_of_their_terms(rng, count):
    """What is beside them stays."""
    x = numbers(rng, count + 5)
    own, most, taken = slice(2, 2 + count), np.float32(0.5 * x.max()), x.copy()
    total = compiled.exponentials(taken, 2, count, np.float32(0.5), most)
    np.testing.assert_allclose(taken[own], np.exp(0.5 * x[own].astype(np.float64) - most), rtol=1e-5)
    assert total == pytest.approx(taken[own].sum(dtype=np.float64), rel=1e-5)
    np.testing.assert_array_equal(np.delete(taken, own), np.delete(x, own))


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.parametrize("count", LENGTHS)
def test_the_exponentials_of_vectors_are_those_of_single_numbers(rng, count, place):
    """By a vector or one by one, within the same bound; far below they are nothing."""
    x = -np.abs(numbers(rng, count + place)) * 30
    x[place::5] = -1e4
    want = np.empty(len(x), np.float32)
    exponential(x, want)
    compiled.exponentials(x, place, count, np.float32(1), np.float32(0))
    np.testing.assert_allclose(x[place:], want[place:], rtol=3e-6)
    assert (x[place::5] == 0).all()


@pytest.mark.parametrize("count", LENGTHS)
def test_largest_and_scales(rng, count):
    x = numbers(rng, count + 4)
    own = slice(3, 3 + count)
    assert compiled.largest_of(x, 3, count, np.float32(-9)) == max([-9, *x[own]])
    assert compiled.largest_of(x, 3, count, np.float32(9)) == 9
    for place in range(count):
        lifted = x.copy()
        lifted[3 + place] = 7
        assert compiled.largest_of(lifted, 3, count, np.float32(-9)) == 7
    scaled = x.copy()
    compiled.scale(np.float32(-2), scaled, 3, count)
    np.testing.assert_array_equal(scaled[own], -2 * x[own])
    np.testing.assert_array_equal(np.delete(scaled, own), np.delete(x, own))


def test_code_on_disk_is_not_of_an_older_primitive(tmp_path):
    """Loops of other modules have the primitives within: they stayed as they were when a primitive had changed."""
    primitives = Path(compiled.__file__).read_text()
    loop = "from primitives import entry_point, scale\n"
    loop += "@entry_point\ndef loop(x):\n    scale(1, x, 0, 5)\n    return x[0]\n"
    call = "import numpy as np; from loops import loop; print(loop(np.full(5, 5, np.float32)))"
    line = "        put(x, i, factor * get(x, i))\n"
    assert line in primitives
    (tmp_path / "loops.py").write_text(loop)
    for factor in (1, 2):
        text = primitives.replace(line, f"        put(x, i, np.float32({factor}) * get(x, i))\n")
        (tmp_path / "primitives.py").write_text(text)
        out = subprocess.run([sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert float(out.stdout) == 5 * factor
