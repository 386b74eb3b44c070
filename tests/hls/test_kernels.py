"""Every update kernel against the model, word by word; the committed tops; streams and stages that do not move."""

import time
from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import CommandError, DeviceError, StreamError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep, LionStep, Profile, StateFormat
from nearflash.abi.topk import ValueFormat
from nearflash.device import open_device
from nearflash.device.backends.model.update import ModelDevice
from nearflash.model.gradients.topk import expand, pack
from nearflash.model.update.lane import optimizer_step
from nearflash.sim.hls.build import HLS
from nearflash.sim.hls.device import HlsDevice
from nearflash.sim.hls.kernels import SHIPPED, call_of, generate_tops
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.vectors import EDGES, edge_state, rules
from nearflash.verify.bench.hls import compare

TINY, SMARTSSD = update_config("update-tiny"), update_config("update-smartssd")


@pytest.fixture(scope="module")
def model():
    with ModelDevice(SMARTSSD) as device:
        yield device


@pytest.fixture(scope="module")
def devices():
    """By scalar type of the lanes. Kernels of the tiny build by float are those of tests/system: compiled once."""
    with HlsDevice(TINY, real="float") as host, HlsDevice(SMARTSSD, real="Fp32") as synthesised:
        yield {"float": host, "Fp32": synthesised}


def cases():
    """Every rule by the host's float; by Fp32 profile ieee, and DeepSpeed's for its fma. The bench runs all by both.

    make test has profile ieee, and of Fp32, whose arithmetic is the same in every rule, AdamW's.
    """
    for rule in rules():
        for real in ("float", "Fp32"):
            if (
                real == "float"
                or rule.profile is Profile.IEEE
                or (rule.profile is Profile.DEEPSPEED and rule.decoupled)
            ):
                name = f"{real}-{call_of(rule).kernel.name}-{rule.step}-{rule.weight_decay}"
                repeats = rule.profile is not Profile.IEEE or (real == "Fp32" and not getattr(rule, "decoupled", False))
                yield pytest.param(real, rule, id=name, marks=[pytest.mark.full] * repeats)


@pytest.mark.parametrize(("real", "rule"), list(cases()))
def test_kernel_equals_the_model_to_the_bit(devices, model, real, rule):
    words, mismatches, _ = compare(devices[real], model, rule, params=20_011, seed=3)
    assert mismatches == 0 and words == 20_011 * (2 + len(rule.arrays)) + 2


def test_the_rules_reach_every_shipped_kernel():
    assert {call_of(rule).kernel for rule in rules()} == set(SHIPPED)


def test_edge_values_are_among_the_vectors():
    state = edge_state(3, 1 << 17, seed=0)
    bits = state.view(np.uint32)
    assert state.dtype == np.float32 and all(np.isin(EDGES, row).all() for row in bits)
    pairs = set(zip(bits[0].tolist(), bits[1].tolist(), strict=True))
    assert all((int(a), int(b)) in pairs for a in EDGES for b in EDGES)
    finite = np.isfinite(state[0])
    assert 0 < np.count_nonzero(~finite) < state.shape[1] / 100
    assert np.count_nonzero(state[0, finite] == -state[1, finite]) > 1000, "some gradients must cancel p"


def test_committed_tops_are_what_the_generator_writes():
    committed = {path.name: path.read_text() for path in (HLS / "kernels").glob("update_*.cpp")}
    assert committed == generate_tops(), "run `nearflash hls kernel`"
    texts = [replace(kernel, topk=topk).text for kernel in SHIPPED for topk in (False, True)]
    assert all(len(line) <= 120 for text in texts for line in text.splitlines())


@pytest.mark.parametrize("name", ["hls:update-tiny", "hls:update-smartssd"])
def test_the_device_is_registered(name):
    with open_device(name) as device:
        assert device.identity.name == name


