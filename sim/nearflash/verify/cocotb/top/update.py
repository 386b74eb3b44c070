"""cocotb testbench of nearflash.gateware.top.update: cocotbext-axi drives the registers and is the memory."""

import itertools
from typing import Any

import numpy as np

from nearflash.abi.kernel.commands import CopyFormat, Status, UpdateCommand
from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.abi.registers import MAGIC, UPDATE
from nearflash.gateware.top.update import UpdateKernel
from nearflash.model.update.lane import optimizer_step
from nearflash.verify.cocotb.kernel import KernelTestbench
from nearflash.verify.cocotb.testbench import start, test

_OTHERS = (SgdStep(0.1, 3), SgdStep(0.1, 3, momentum=0.9, nesterov=True), AdagradStep(0.1, 3), LionStep(1e-3, 3))
_BASE = {"g": 0x10000, "p": 0x20000, "m": 0x30000, "v": 0x40000, "copy": 0x50000}


def component() -> UpdateKernel:
    """The tiny configuration."""
    return UpdateKernel(update_config("update-tiny"))


def _testbench(dut: Any) -> KernelTestbench:
    return KernelTestbench(dut, UPDATE, ports=4, limit_cycles=20_000)


def _state(params: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    state = {name: rng.standard_normal(params).astype(np.float32) for name in ("g", "p", "m", "v")}
    state["v"] = np.square(state["v"])
    return state


@test(timeout_cycles=120_000)
async def equals_the_model_while_channels_pause(dut: Any) -> None:
    """Every rule, profile and copy, tails of all kinds, in place."""
    await start(dut)
    testbench = _testbench(dut)
    testbench.pause(seed=1, share=0.4)
    copies = itertools.cycle(CopyFormat)
    rules = [*(AdamStep(lr=1e-3, step=5, weight_decay=0.1, profile=profile) for profile in Profile), *_OTHERS]
    for params, rule in itertools.product((1, 2, 77), rules):
        copy, state = next(copies), _state(params, seed=params)
        for name, values in state.items():
            testbench.memory.write(_BASE[name], values.tobytes())
        testbench.memory.write(_BASE["copy"], b"\xee" * (2 * params + 2))
        outputs = {name: _BASE[name] for name in ("p", *rule.arrays, "copy")}
        inputs = {name: _BASE[name] for name in ("g", "p", *rule.arrays)}
        command = UpdateCommand(rule, params, inputs, outputs, copy)
        await testbench.run(command.registers())
        assert await testbench.read("status") == Status.OK
        assert await testbench.read("params_done") == params
        want = optimizer_step(rule, **state, copy=copy)
        for name in ("p", "m", "v"):
            expected = want.state.get(name, state[name])  # an array that the rule does not have stays as it was
            assert bytes(testbench.memory.read(_BASE[name], 4 * params)) == expected.tobytes(), name
        written = b"" if want.copy is None else want.copy.tobytes()
        seen = bytes(testbench.memory.read(_BASE["copy"], 2 * params + 2))
        assert seen == written + b"\xee" * (2 * params + 2 - len(written))


@test()
async def identity_states_what_was_built(dut: Any) -> None:
    """Magic, ABI version, digest and git revision."""
    await start(dut)
    dut.git_revision.value = 0x1234ABCD
    testbench = _testbench(dut)
    assert await testbench.read("magic") == MAGIC
    assert await testbench.read("config_digest") == update_config("update-tiny").digest64
    assert await testbench.read("git_revision") == 0x1234ABCD


@test()
async def a_misaligned_command_touches_nothing(dut: Any) -> None:
    """Status and address; no bus traffic."""
    await start(dut)
    testbench = _testbench(dut)
    traffic = testbench.watch_addresses()
    inputs = {"g": 0x1000, "p": 0x2004, "m": 0x3000, "v": 0x4000}
    outputs = {"p": 0x2000, "m": 0x3000, "v": 0x4000}
    await testbench.run(UpdateCommand(AdamStep(lr=1e-3, step=1), 5, inputs, outputs).registers())
    assert await testbench.read("status") == Status.MISALIGNED
    assert await testbench.read("fault_address") == 0x2004
    assert not traffic
