"""Split masters in the update kernel, on Verilator: the model's bytes and no others."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi import topk
from nearflash.abi.errors import AlignmentError, CommandError, DeviceError, StreamError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, MasterFormat, SgdStep, StateFormat
from nearflash.device import open_device
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.verify.fixtures.gradients import random_stream

TINY, WIDE = update_config("update-tiny-split"), update_config("update-smartssd-split")
MODEL = MemoryModel(read_latency_cycles=60, write_latency_cycles=40)
ADAM = AdamStep(lr=1e-3, step=4, weight_decay=0.01)
RULES = [ADAM, SgdStep(0.1, 3, momentum=0.9), SgdStep(0.1, 3), AdagradStep(0.1, 3), LionStep(1e-3, 3)]
SPLIT = MasterFormat.SPLIT
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def device():
    with VerilatorDevice(TINY, memory_bytes=1 << 22, model=MODEL) as device:
        yield device


def any_state(params):
    """Gradients of a run in progress, and masters of any exponent class: some of them infinite, NaN, ties."""
    rng = np.random.default_rng(params)
    state = random_state(rng, params)
    words = rng.integers(0, 1 << 32, params, np.uint32)
    words[::3] = words[::3] & 0xFFFF | rng.choice([0, 0x7F80, 0xFF80, 0x7F7F, 0x8000, 1, 0x3F80], words[::3].size) << 16
    words[::7] = words[::7] & 0xFFFF0000 | rng.choice([0x8000, 0x7FFF, 0, 0xFFFF, 0x8001], words[::7].size)
    state[1, params // 2 :] = words.view(np.float32)[params // 2 :]
    return state


def same_as_the_model(device, case):
    state = any_state(case.params)
    found, counters = run_update(device, case, state)
    with ModelDevice(device.identity.config) as model:
        expected, counted = run_update(model, case, state)
    assert differing_words(found, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted
    return counters


@pytest.mark.parametrize("stall_percent", [0, 50])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.optimizer}-{'-'.join(rule.arrays) or 'none'}")
@pytest.mark.parametrize("form", StateFormat)
def test_every_rule_and_state_format(device, form, rule, stall_percent):
    device.kernel.configure(replace(MODEL, stall_percent=stall_percent, seed=7))
    params = 992 if form is StateFormat.MX8 else 1001
    case = UpdateVector(replace(rule, state_format=form), params, master=SPLIT, in_place=stall_percent > 0)
    assert same_as_the_model(device, case)["copy_overflows"] > 0
    device.kernel.configure(MODEL)


def test_masters_of_either_format_take_turns_with_topk_gradients(device):
    for master in (SPLIT, MasterFormat.FP32, SPLIT):
        same_as_the_model(device, UpdateVector(ADAM, 9_024, density=0.1, master=master, in_place=True))


BUILDS = [
    replace(TINY, delta=True),
    replace(TINY, name="two", lanes=2, port_bits=128),
    WIDE,
]


@pytest.mark.full
@pytest.mark.parametrize("stall_percent", [0, 30])
@pytest.mark.parametrize("config", BUILDS, ids=lambda config: f"{config.lanes}-lanes{'-delta' * config.delta}")
def test_lanes_and_what_the_weights_change(config, stall_percent):
    """The delta of the weights, ties away from zero, beside both halves; and whole copies of fp32 masters."""
    model = replace(MODEL, stall_percent=stall_percent, seed=3)
    with VerilatorDevice(config, memory_bytes=1 << 22, model=model) as device:
        for params, in_place in ((1, False), (4_097, True), (9_003, False)):
            adam = replace(ADAM, lr=1e-5, state_format="bf16")
            case = UpdateVector(adam, params, in_place=in_place, master=SPLIT, delta=config.delta,
                                copy=CopyFormat.BF16 if config.delta else CopyFormat.NONE)  # fmt: skip
            same_as_the_model(device, case)
            same_as_the_model(device, replace(case, master=MasterFormat.FP32, copy=CopyFormat.BF16))


def test_one_parameter_a_cycle(device):
    for master in MasterFormat:
        case = UpdateVector(replace(ADAM, state_format="mx8"), 20_000, master=master)
        assert same_as_the_model(device, case)["cycles"] <= 20_000 + 500


def placed(device, params, half, form=StateFormat.FP32):
    """A command whose halves begin inside beats, `half` bytes behind multiples of 4 KB."""
    rule = replace(ADAM, state_format=form)
    buffer = device.allocate(16 * 4 * params + 16 * 4096)
    buffer.host[:] = np.random.default_rng(params).integers(0, 256, buffer.size_bytes, np.uint8) & 0x3F
    slot = -(-(4 * params + 64) // 4096) * 4096
    names = ("g", *SPLIT.arrays, *rule.arrays)
    shifts, others = {"weight": half, "rest": 3 * half}, {"weight": 4 * half, "rest": half}
    inputs = {name: buffer.address + slot * n + shifts.get(name, 0) for n, name in enumerate(names)}
    behind = buffer.address + slot * len(names)
    outputs = {name: behind + slot * n + others.get(name, 0) for n, name in enumerate(names[1:])}
    buffer.sync_to_device()
    return UpdateCommand(rule, params, inputs, outputs, master=SPLIT), buffer


@pytest.mark.parametrize("config", [TINY, pytest.param(WIDE, marks=pytest.mark.full)], ids=lambda c: c.full_name)
@pytest.mark.parametrize("params", [1, 133, 2_144])
def test_halves_that_begin_inside_beats_and_no_byte_beside_them(config, params):
    results = []
    with ModelDevice(config) as model, VerilatorDevice(
        config, memory_bytes=1 << 22, model=replace(MODEL, stall_percent=20, seed=3)
    ) as device:  # fmt: skip
        for one in (model, device):
            command, buffer = placed(one, params, config.port_bytes // 2)
            one.run(command)
            buffer.sync_from_device()
            results.append(buffer.host.copy())
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("array", SPLIT.arrays)
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_bus_errors_name_their_burst(device, kind, array):
    """Addresses that no memory answers are refused by the host: here the registers are written past it."""
    command, buffer = placed(device, 2_048, 0)
    device._start(replace(command, **{kind: {**getattr(command, kind), array: 1 << 40}}))
    with pytest.raises(DeviceError, match=f"{'READ' if kind == 'inputs' else 'WRITE'}_ERROR at address 0x10000000000"):
        device._finish(10.0)
    device.free(buffer)
    same_as_the_model(device, UpdateVector(ADAM, 64, master=SPLIT))


def test_nothing_is_written_behind_a_bad_tile(device):
    """Of neither half; what the first tile wrote may be there."""
    params = topk.TILE_PARAMS + 900
    stream = np.frombuffer(random_stream(np.random.default_rng(1), params, 0.1, topk.ValueFormat.FP16), np.uint8).copy()
    stream[-9] ^= 1
    command, buffer = placed(device, params, 0)
    buffer.host[: stream.size] = stream
    kept = [slice(address - buffer.address + 2 * topk.TILE_PARAMS, address - buffer.address + 2 * params)
            for name, address in command.outputs.items() if name in SPLIT.arrays]  # fmt: skip
    for place in kept:
        buffer.host[place] = 0xEE
    buffer.sync_to_device()
    with pytest.raises(StreamError):
        device.run(replace(command, gradient=GradientFormat.TOPK, gradient_bytes=stream.size))
    buffer.sync_from_device()
    assert all((buffer.host[place] == 0xEE).all() for place in kept)
    device.free(buffer)


@pytest.mark.parametrize("spec", ["verilator:update-tiny", "hls:update-tiny"])
def test_devices_without_split_masters_refuse_them(spec):
    case, state = UpdateVector(ADAM, 64, master=SPLIT), random_state(np.random.default_rng(0), 64)
    with (
        open_device(spec) as device,
        pytest.raises(CommandError, match="master must be fp32 on update-tiny, not split"),
    ):
        run_update(device, case, state)


def test_a_half_needs_half_the_ports_width(device):
    command, buffer = placed(device, 64, 2)
    with pytest.raises(AlignmentError, match="weight read address must be a multiple of 4 bytes"):
        device.run(command)
    device.free(buffer)