def test_states_that_no_kernel_reads_are_refused():
    with HlsDevice(TINY) as device:
        buffer = device.allocate(4096)
        rule = AdamStep(1e-3, 1, state_format=StateFormat.BF16)
        places = dict.fromkeys(("g", "p", "m", "v"), buffer.address)
        with pytest.raises(CommandError, match=r"state_format must be fp32 on .*, not bf16"):
            device.submit(UpdateCommand(rule, 16, places, places, CopyFormat.NONE))


def test_a_call_with_other_arguments_is_refused():
    library = call_of(LionStep(1e-3, 1)).kernel.library(TINY)
    with pytest.raises(ValueError, match="update_lion must get 16 arguments, not 2"):
        library.run([0, 0])


def topk_update(device, stream: bytes, params: int):
    """p, m, v after a step with a Top-K gradient, (3, params)."""
    slot = -(-4 * params // 4096) * 4096
    buffer, gradient = device.allocate(3 * slot), device.allocate(len(stream))
    buffer.host[:] = edge_state(2, 3 * slot // 4, seed=4)[0].view(np.uint8)
    gradient.host[:] = np.frombuffer(stream, np.uint8)
    buffer.sync_to_device()
    gradient.sync_to_device()
    places = {name: buffer.address + slot * k for k, name in enumerate("pmv")}
    inputs = {"g": gradient.address, **places}
    device.run(UpdateCommand(AdamStep(1e-3, 3), params, inputs, places, gradient=GradientFormat.TOPK,
                             gradient_bytes=len(stream)))  # fmt: skip
    buffer.sync_from_device()
    return buffer.host.reshape(3, slot).view(np.uint32)[:, :params].copy()


@pytest.mark.parametrize("real", ["float", pytest.param("Fp32", marks=pytest.mark.full)])
def test_a_topk_gradient_goes_straight_to_the_lanes(devices, real):
    params, rng = 9_001, np.random.default_rng(7)
    indices = np.flatnonzero(rng.random(params) < 0.03)
    stream = pack(indices, rng.standard_normal(indices.size, np.float32).view(np.uint32), params, ValueFormat.FP32)
    slot = -(-4 * params // 4096) * 1024
    p, m, v = edge_state(2, 3 * slot, seed=4)[0].reshape(3, slot)[:, :params]
    expected = optimizer_step(AdamStep(1e-3, 3), expand(stream, params), p, m, v)
    for actual, name in zip(topk_update(devices[real], stream, params), "pmv", strict=True):
        np.testing.assert_array_equal(actual, expected.state[name].view(np.uint32))
    broken = stream[:-8] + bytes([stream[-8] ^ 1]) + stream[-7:]
    with pytest.raises(StreamError, match="must have the CRC32C that is written in it, not one that the kernel found"):
        topk_update(devices[real], broken, params)


STUCK = """
#define NEARFLASH_PATIENCE_S 1
#include <cstdint>
#include "nearflash/stream.hpp"
using namespace nearflash;
void produce(Stream<int, 4>& out, std::uint32_t count) { for (std::uint32_t i = 0; i < count; ++i) out.write(i); }
void consume(Stream<int, 4>& in, std::uint32_t count) { for (std::uint32_t i = 0; i < count; ++i) in.read(); }
extern "C" void stuck(std::uint32_t written, std::uint32_t read) {
    Stream<int, 4> numbers("numbers");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(produce(numbers, written));
    NEARFLASH_STAGE(consume(numbers, read));
    NEARFLASH_JOIN
}
"""


def test_a_stage_that_cannot_go_on_names_its_stream():
    library = HlsLibrary.build("stuck", STUCK, TINY)
    start = time.monotonic()
    for written, read, state in ((9, 10, "empty"), (20, 10, "full")):
        with pytest.raises(DeviceError, match=f"numbers must move within 1 s, not stay {state}"):
            library.run([written, read])
    assert time.monotonic() - start < 20
    library.run([1000, 1000])
