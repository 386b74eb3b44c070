"""What compiled loops are made of, against numpy: every fp16 number, every length around a vector."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nearflash.inference.engines import compiled
from nearflash.inference.engines.compiled import ROWS

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


@compiled.compiled
def fetched(values):
    """Asking for a cache line changes nothing."""
    for i in range(0, len(values), 16):
        compiled.fetch(values, i)
    return compiled.get(values, 0)


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
def test_rows_at_places_of_flat_arrays(rng, count):
    """Products and sums of `count` elements from places 5 and 3 on; what is beside them stays."""
    x, y = numbers(rng, count + 20), numbers(rng, count + 20)
    exact = np.dot(x[5 : 5 + count].astype(np.float64), y[3 : 3 + count])
    assert compiled.dot(x, 5, y, 3, count) == pytest.approx(exact, abs=1e-4)
    changed = y.copy()
    compiled.add(np.float32(0.5), x, 5, changed, 3, count)
    np.testing.assert_allclose(changed[3 : 3 + count], y[3 : 3 + count] + 0.5 * x[5 : 5 + count], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.delete(changed, slice(3, 3 + count)), np.delete(y, slice(3, 3 + count)))


@pytest.mark.parametrize("count", LENGTHS)
def test_four_rows_are_multiplied_at_once(rng, count):
    stride = count + 2
    x, y = numbers(rng, count + 3), numbers(rng, ROWS * stride + 1)
    rows = np.stack([y[1 + row * stride :][:count] for row in range(ROWS)]).astype(np.float64)
    found = compiled.dot_rows(x, 3, y, 1, stride, count)
    np.testing.assert_allclose(found, rows @ x[3:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", LENGTHS)
def test_sums_of_exponentials_leave_their_terms(rng, count):
    x = numbers(rng, count + 5)
    before, most = x.copy(), np.float32(3 * x.max())
    want = np.exp(3.0 * x[2 : 2 + count].astype(np.float64) - most).sum()
    assert compiled.sum_of_exponentials(x, 2, count, np.float32(3), most) == pytest.approx(want, rel=1e-5)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("count", LENGTHS)
def test_four_rows_are_added_at_once(rng, count):
    stride = count + 2
    x, y, weights = numbers(rng, ROWS * stride + 1), numbers(rng, count + 9), numbers(rng, 7)
    changed = y.copy()
    compiled.add_rows(weights, 2, x, 1, stride, changed, 4, count)
    rows = np.stack([x[1 + row * stride :][:count] for row in range(ROWS)]).astype(np.float64)
    want = y[4 : 4 + count] + weights[2 : 2 + ROWS] @ rows
    np.testing.assert_allclose(changed[4 : 4 + count], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.delete(changed, slice(4, 4 + count)), np.delete(y, slice(4, 4 + count)))


@pytest.mark.parametrize("count", LENGTHS)
def test_sums_largest_and_scales(rng, count):
    x = numbers(rng, count)
    assert compiled.sum_of(x) == pytest.approx(x.sum(dtype=np.float64), abs=1e-4)
    assert compiled.largest_of(x, np.float32(-9)) == max([-9, *x])
    assert compiled.largest_of(x, np.float32(9)) == 9
    scaled = x.copy()
    compiled.scale(np.float32(-2), scaled)
    np.testing.assert_array_equal(scaled, -2 * x)
    most = np.float32(max([0, *x]))
    taken = x.copy()
    total = compiled.exponentials(taken, most)
    np.testing.assert_allclose(taken, np.exp(x.astype(np.float64) - most), rtol=1e-6)
    assert total == pytest.approx(taken.sum(dtype=np.float64), rel=1e-6)


def test_places_are_set_and_had(rng):
    x = numbers(rng, 40)
    before = x.copy()
    assert fetched(x) == x[0]
    np.testing.assert_array_equal(x, before)


def test_code_on_disk_is_not_of_an_older_primitive(tmp_path):
    """Loops of other modules have the primitives within: they stayed as they were when a primitive had changed."""
    primitives = Path(compiled.__file__).read_text()
    loop = "from primitives import compiled, sum_of\n\n\n@compiled\ndef loop(x):\n    return sum_of(x)\n"
    call = "import numpy as np; from loops import loop; print(loop(np.ones(5, np.float32)))"
    (tmp_path / "loops.py").write_text(loop)
    for factor in ("x[i]", "2 * x[i]"):
        text = primitives.replace("        total += x[i]\n", f"        total += np.float32({factor})\n")
        assert text != primitives
        (tmp_path / "primitives.py").write_text(text)
        out = subprocess.run([sys.executable, "-c", call], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert float(out.stdout) == (5 if factor == "x[i]" else 10)
