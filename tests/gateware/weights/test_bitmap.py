import numpy as np
import pytest

from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.model.weights.bitmap import expand_row
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


def a_row(rng, columns, density, element_bits):
    dtype = np.dtype(f"<u{element_bits // 8}")
    values = rng.integers(1, 1 << element_bits, columns, dtype)
    return np.where(rng.random(columns) < density, values, dtype.type(0))


def as_integers(array, per_item):
    """Items of `per_item` elements; the last one is filled up with zeros."""
    data = array.tobytes().ljust(-(-array.nbytes // (per_item * array.itemsize)) * per_item * array.itemsize, b"\0")
    size = per_item * array.itemsize
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def inputs(rows, width):
    """Beats of the bitmap and words of values of rows."""
    beats, words = [], []
    for row in rows:
        present = np.zeros(-(-len(row) // width) * width, bool)
        present[: len(row)] = row != 0
        bits = [sum(int(bit) << k for k, bit in enumerate(beat)) for beat in present.reshape(-1, width)]
        beats += [{"bits": beat, "last": index == len(bits) - 1} for index, beat in enumerate(bits)]
        words += as_integers(row[row != 0], width)
    return {"i_bitmap": beats, "i_value": words}


def outputs(rows, width):
    expected = []
    for row in rows:
        bitmap = np.packbits(row != 0, bitorder="little").tobytes()
        dense = expand_row(bitmap, row[row != 0].tobytes(), len(row), row.dtype)
        beats = as_integers(dense, width)
        expected += [{"data": beat, "last": index == len(beats) - 1} for index, beat in enumerate(beats)]
    return expected


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(("width", "element_bits"), [(8, 16), (16, 8)])
def test_equals_model(width, element_bits, stalls):
    """Rows of all lengths and densities, rows of zeros, and rows that end within a word."""
    rng = np.random.default_rng(width)
    rows = [a_row(rng, n, d, element_bits) for n in (1, width, 3 * width - 1) for d in (0, 0.3, 0.9, 1)]
    rows += [a_row(rng, 10 * width, density, element_bits) for density in np.linspace(0, 1, 9)]
    expected = outputs(rows, width)
    found = run_streams(BitmapExpander(width, element_bits), inputs(rows, width), {"o": len(expected)}, stalls=stalls)
    assert found["o"] == expected


def test_one_beat_a_cycle_at_every_density():
    """Rows of 40 beats of 16, each beat of a row with as many ones, at random places."""
    width, beats, rows = 16, 40, []
    for ones in range(width + 1):
        rng = np.random.default_rng(ones)
        rows.append(np.zeros(beats * width, np.uint16))
        for first in range(0, beats * width, width):
            rows[-1][first + rng.choice(width, ones, replace=False)] = 1 + rng.integers(0xFFFF, size=ones)
    given = inputs(rows, width)
    cycles = transfer_cycles(BitmapExpander(width, 16), given, {"o": beats * len(rows)})["o"]
    for ones in range(width + 1):
        own = cycles[beats * ones : beats * (ones + 1)]
        assert own == list(range(own[0], own[0] + beats)), f"{ones} ones a beat"


def test_latency_from_either_input():
    row = np.ones(8, np.uint8)
    given = inputs([row], 8)
    assert measure_latency(BitmapExpander(8, 8), given, i="i_value") == BitmapExpander.VALUE_LATENCY
    assert measure_latency(BitmapExpander(8, 8), inputs([0 * row], 8), i="i_bitmap") == BitmapExpander.LATENCY


def test_messages():
    with pytest.raises(ValueError, match="width must be a power of two from 4 to 64 elements, not 24"):
        BitmapExpander(24, 8)
    with pytest.raises(ValueError, match="element_bits must be 1, 2, 8 or 16, not 4"):
        BitmapExpander(8, 4)
