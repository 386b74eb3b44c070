"""Attention of one head over pages in memory, through the attend kernel, equals the model to the bit."""

import cocotb
import numpy as np
from testbench import Kernel

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.descriptor import Mode
from nearflash.model.attention.memory.image import head_image
from nearflash.model.attention.memory.placement import MemoryStore
from nearflash.model.attention.memory.settings import Addresses, HeadSettings
from nearflash.model.attention.random_vectors import random_vector
from nearflash.model.attention.vectors import differences

DESCRIPTORS, COMPLETIONS, OPERANDS, PAGES = 0x1000, 0x2000, 0x10000, 0x20000


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def a_head(dut):
    kernel = Kernel(dut)
    await kernel.start()
    assert await kernel.read("magic") == kernel.description["magic"]
    config = kernel.description["config"]
    settings = HeadSettings(Mode(0), 16, 0.18, score_dims=4, top_k=9, local_window=2, group_tokens=8,
                            interleaved=True, block_tokens=32)  # fmt: skip
    vector = random_vector(settings, 50, 1, seed=3, head=2)
    image = head_image(vector.k, vector.v, settings, vector.page_tag, MemoryStore(PAGES, config["channels"]))
    for page in image.pages:
        kernel.memory.write(page.entry.address, page.data)
    arrays = (vector.q, vector.v_mean, np.zeros_like(vector.q), image.index_table, image.token_table)
    addresses, end = [], OPERANDS
    for array in arrays:
        kernel.memory.write(end, array.tobytes())
        addresses.append(end)
        end += -(-array.nbytes // 8) * 8
    descriptor = settings.descriptor(vector.page_tag, len(vector.k), len(vector.q), Addresses(*addresses))
    batch = AttendBatch((descriptor,), DESCRIPTORS, COMPLETIONS, contexts=config["contexts"])
    kernel.memory.write(DESCRIPTORS, batch.pack())

    await kernel.run(batch.registers())

    assert await kernel.read("heads_done") == 1
    (completion,) = batch.completions(bytes(kernel.memory.read(COMPLETIONS, 32)))
    out = np.frombuffer(bytes(kernel.memory.read(descriptor.out_address, vector.q.nbytes)), np.float16)
    assert not completion.faults and not differences(vector, completion, out.reshape(vector.q.shape))
