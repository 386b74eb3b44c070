"""Values are the model's, of every code, scale and bf16 pattern."""

import numpy as np
import pytest

from nearflash.abi.optimizers.state import BLOCK_PARAMS, StateFormat
from nearflash.gateware.update.state_decoder import StateDecoder
from nearflash.model.update.state import decode
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit

DTYPES = {StateFormat.FP32: "<u4", StateFormat.BF16: "<u2", StateFormat.MX8: "<u1"}


def packed(elements, lanes):
    return [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(elements).reshape(-1, lanes)]


def groups_of(elements, lanes):
    data = packed(elements, lanes)
    return [{"data": word, "last": n == len(data) - 1} for n, word in enumerate(data)]


def a_command(rng, role, form, lanes, params):
    """Inputs and expected values of random elements."""
    elements = rng.integers(0, 256, params * form.element_bytes, np.uint8).view(DTYPES[form])
    scales = rng.integers(0, 256, params // BLOCK_PARAMS if form is StateFormat.MX8 else 0, np.uint8)
    values = decode([elements, scales] if scales.size else [elements], role, form)
    return {"i": groups_of(elements, lanes), "i_scale": scales.tolist()}, groups_of(values, lanes)


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("form", StateFormat)
@pytest.mark.parametrize(("lanes", "role"), [(1, "m"), (2, "v"), (8, "m")])
def test_equals_model(lanes, role, form, stalls):
    inputs, expected = a_command(np.random.default_rng(lanes), role, form, lanes, 6 * BLOCK_PARAMS)
    unit, hold = StateDecoder(lanes, role), {"form": form.code}
    assert run_streams(unit, inputs, {"o": len(expected)}, stalls=stalls, hold=hold)["o"] == expected


@pytest.mark.parametrize("role", ["m", "v"])
def test_every_code_at_every_scale_and_every_bf16(role):
    unit = StreamUnit(StateDecoder(2, role), f"update-state-decoder-{role}")
    codes, scales = np.tile(np.arange(256, dtype=np.uint8), 256), np.repeat(np.arange(256, dtype=np.uint8), 8)
    for form, stored in (
        (StateFormat.MX8, [codes, scales]),
        (StateFormat.BF16, [np.arange(1 << 16, dtype=np.uint16)]),
    ):
        data = np.ascontiguousarray(stored[0]).view("<u2" if form is StateFormat.MX8 else "<u4")
        rows = np.zeros((len(data), 3), np.uint32)
        rows[:, 0] = data
        given = {"i": rows, "i_scale": stored[1] if len(stored) > 1 else []}
        found = unit.run(given, {"o": len(data)}, hold={"form": form.code})["o"]
        expected = decode(stored, role, form).view(np.uint32)
        np.testing.assert_array_equal(np.ascontiguousarray(found[:, :2]).reshape(-1), expected)


@pytest.mark.parametrize("lanes", [1, 8])
def test_one_group_a_cycle_and_latency(lanes):
    inputs, expected = a_command(np.random.default_rng(1), "m", StateFormat.MX8, lanes, 6 * BLOCK_PARAMS)
    cycles = transfer_cycles(StateDecoder(lanes, "m"), inputs, {"o": len(expected)}, hold={"form": 2})
    first = cycles["o"][0]
    assert cycles["o"] == list(range(first, first + len(expected)))
    assert first - cycles["i_scale"][0] == StateDecoder.SCALE_LATENCY
    unit, group = StateDecoder(lanes, "m"), {"i": [{"data": 1, "last": 1}]}
    assert measure_latency(unit, group, hold={"form": 0}) == StateDecoder.LATENCY
