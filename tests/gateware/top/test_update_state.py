"""Narrow optimizer state in the update kernel, on Verilator: the model's bytes and no others."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi import topk
from nearflash.abi.errors import DeviceError, StreamError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, SgdStep, StateFormat
from nearflash.abi.optimizers.state import TILE_PARAMS
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.verify.fixtures.gradients import random_stream

TINY = update_config("update-tiny")
MODEL = MemoryModel(read_latency_cycles=60, write_latency_cycles=40)
ADAM = AdamStep(lr=1e-3, step=4, weight_decay=0.01)
NARROW = [StateFormat.BF16, StateFormat.MX8]
RULES = [ADAM, SgdStep(0.1, 3, momentum=0.9), SgdStep(0.1, 3), AdagradStep(0.1, 3), LionStep(1e-3, 3)]


@pytest.fixture(scope="module")
def device():
    with VerilatorDevice(TINY, memory_bytes=1 << 22, model=MODEL) as device:
        yield device


def same_as_the_model(device, case):
    state = random_state(np.random.default_rng(case.params), case.params)
    (found, counters), build = run_update(device, case, state), device.identity.config
    with ModelDevice(build) as model:
        expected, counted = run_update(model, case, state)
    assert differing_words(found, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted
    return counters


@pytest.mark.parametrize("stall_percent", [0, 50])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.optimizer}-{'-'.join(rule.arrays) or 'none'}")
@pytest.mark.parametrize("form", NARROW)
def test_every_rule_across_a_tile_boundary(device, form, rule, stall_percent):
    device.kernel.configure(replace(MODEL, stall_percent=stall_percent, seed=7))
    case = UpdateVector(replace(rule, state_format=form), 992 if form is StateFormat.MX8 else 1001, CopyFormat.FP16)
    same_as_the_model(device, replace(case, first_param=5 * TILE_PARAMS - 64))
    device.kernel.configure(MODEL)


@pytest.mark.parametrize("form", NARROW)
def test_topk_gradients_in_place(device, form):
    case = UpdateVector(replace(ADAM, state_format=form), 9_024, in_place=True, density=0.1, first_param=64)
    same_as_the_model(device, case)


def test_bf16_from_any_parameter(device):
    for first_param, params in ((1, 1), (TILE_PARAMS - 1, 2), (TILE_PARAMS - 3, 77)):
        same_as_the_model(device, UpdateVector(replace(ADAM, state_format="bf16"), params, first_param=first_param))


@pytest.mark.parametrize("form", NARROW)
def test_one_parameter_a_cycle_a_lane(device, form):
    counters = same_as_the_model(device, UpdateVector(replace(ADAM, state_format=form), 20_000))
    assert counters["cycles"] <= 20_000 + 500


def placed(device, form, params, shifts):
    """A command whose narrow arrays begin inside beats, so many bytes behind multiples of 4 KB."""
    rule = replace(ADAM, state_format=form)
    buffer = device.allocate(10 * 4 * params + 12 * 4096)
    rng = np.random.default_rng(params)
    buffer.host[:] = rng.integers(0, 256, buffer.size_bytes, np.uint8)
    slot = -(-4 * params // 4096) * 4096
    names = ("g", "p", *rule.arrays)
    inputs = {name: buffer.address + slot * n + shifts.get(name, 0) for n, name in enumerate(names)}
    outputs = {name: buffer.address + slot * (n + len(names)) + shifts.get(name, 0) // 2 * 3
               for n, name in enumerate(("p", *rule.arrays))}  # fmt: skip
    command = UpdateCommand(rule, params, inputs, outputs, first_param=96)
    start, size_bytes = (number - (buffer.address if n == 0 else 0) for n, number in enumerate(command.reads()["v"]))
    if form is StateFormat.BF16:  # v is not negative
        buffer.host[start : start + size_bytes].view(np.uint16)[:] &= 0x7FFF
        exponents = buffer.host[start : start + size_bytes].view(np.uint16)
        exponents[exponents > 0x7F00] = 0x3F80
    buffer.sync_to_device()
    return command, buffer


@pytest.mark.parametrize("config", ["update-tiny", pytest.param("update-smartssd", marks=pytest.mark.full)])
@pytest.mark.parametrize(("form", "params"), [(StateFormat.BF16, 133), (StateFormat.MX8, 32), (StateFormat.MX8, 2_144)])
def test_arrays_that_begin_inside_beats_and_no_byte_beside_them(config, form, params):
    quarter = update_config(config).port_bytes // 4
    unit = quarter * form.element_bytes
    shifts = {"m": 2 * unit, "v": 0, "m_scale": 5, "v_scale": 2}
    results = []
    with ModelDevice(update_config(config)) as model, VerilatorDevice(
        update_config(config), memory_bytes=1 << 22, model=replace(MODEL, stall_percent=20, seed=3)
    ) as device:  # fmt: skip
        for one in (model, device):
            command, buffer = placed(one, form, params, shifts)
            one.run(command)
            buffer.sync_from_device()
            results.append(buffer.host.copy())
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("array", ["m", "m_scale", "v_scale"])
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_bus_errors_name_their_burst(device, kind, array):
    """Addresses that no memory answers are refused by the host: here the registers are written past it."""
    command, buffer = placed(device, StateFormat.MX8, 2_048, {})
    bad = {**getattr(command, kind), array: 1 << 40}
    device._start(replace(command, **{kind: bad}))
    with pytest.raises(DeviceError, match=f"{'READ' if kind == 'inputs' else 'WRITE'}_ERROR at address 0x10000000000"):
        device._finish(10.0)
    device.free(buffer)
    same_as_the_model(device, UpdateVector(replace(ADAM, state_format="mx8"), 64))


@pytest.mark.parametrize("form", NARROW)
def test_nothing_is_written_behind_a_bad_tile(device, form):
    """Neither elements nor scales; what the first tile wrote may be there."""
    params, rule = topk.TILE_PARAMS + 928, replace(ADAM, state_format=form)
    stream = np.frombuffer(random_stream(np.random.default_rng(1), params, 0.1, topk.ValueFormat.FP16), np.uint8).copy()
    stream[-9] ^= 1
    names = ("p", *rule.arrays)
    buffer = device.allocate(12 * 32768)
    buffer.host[:] = 0xEE
    buffer.host[: stream.size] = stream
    buffer.sync_to_device()
    inputs = {name: buffer.address + 32768 * n for n, name in enumerate(("g", *names))}
    outputs = {name: buffer.address + 32768 * (n + 6) for n, name in enumerate(names)}
    with pytest.raises(StreamError):
        device.run(UpdateCommand(rule, params, inputs, outputs, gradient=GradientFormat.TOPK,
                                 gradient_bytes=stream.size))  # fmt: skip
    buffer.sync_from_device()
    for n, name in enumerate(names):
        kept = 32768 * (n + 6) + form.array_bytes(name, topk.TILE_PARAMS)
        assert (buffer.host[kept : 32768 * (n + 7)] == 0xEE).all(), name
    device.free(buffer)
