"""Stored elements and scales are the model's, in every format, for any values and wherever the dither begins."""

import numpy as np
import pytest

from nearflash.abi.optimizers.state import BLOCK_PARAMS, MX8, StateFormat
from nearflash.gateware.update.state_encoder import StateEncoder
from nearflash.model.update.state import dither, encode
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit

NAN = 0x7FC00000
STEP, FIRST = 9, 8192 * 3 - 64


def values_of(rng, params):
    """fp32 bits: blocks of wide and of near exponents, zeros, subnormals, infinities, canonical NaN."""
    blocks = params // BLOCK_PARAMS
    highest = rng.integers(0, 256, (blocks, 1))
    spread = rng.choice([0, 1, 4, 16, 40, 255], (blocks, 1))
    fields = (highest - rng.integers(0, 256, (blocks, BLOCK_PARAMS)) % (spread + 1)).clip(0, 255)
    fractions = rng.integers(0, 1 << 23, fields.shape)
    fractions = np.where(rng.random(fields.shape) < 0.2, rng.choice([0, 1, (1 << 23) - 1], fields.shape), fractions)
    bits = fields << 23 | fractions | rng.integers(0, 2, fields.shape) << 31
    zero = rng.random(fields.shape) < 0.05
    bits = np.where(zero, bits & 1 << 31, bits)
    bits = np.where((fields == 255) & (fractions != 0) & ~zero, NAN, bits)
    bits[rng.random(blocks) < 0.05] = NAN
    return bits.reshape(-1).astype(np.uint32)


def packed(elements, lanes):
    """Integers of `lanes` elements side by side."""
    rows = np.ascontiguousarray(elements).reshape(-1, lanes)
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


def streams(bits, role, form, lanes, first=FIRST, strobes=None):
    """Inputs, and what the model says of the outputs."""
    values = bits.view(np.float32)
    if role == "v":
        values = np.abs(values)
    stored = encode(values, role, form, dither(role, STEP, first, values.size))
    groups = values.size // lanes
    strobes = [(1 << lanes) - 1] * groups if strobes is None else strobes
    given = [{"data": data, "strb": strb, "last": n == groups - 1}
             for n, (data, strb) in enumerate(zip(packed(values, lanes), strobes, strict=True))]  # fmt: skip
    expected = [{**group, "data": data} for group, data in zip(given, packed(stored[0], lanes), strict=True)]
    scales = []
    if form is StateFormat.MX8:
        ends = given[BLOCK_PARAMS // lanes - 1 :: BLOCK_PARAMS // lanes]
        scales = [{"data": int(scale), "strb": int(end["strb"] == (1 << lanes) - 1), "last": end["last"]}
                  for scale, end in zip(stored[1], ends, strict=True)]  # fmt: skip
    inputs = {"i_command": [{"step": STEP, "first_param": first}], "i": given}
    return inputs, {"o": expected, "o_scale": scales}


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("form", StateFormat)
@pytest.mark.parametrize(("lanes", "role"), [(1, "v"), (2, "m"), (4, "m"), (8, "v")])
def test_equals_model(lanes, role, form, stalls):
    rng = np.random.default_rng(lanes)
    blocks = 3 if lanes == 1 else 8
    bits = values_of(rng, blocks * BLOCK_PARAMS)
    strobes = rng.choice([0, (1 << lanes) - 1], bits.size // lanes).tolist()
    inputs, expected = streams(bits, role, form, lanes, strobes=strobes)
    found = run_streams(StateEncoder(lanes, role), inputs, {name: len(items) for name, items in expected.items()},
                        stalls=stalls, hold={"form": form.code})  # fmt: skip
    assert found == expected


@pytest.fixture(scope="module", params=["m", "v"])
def unit(request):
    return request.param, StreamUnit(StateEncoder(4, request.param), f"update-state-encoder-{request.param}")


def rows(items, words):
    """Structs of data, strobes and last of so many data words as the stream unit takes them."""
    bits = [item["data"] | item["strb"] << 32 * words | item["last"] << 32 * words + 4 for item in items]
    return np.array([[value >> 32 * n & 0xFFFF_FFFF for n in range(words + 1)] for value in bits], np.uint32)


@pytest.mark.parametrize("form", StateFormat)
def test_any_value(unit, form):
    role, encoder = unit
    inputs, expected = streams(values_of(np.random.default_rng(3), 1 << 16), role, form, 4)
    count = {"o": len(expected["o"]), "o_scale": len(expected["o_scale"])}
    given = {"i": rows(inputs["i"], 4), "i_command": np.array([[STEP, FIRST & 0xFFFFFFFF, FIRST >> 32]], np.uint32)}
    found = encoder.run(given, count, hold={"form": form.code})
    np.testing.assert_array_equal(found["o"], rows(expected["o"], 4))
    assert found["o_scale"].tolist() == [s["data"] | s["strb"] << 8 | s["last"] << 9 for s in expected["o_scale"]]


def test_every_scale_and_the_values_around_each_code(unit):
    """The largest of a block has each exponent field; the others are codes, half a step off and a bit beside that."""
    role, encoder = unit
    element = MX8[role]
    blocks = []
    for field in range(255):
        scale = max(field, element.least_scale)
        for below in range(element.top + 3):
            places = np.arange(BLOCK_PARAMS - 1)
            near = (places % 8 << 20) + np.array([0, 1, 0x7FFFF, 0x80000, 0x80001, 0xFFFFF])[places % 6]
            exponent = max(scale - below, 0)
            blocks.append([field << 23, *(exponent << 23 | near if exponent <= field else near).tolist()])
    bits = np.array(blocks, np.uint32).reshape(-1)
    inputs, expected = streams(bits, role, StateFormat.MX8, 4, first=0)
    given = {"i": rows(inputs["i"], 4), "i_command": np.array([[STEP, 0, 0]], np.uint32)}
    found = encoder.run(given, {"o": len(expected["o"]), "o_scale": len(expected["o_scale"])}, hold={"form": 2})
    np.testing.assert_array_equal(found["o"], rows(expected["o"], 4))


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("form", StateFormat)
def test_one_group_a_cycle_and_latency(form, lanes):
    unit = StateEncoder(lanes, "m")
    inputs, expected = streams(values_of(np.random.default_rng(1), 12 * BLOCK_PARAMS), "m", form, lanes)
    count = {name: len(items) for name, items in expected.items()}
    cycles = transfer_cycles(unit, inputs, count, hold={"form": form.code})
    first = cycles["o"][0]
    assert cycles["o"] == list(range(first, first + count["o"]))
    if form is StateFormat.FP32:
        assert first - cycles["i"][0] == unit.LATENCY
