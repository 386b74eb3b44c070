import numpy as np
import pytest

from nearflash.abi.bitmap import SCALE_COLUMNS, ElementFormat
from nearflash.gateware.weights.dequantize import Dequantizer
from nearflash.model.weights.dequantize import ScaledMatrix, dequantize
from nearflash.model.weights.fields import join_fields
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit

FP16, BF16 = ElementFormat.FP16, ElementFormat.BF16


def a_matrix(rng, rows, columns, output):
    """Codes with scales and minima around one; some absent elements have codes."""
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    exponents = rng.integers(-6, 7, (rows, -(-columns // SCALE_COLUMNS), 2)) + output.number_format.bias
    scales = exponents << output.number_format.mantissa_bits
    scales |= rng.integers(0, 1 << 16, scales.shape) & (0x8000 | (1 << output.number_format.mantissa_bits) - 1)
    return ScaledMatrix(codes, rng.random(codes.shape) < 0.6, scales.astype(np.uint16), ElementFormat.INT8, output)


def words(elements, bits, width):
    """Words of `width` fields of so many bits, the last one filled up with zeros."""
    rows = np.pad(elements, (0, -elements.size % width)).reshape(-1, width)
    return [int.from_bytes(join_fields(row, bits), "little") for row in rows]


def beats_of(elements, present, width):
    """Beats of one row."""
    pairs = list(zip(words(elements, 16, width), words(present, 1, width), strict=True))
    return [{"data": data, "present": bits, "last": k == len(pairs) - 1} for k, (data, bits) in enumerate(pairs)]


def inputs(matrices, width):
    rows = [row for matrix in matrices for row in zip(matrix.codes, matrix.present, strict=True)]
    pairs = [pair for matrix in matrices for pair in matrix.scales.reshape(-1, 2).tolist()]
    scales = [{"scale": scale, "minimum": minimum} for scale, minimum in pairs]
    return {"i": [beat for row in rows for beat in beats_of(*row, width)], "i_scale": scales}


def without_bitmap(beats):
    return [{"data": beat["data"], "last": beat["last"]} for beat in beats]


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(("width", "output"), [(4, FP16), (8, BF16)])
def test_equals_model(width, output, stalls):
    """Rows of one column to some groups, with and without a last group that has fewer."""
    rng = np.random.default_rng(width)
    matrices = [a_matrix(rng, 1, columns, output) for columns in (1, 63, 64, 65, 130)]
    rows = [row for matrix in matrices for row in matrix.dense()]
    expected = without_bitmap(beat for row in rows for beat in beats_of(row, row != 0, width))
    given, hold = inputs(matrices, width), {"scaled": 1, "bf16": output is BF16}
    assert run_streams(Dequantizer(width), given, {"o": len(expected)}, stalls=stalls, hold=hold)["o"] == expected


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(Dequantizer(8), "expand-dequantize-8")


@pytest.mark.parametrize("output", [FP16, BF16])
@pytest.mark.parametrize("count", [20_000, pytest.param(4_000_000, marks=pytest.mark.full)])
def test_any_scale_and_minimum(unit, count, output):
    """Each beat with patterns of its own: any ones, then exponents so close that the sum cancels or rounds twice."""
    rng, number = np.random.default_rng(output), output.number_format
    codes, present = rng.integers(0, 256, (count, 8), np.uint8), rng.random((count, 8)) < 0.9
    scale, minimum = rng.integers(0, 1 << 16, (2, count), np.uint16)
    top, near = (1 << number.exponent_bits) - 1, slice(count // 4, count)
    exponents = (scale[near] >> number.mantissa_bits & top) + rng.integers(-3, 11, near.stop - near.start)
    fields = exponents.clip(0, top).astype(np.uint16) << number.mantissa_bits
    minimum[near] = minimum[near] & ~np.uint16(top << number.mantissa_bits) | fields
    beats = np.zeros((count, 5), np.uint32)
    beats[:, :4] = codes.astype(np.uint16).view(np.uint32)
    beats[:, 4] = np.packbits(present, axis=1, bitorder="little")[:, 0].astype(np.uint32) | 1 << 8
    given = {"i": beats, "i_scale": scale | minimum.astype(np.uint32) << 16}
    found = unit.run(given, {"o": count}, hold={"scaled": 1, "bf16": int(output is BF16)})["o"]
    expected = dequantize(codes, present, scale[:, None], minimum[:, None], output)
    np.testing.assert_array_equal(np.ascontiguousarray(found[:, :4]).view(np.uint16), expected)


def test_unscaled_beats_pass():
    """Whatever is present, and without scales."""
    rng = np.random.default_rng(1)
    beats = beats_of(rng.integers(0, 1 << 16, 200), rng.random(200) < 0.5, 4)
    found = run_streams(Dequantizer(4), {"i": beats}, {"o": len(beats)}, stalls="both", hold={"scaled": 0, "bf16": 0})
    assert found["o"] == without_bitmap(beats)


def test_one_beat_a_cycle_and_latency():
    matrix, hold = a_matrix(np.random.default_rng(2), 1, 128, FP16), {"scaled": 1, "bf16": 0}
    unit = Dequantizer(4)
    cycles = transfer_cycles(unit, inputs([matrix], 4), {"o": 32}, hold=hold)
    first = cycles["o"][0]
    assert cycles["o"] == list(range(first, first + 32))
    assert first - cycles["i"][0] == unit.LATENCY == 17


def test_messages():
    with pytest.raises(ValueError, match="width must be a power of two from 4 to 64 elements, not 128"):
        Dequantizer(128)
