"""A step of AdamW through the update kernel equals the model to the bit."""

import cocotb
import numpy as np
from testbench import Kernel

from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdamStep
from nearflash.model.update.lane import optimizer_step

PARAMS = 77
ADDRESSES = {"g": 0x10000, "p": 0x20000, "m": 0x30000, "v": 0x40000, "copy": 0x50000}


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def a_step_of_adamw(dut):
    kernel = Kernel(dut)
    await kernel.start()
    assert await kernel.read("magic") == kernel.description["magic"]
    rng = np.random.default_rng(1)
    state = {name: rng.standard_normal(PARAMS).astype(np.float32) for name in "gpmv"}
    state["v"] = np.square(state["v"])
    for name, values in state.items():
        kernel.memory.write(ADDRESSES[name], values.tobytes())

    rule = AdamStep(lr=1e-3, step=5, weight_decay=0.1)
    inputs = {name: ADDRESSES[name] for name in "gpmv"}
    outputs = {name: ADDRESSES[name] for name in ("p", "m", "v", "copy")}
    await kernel.run(UpdateCommand(rule, PARAMS, inputs, outputs, CopyFormat.BF16).registers())

    assert await kernel.read("params_done") == PARAMS
    expected = optimizer_step(rule, **state, copy=CopyFormat.BF16)
    for name, values in {**expected.state, "copy": expected.copy}.items():
        assert bytes(kernel.memory.read(ADDRESSES[name], values.nbytes)) == values.tobytes(), name
