"""cocotb testbench of nearflash.gateware.top.expand: cocotbext-axi drives the registers and is the memory."""

from dataclasses import replace
from typing import Any

import numpy as np

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, Coding, ElementFormat
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import expand_config
from nearflash.abi.kernel.expand import ExpandCommand
from nearflash.abi.registers import EXPAND, MAGIC
from nearflash.device.drivers.expand import expand_command
from nearflash.gateware.top.expand import ExpandKernel
from nearflash.model.weights.bitmap import expand, pack
from nearflash.verify.cocotb.kernel import KernelTestbench
from nearflash.verify.cocotb.testbench import start, test

_IN, _OUT = 0x10000, 0x40000
_UNTOUCHED = b"\xee"


def component() -> ExpandKernel:
    """Kernel of the tiny configuration, which the testbench simulates."""
    return ExpandKernel(expand_config("expand-tiny"))


def _testbench(dut: Any) -> KernelTestbench:
    return KernelTestbench(dut, EXPAND, ports=2, limit_cycles=20_000)


def _matrix(rows: int, columns: int, element: ElementFormat, seed: int) -> np.ndarray[Any, Any]:
    rng, number = np.random.default_rng(seed), element.number_format
    values = rng.integers(1, 1 << number.bits, (rows, columns), f"<u{number.bytes}")
    return np.where(rng.random((rows, columns)) < 0.5, values, values.dtype.type(0))


def _command(stream: bytes) -> ExpandCommand:
    command = expand_command(BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream)), _IN, _OUT)
    assert isinstance(command, ExpandCommand)
    return command


@test(timeout_cycles=120_000)
async def equals_the_model_while_channels_pause(dut: Any) -> None:
    """Rows of every kind of length, one command behind the other; nothing beside the rows is written."""
    await start(dut)
    testbench = _testbench(dut)
    testbench.pause(seed=1, share=0.4)
    for rows, columns, group_rows in ((1, 1, 1), (3, 65, 2), (5, 300, 5)):
        for element, coding in (
            (ElementFormat.FP16, Coding.PLAIN),
            (ElementFormat.INT8, Coding.PLAIN),
            (ElementFormat.BF16, Coding.EXPONENTS),
        ):
            stream = pack(_matrix(rows, columns, element, seed=rows), element, group_rows, coding)
            command = _command(stream)
            testbench.memory.write(_IN, stream)
            testbench.memory.write(_OUT, _UNTOUCHED * (command.out_bytes + 64))
            await testbench.run(command.registers())
            assert await testbench.read("status") == Status.OK
            assert await testbench.read("rows_done") == rows
            assert await testbench.read("elements_done") == rows * columns
            want = np.zeros((rows, command.row_bytes), np.uint8)
            dense = expand(stream).view(np.uint8).reshape(rows, -1)
            want[:, : dense.shape[1]] = dense
            seen = bytes(testbench.memory.read(_OUT, command.out_bytes + 64))
            assert seen == want.tobytes() + 64 * _UNTOUCHED


@test()
async def identity_states_what_was_built(dut: Any) -> None:
    """Magic, digest and git revision."""
    await start(dut)
    dut.git_revision.value = 0x1234ABCD
    testbench = _testbench(dut)
    assert await testbench.read("magic") == MAGIC
    assert await testbench.read("config_digest") == expand_config("expand-tiny").digest64
    assert await testbench.read("git_revision") == 0x1234ABCD


@test()
async def a_command_that_the_build_refuses_touches_nothing(dut: Any) -> None:
    """Status and address; no bus traffic."""
    await start(dut)
    testbench = _testbench(dut)
    traffic = testbench.watch_addresses()
    good = ExpandCommand(_IN, 256, _OUT, 1, 1, ElementFormat.FP16)
    for change, status, address in (
        ({"in_address": _IN + 8}, Status.MISALIGNED, _IN + 8),
        ({"out_address": _OUT + 32}, Status.MISALIGNED, _OUT + 32),
        ({"rows": 0}, Status.EMPTY, 0),
        ({"columns": 0}, Status.EMPTY, 0),
        ({"in_bytes": 0}, Status.EMPTY, 0),
        ({"columns": 1025}, Status.UNSUPPORTED, 0),
        ({"element": ElementFormat.INT4}, Status.UNSUPPORTED, 0),
        ({"output": ElementFormat.BF16}, Status.UNSUPPORTED, 0),
    ):
        await testbench.run(replace(good, **change).registers())
        assert await testbench.read("status") == status, change
        assert await testbench.read("fault_address") == address, change
    assert not traffic
