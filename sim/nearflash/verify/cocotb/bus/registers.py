"""cocotb testbench of nearflash.gateware.bus.registers, against cocotbext-axi's AXI4-Lite master."""

import random
from typing import Any

from cocotb.triggers import ReadOnly, RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster, AxiResp

from nearflash.abi.fields import Access
from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.sim.stalls import STALLS
from nearflash.verify.cocotb.testbench import start, test


def component() -> RegisterFile:
    """The register block of the update kernel."""
    return RegisterFile(UPDATE)


async def _master(dut: Any) -> AxiLiteMaster:
    await start(dut)
    dut.done.value = 0
    dut.status.value = 0
    return AxiLiteMaster(AxiLiteBus.from_prefix(dut, "bus_"), dut.clk, dut.rst)


def _stall(master: AxiLiteMaster, pattern: str, seed: int) -> None:
    write, read = master.write_if, master.read_if
    for number, channel in enumerate((write.aw_channel, write.w_channel, read.ar_channel)):
        channel.set_pause_generator(STALLS[pattern].source.cycles(random.Random(f"{seed} {number}")))
    for number, channel in enumerate((write.b_channel, read.r_channel)):
        channel.set_pause_generator(STALLS[pattern].sink.cycles(random.Random(f"{seed} sink {number}")))


@test()
async def registers_hold_what_the_host_writes(dut: Any) -> None:
    """Random writes of 1 to 8 bytes against a copy in Python; constants and holes stay as they are."""
    master = await _master(dut)
    copy = {}
    for register in (register for register in UPDATE if register.access is Access.RW):
        copy[register.name] = bytearray(register.reset.to_bytes(register.width_bits // 8, "little"))
    for seed, pattern in enumerate(STALLS):
        _stall(master, pattern, seed)
        rng = random.Random(seed)
        for name in copy:
            first = rng.randrange(len(copy[name]))
            data = rng.randbytes(rng.randrange(1, len(copy[name]) - first + 1))
            response = await master.write(UPDATE[name].offset + first, data)
            assert response.resp == AxiResp.OKAY
            copy[name][first : first + len(data)] = data
        for name, held in copy.items():
            response = await master.read(UPDATE[name].offset, len(held))
            assert (response.resp, bytes(response.data)) == (AxiResp.OKAY, bytes(held))
        response = await master.write(UPDATE["magic"].offset, bytes(4))
        assert response.resp == AxiResp.SLVERR
        assert await master.read_dword(UPDATE["magic"].offset) == UPDATE["magic"].reset
        assert (await master.read(UPDATE.size_bytes - 4, 4)).resp == AxiResp.SLVERR


@test()
async def a_kernel_runs_as_the_runtime_expects(dut: Any) -> None:
    """Start, poll, acknowledge, and the interrupt, as XRT does it."""
    master = await _master(dut)
    control = UPDATE["control"]
    await master.write_dword(UPDATE["interrupt_enable"].offset, 1)
    await master.write_dword(UPDATE["interrupt_mask"].offset, 1)
    for _ in range(2):
        await master.write_dword(control.offset, control.pack({"ap_start": 1}))
        seen = control.unpack(await master.read_dword(control.offset))
        assert (seen["ap_start"], seen["ap_done"], seen["ap_idle"]) == (1, 0, 0)
        await RisingEdge(dut.clk)
        dut.done.value = 1
        await RisingEdge(dut.clk)
        dut.done.value = 0
        await ReadOnly()
        assert dut.interrupt.value
        await RisingEdge(dut.clk)
        seen = control.unpack(await master.read_dword(control.offset))
        assert (seen["ap_start"], seen["ap_done"], seen["ap_idle"]) == (0, 1, 1)
        await master.write_dword(control.offset, control.pack({"ap_continue": 1}))
        await master.write_dword(UPDATE["interrupt_status"].offset, 1)
        await ReadOnly()
        assert not dut.interrupt.value
        await RisingEdge(dut.clk)
