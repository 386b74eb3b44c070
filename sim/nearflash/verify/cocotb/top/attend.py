"""cocotb testbench of nearflash.gateware.top.attend: cocotbext-axi drives the registers and is the memory."""

from dataclasses import replace
from typing import Any

import numpy as np

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import attend_config
from nearflash.abi.registers import ATTEND, MAGIC
from nearflash.gateware.top.attend import AttendKernel
from nearflash.model.attention.memory.image import head_image
from nearflash.model.attention.memory.placement import MemoryStore
from nearflash.model.attention.memory.settings import Addresses, HeadSettings
from nearflash.model.attention.random_vectors import random_vector
from nearflash.model.attention.vectors import TestVector, differences
from nearflash.verify.cocotb.kernel import KernelTestbench
from nearflash.verify.cocotb.testbench import start, test

_CONFIG = "attend-pynq-z2"
_DESCRIPTORS, _COMPLETIONS, _OPERANDS, _PAGES = 0x1000, 0x2000, 0x10000, 0x20000
_SCALE = 0.18


def component() -> AttendKernel:
    """The smallest configuration: one channel, pages in memory."""
    return AttendKernel(attend_config(_CONFIG))


class AttendTestbench(KernelTestbench):
    """The kernel, and what lies in its memory."""

    def __init__(self, dut: Any) -> None:
        super().__init__(dut, ATTEND)
        self._end = _OPERANDS

    def put(self, data: bytes) -> int:
        """Put bytes behind what is there; their address."""
        address = self._end
        self.memory.write(address, data)
        self._end += -(-len(data) // 8) * 8
        return address

    def place(self, vectors: list[TestVector]) -> tuple[AttendDescriptor, ...]:
        """Operands, tables and pages in memory."""
        store, descriptors = MemoryStore(_PAGES, attend_config(_CONFIG).channels), []
        for vector in vectors:
            image = head_image(vector.k, vector.v, vector.settings, vector.page_tag, store)
            for page in image.pages:
                assert page.entry.address is not None
                self.memory.write(page.entry.address, page.data)
            arrays = (vector.q, vector.v_mean, np.zeros_like(vector.q), image.index_table, image.token_table)
            addresses = Addresses(*(self.put(array.tobytes()) for array in arrays))
            descriptors.append(vector.settings.descriptor(vector.page_tag, len(vector.k), len(vector.q), addresses))
        return tuple(descriptors)


_CASES = [
    random_vector(HeadSettings(Mode.DENSE | Mode.REFERENCE, 32, _SCALE, reference=(2, 2)), 21, 2, seed=1),
    random_vector(HeadSettings(Mode.PAGE | Mode.PROBABILITY, 32, _SCALE, score_dims=8, top_k=3, local_window=2,
                         group_tokens=8, block_tokens=32, index_format=IndexFormat.INT4), 75, 3, seed=2, head=1),
    random_vector(HeadSettings(Mode(0), 16, _SCALE, score_dims=4, top_k=9, local_window=2, group_tokens=8,
                         interleaved=True, block_tokens=32), 50, 1, seed=3, head=2),
]  # fmt: skip


@test(timeout_cycles=80_000)
async def equals_the_model_while_channels_pause(dut: Any) -> None:
    """A dense head, one by pages and one by tokens, in flight together."""
    await start(dut)
    testbench = AttendTestbench(dut)
    testbench.pause(seed=1, share=0.3)
    batch = AttendBatch(testbench.place(_CASES), _DESCRIPTORS, _COMPLETIONS, contexts=4)
    testbench.memory.write(_DESCRIPTORS, batch.pack())
    await testbench.run(batch.registers())
    assert await testbench.read("status") == Status.OK
    assert await testbench.read("heads_done") == len(_CASES)
    completions = batch.completions(bytes(testbench.memory.read(_COMPLETIONS, 32 * len(_CASES))))
    for vector, descriptor, completion in zip(_CASES, batch.descriptors, completions, strict=True):
        out = np.frombuffer(bytes(testbench.memory.read(descriptor.out_address, vector.q.nbytes)), np.float16)
        assert not differences(vector, completion, None if completion.faults else out.reshape(vector.q.shape))


@test()
async def identity_states_what_was_built(dut: Any) -> None:
    """Magic, digest and git revision; nothing waits."""
    await start(dut)
    dut.git_revision.value = 0x1234ABCD
    testbench = AttendTestbench(dut)
    assert await testbench.read("magic") == MAGIC
    assert await testbench.read("config_digest") == attend_config(_CONFIG).digest64
    assert await testbench.read("git_revision") == 0x1234ABCD
    assert await testbench.read("waiting") == 0


@test()
async def what_cannot_begin_touches_nothing(dut: Any) -> None:
    """Status and address; no bus traffic."""
    await start(dut)
    testbench = AttendTestbench(dut)
    traffic = testbench.watch_addresses()
    batch = AttendBatch(testbench.place(_CASES[:1]), _DESCRIPTORS + 64, _COMPLETIONS, contexts=4)
    await testbench.run(batch.registers())
    assert (await testbench.read("status"), await testbench.read("fault_address")) == (
        Status.MISALIGNED,
        _DESCRIPTORS + 64,
    )
    await testbench.run(replace(batch, descriptors=()).registers())
    assert await testbench.read("status") == Status.EMPTY
    assert not traffic
