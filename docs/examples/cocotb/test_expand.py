"""A pruned matrix of fp16 through the expand kernel equals the model to the bit."""

import cocotb
import numpy as np
from testbench import Kernel

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader, ElementFormat
from nearflash.device.drivers.expand import expand_command
from nearflash.model.weights.bitmap import expand, pack

ROWS, COLUMNS = 5, 300
MATRIX, DENSE = 0x10000, 0x40000


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def a_pruned_matrix(dut):
    kernel = Kernel(dut)
    await kernel.start()
    assert await kernel.read("magic") == kernel.description["magic"]
    rng = np.random.default_rng(1)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float16).view(np.uint16)
    stream = pack(np.where(rng.random((ROWS, COLUMNS)) < 0.5, values, np.uint16(0)), ElementFormat.FP16, 2)
    kernel.memory.write(MATRIX, stream)

    command = expand_command(BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream)), MATRIX, DENSE)
    await kernel.run(command.registers())

    assert await kernel.read("elements_done") == ROWS * COLUMNS
    seen = np.frombuffer(bytes(kernel.memory.read(DENSE, command.out_bytes)), np.uint8).reshape(ROWS, -1)
    assert seen[:, : 2 * COLUMNS].tobytes() == expand(stream).tobytes()
