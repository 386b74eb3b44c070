"""Device `verilator` beside device `model`: equal bits, and hangs and faults that say what happened."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import ConfigError, DeviceError, WaitTimeoutError
from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.kernel.config import CONFIGS, update_config
from nearflash.abi.optimizers import AdamStep, Profile
from nearflash.device import open_device
from nearflash.device.backends.model.update import ModelDevice

device_module = pytest.importorskip("nearflash.sim.verilator.device")
kernel_module = pytest.importorskip("nearflash.sim.verilator.kernel")

TINY = update_config("update-tiny")
STREAMS = ("g", "p", "m", "v")


@pytest.fixture(scope="module")
def device():
    with open_device("verilator:update-tiny") as opened:
        yield opened


def command_on(device, params, **options):
    """Buffers with the same random contents on every device, and the command over them."""
    rng = np.random.default_rng(params)
    buffers = {}
    for name in (*STREAMS, "copy"):
        buffers[name] = device.allocate(4 * params)
        values = rng.normal(0, 0.01, params).astype(np.float32)
        buffers[name].host.view(np.float32)[:] = np.abs(values) if name == "v" else values
        buffers[name].sync_to_device()
    command = UpdateCommand(
        AdamStep(lr=1e-3, step=3, weight_decay=0.1, **options),
        params,
        {name: buffers[name].address for name in STREAMS},
        {name: buffers[name].address for name in ("p", "m", "v", "copy")},
        CopyFormat.BF16,
    )
    return command, buffers


def contents(device, buffers):
    found = {}
    for name, buffer in buffers.items():
        buffer.sync_from_device()
        found[name] = buffer.host.copy()
        device.free(buffer)
    return found


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("params", [1, 1000])
def test_equals_the_model(device, profile, params):
    results = []
    with ModelDevice(TINY) as model:
        for one in (device, model):
            command, buffers = command_on(one, params, profile=profile)
            completion = one.run(command)
            assert completion.counters["params_done"] == params
            results.append(contents(one, buffers))
    for name, expected in results[1].items():
        assert (results[0][name] == expected).all(), name


def test_stalls_change_time_but_no_bit(device):
    results = []
    for model in (kernel_module.MemoryModel(), kernel_module.MemoryModel(stall_percent=60, seed=4)):
        device.kernel.configure(model)
        command, buffers = command_on(device, 500)
        cycles = device.run(command).counters["cycles"]
        results.append((cycles, contents(device, buffers)))
    device.kernel.configure(kernel_module.MemoryModel())
    assert results[1][0] > results[0][0]
    for name, expected in results[0][1].items():
        assert (results[1][1][name] == expected).all(), name


def test_a_hang_names_what_waits_and_reset_recovers(device):
    device.kernel.configure(kernel_module.MemoryModel(stall_percent=100))
    command, buffers = command_on(device, 500)
    with pytest.raises(WaitTimeoutError, match=r"stand still for 100000 cycles: m_axi_gmem0.ar waits for ready; "):
        device.run(command)
    device.kernel.configure(kernel_module.MemoryModel())
    device.reset()
    assert device.run(command).counters["params_done"] == 500
    contents(device, buffers)


def test_a_bus_fault_is_a_device_error(device):
    # Past the checks of submit: what the kernel itself says of addresses that no memory answers.
    inputs = dict.fromkeys(STREAMS, 0x40)
    device._start(UpdateCommand(AdamStep(lr=1e-3, step=1), 64, inputs, inputs))
    with pytest.raises(DeviceError, match="verilator:update-tiny ended with READ_ERROR at address 0x40"):
        device._finish(60)
    command, buffers = command_on(device, 64)
    assert device.run(command).counters["params_done"] == 64
    contents(device, buffers)


def test_nand_of_a_build_has_its_timing_and_page():
    found = {name: device_module.nand_model(build) for name, build in CONFIGS.items()}
    parts = {name: (model.part.name, model.luns) for name, model in found.items() if model}
    assert parts == {"attend-tiny": ("slc-1400", 4), "attend-zynq7045": ("page16k-1400", 16),
                     "attend-zu17eg": ("page16k-1400", 32)}  # fmt: skip
    with pytest.raises(ConfigError, match="some NAND part must have the timing and the page of attend-tiny, not none"):
        device_module.nand_model(replace(CONFIGS["attend-tiny"], page_bytes=8192))
