"""Top-K gradients in the update kernel, on Verilator."""

import numpy as np
import pytest

from nearflash.abi.errors import StreamError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep
from nearflash.abi.topk import TILE_PARAMS, StreamFault
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.verify.fixtures.gradients import bad_streams

ADAM = AdamStep(lr=1e-3, step=4, weight_decay=0.01)
BAD = bad_streams()


@pytest.fixture(scope="module")
def device():
    model = MemoryModel(read_latency_cycles=60, write_latency_cycles=40)
    with VerilatorDevice(update_config("update-tiny"), memory_bytes=1 << 22, model=model) as device:
        yield device


@pytest.mark.parametrize(("params", "density"), [(5, 1.0), (9_001, 0.1)])
def test_equals_the_model_and_reads_the_stream_only(device, params, density):
    case = UpdateVector(ADAM, params, CopyFormat.FP16, density=density)
    state = random_state(np.random.default_rng(params), params)
    results, counters = run_update(device, case, state)
    with ModelDevice(update_config("update-tiny")) as model:
        expected, counted = run_update(model, case, state)
    assert differing_words(results, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted


def test_a_bad_stream_is_named_and_ends_the_writing(device):
    """Results of the first tile may be there, others not; the next command is as any other."""
    buffers = {name: device.allocate(32768) for name in ("g", "p", "m", "v", "p_out", "m_out", "v_out")}
    outputs = {name: buffers[f"{name}_out"] for name in ("p", "m", "v")}
    good = BAD["other params"]._replace(params=BAD["magic"].params, fault=StreamFault.LENGTH)
    for name, bad in {**BAD, "part of a word": good._replace(stream=good.stream + b"1234")}.items():
        stream = np.frombuffer(bad.stream, np.uint8)
        buffers["g"].host[: stream.size] = stream
        for buffer in outputs.values():
            buffer.host[:] = 0xEE
        for buffer in (buffers["g"], *outputs.values()):
            buffer.sync_to_device(0, buffer.size_bytes)
        command = UpdateCommand(
            ADAM,
            bad.params,
            {role: buffers[role].address for role in ("g", "p", "m", "v")},
            {role: buffer.address for role, buffer in outputs.items()},
            gradient=GradientFormat.TOPK,
            gradient_bytes=stream.size,
        )
        with pytest.raises(StreamError) as raised:
            device.run(command)
        assert raised.value.fault == bad.fault, f"{name}: {raised.value}"
        for buffer in outputs.values():
            buffer.sync_from_device(0, buffer.size_bytes)
            assert (buffer.host[4 * TILE_PARAMS if bad.stream else 0 :] == 0xEE).all(), name
    for buffer in buffers.values():
        device.free(buffer)
    case = UpdateVector(ADAM, 77)
    state = random_state(np.random.default_rng(3), 77)
    with ModelDevice(update_config("update-tiny")) as model:
        assert differing_words(run_update(device, case, state)[0], run_update(model, case, state)[0])[1] == 0
