"""cocotb testbench of nearflash.gateware.top.attend: cocotbext-axi drives the registers and is the memory."""

import itertools
import mmap
import random
from dataclasses import replace
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles, First, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam

from nearflash.abi.attend.batch import AttendBatch
from nearflash.abi.attend.descriptor import AttendDescriptor, Mode
from nearflash.abi.attend.pages import IndexFormat
from nearflash.abi.commands import Status
from nearflash.abi.config import attend_config
from nearflash.abi.registers import ATTEND, MAGIC
from nearflash.gateware.top.attend import AttendKernel
from nearflash.model.attend.image import head_image
from nearflash.model.attend.placement import MemoryStore
from nearflash.model.attend.settings import Addresses, Settings
from nearflash.sim.attention import Case, differences, random_case
from nearflash.sim.testbench import start, test

_CONFIG = "attend-pynq-z2"
_MEMORY_BYTES = 1 << 20
_DESCRIPTORS, _COMPLETIONS, _OPERANDS, _PAGES = 0x1000, 0x2000, 0x10000, 0x20000
_SCALE = 0.18


def component() -> AttendKernel:
    """The smallest configuration: one channel, pages in memory."""
    return AttendKernel(attend_config(_CONFIG))


class Bench:
    """The kernel with a register master and a memory behind its port."""

    def __init__(self, dut: Any) -> None:
        self.dut = dut
        self.registers = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axi_control_"), dut.clk, dut.rst)
        memory = mmap.mmap(-1, _MEMORY_BYTES)
        bus = AxiBus.from_prefix(dut, "m_axi_gmem0_")
        self.memory = AxiRam(bus, dut.clk, dut.rst, size=_MEMORY_BYTES, mem=memory)
        self._end = _OPERANDS

    def pause(self, seed: int) -> None:
        """Make every channel of the port pause at random."""
        write, read = self.memory.write_if, self.memory.read_if
        channels = (write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel)
        for offset, channel in enumerate(channels):
            rng = random.Random(100 * seed + offset)
            channel.set_pause_generator(rng.random() < 0.3 for _ in itertools.count())

    async def write(self, name: str, value: int) -> None:
        """Write a register by name."""
        for word in range(ATTEND[name].width_bits // 32):
            await self.registers.write_dword(ATTEND[name].offset + 4 * word, value >> 32 * word & 0xFFFFFFFF)

    async def read(self, name: str) -> int:
        """Read a register by name."""
        words = range(ATTEND[name].width_bits // 32)
        values = [await self.registers.read_dword(ATTEND[name].offset + 4 * word) for word in words]
        return sum(value << 32 * word for word, value in enumerate(values))

    async def run(self, batch: AttendBatch) -> None:
        """Run a batch to its interrupt."""
        for name, value in batch.registers().items():
            await self.write(name, value)
        await self.write("interrupt_enable", 1)
        await self.write("interrupt_mask", 1)
        await self.write("control", 1)
        done = RisingEdge(self.dut.interrupt)
        assert await First(done, ClockCycles(self.dut.clk, 60_000)) is done, "no interrupt"
        assert await self.read("control") & 0b10, "ap_done must be set"
        await self.write("interrupt_status", 1)

    def put(self, data: bytes) -> int:
        """Put bytes behind what is there; their address."""
        address = self._end
        self.memory.write(address, data)
        self._end += -(-len(data) // 8) * 8
        return address

    def place(self, cases: list[Case]) -> tuple[AttendDescriptor, ...]:
        """Operands, tables and pages in memory."""
        store, descriptors = MemoryStore(_PAGES, attend_config(_CONFIG).channels), []
        for case in cases:
            image = head_image(case.k, case.v, case.settings, case.owner, store)
            for page in image.pages:
                assert page.entry.address is not None
                self.memory.write(page.entry.address, page.data)
            arrays = (case.q, case.v_mean, np.zeros_like(case.q), image.index_table, image.token_table)
            addresses = Addresses(*(self.put(array.tobytes()) for array in arrays))
            descriptors.append(case.settings.descriptor(case.owner, len(case.k), len(case.q), addresses))
        return tuple(descriptors)


_CASES = [
    random_case(Settings(Mode.DENSE | Mode.REFERENCE, 32, _SCALE, reference=(2, 2)), 21, 2, seed=1),
    random_case(Settings(Mode.PAGE | Mode.PROBABILITY, 32, _SCALE, channels=8, budget=3, local=2, group_tokens=8,
                         block_tokens=32, index_format=IndexFormat.INT4), 75, 3, seed=2, head=1),
    random_case(Settings(Mode(0), 16, _SCALE, channels=4, budget=9, local=2, group_tokens=8, interleaved=True,
                         block_tokens=32), 50, 1, seed=3, head=2),
]  # fmt: skip


@test(timeout_cycles=80_000)
async def equals_the_model_while_channels_pause(dut: Any) -> None:
    """A dense head, one by pages and one by tokens, in flight together."""
    await start(dut)
    bench = Bench(dut)
    bench.pause(seed=1)
    batch = AttendBatch(bench.place(_CASES), _DESCRIPTORS, _COMPLETIONS, contexts=4)
    bench.memory.write(_DESCRIPTORS, batch.pack())
    await bench.run(batch)
    assert await bench.read("status") == Status.OK
    assert await bench.read("heads_done") == len(_CASES)
    completions = batch.completions(bytes(bench.memory.read(_COMPLETIONS, 32 * len(_CASES))))
    for case, descriptor, completion in zip(_CASES, batch.descriptors, completions, strict=True):
        out = np.frombuffer(bytes(bench.memory.read(descriptor.out_address, case.q.nbytes)), np.float16)
        assert not differences(case, completion, None if completion.faults else out.reshape(case.q.shape))


@test()
async def identity_says_what_was_built(dut: Any) -> None:
    """Magic, digest and git revision; nothing waits."""
    await start(dut)
    dut.git_revision.value = 0x1234ABCD
    bench = Bench(dut)
    assert await bench.read("magic") == MAGIC
    assert await bench.read("config_digest") == attend_config(_CONFIG).digest64
    assert await bench.read("git_revision") == 0x1234ABCD
    assert await bench.read("waiting") == 0


@test()
async def what_cannot_begin_touches_nothing(dut: Any) -> None:
    """Status and address; no bus traffic."""
    await start(dut)
    bench = Bench(dut)
    traffic: list[int] = []
    watch = cocotb.start_soon(_watch_addresses(dut, traffic))
    batch = AttendBatch(bench.place(_CASES[:1]), _DESCRIPTORS + 64, _COMPLETIONS, contexts=4)
    await bench.run(batch)
    assert (await bench.read("status"), await bench.read("fault_address")) == (Status.MISALIGNED, _DESCRIPTORS + 64)
    await bench.run(replace(batch, descriptors=()))
    assert await bench.read("status") == Status.EMPTY
    watch.cancel()
    assert not traffic


async def _watch_addresses(dut: Any, seen: list[int]) -> None:
    while True:
        await RisingEdge(dut.clk)
        if dut.m_axi_gmem0__arvalid.value or dut.m_axi_gmem0__awvalid.value:
            seen.append(1)
