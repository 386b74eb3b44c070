import pytest
from amaranth.sim import Simulator

from nearflash.abi.fields import Access, Field, Register, RegisterMap
from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.verify.cocotb.run import run_testbench

OKAY, SLVERR = 0, 2
SMALL = RegisterMap("small", 0x40, (
    *(register for register in UPDATE if register.access is Access.CONTROL),
    Register("kind", 0x10, 32, Access.RO, "a constant", reset=0x1234),
    Register("mode", 0x14, 32, Access.RW, "two fields", (Field("low", 0, 4, ""), Field("high", 28, 4, "")), 0x30000002),
    Register("address", 0x18, 64, Access.RW, "two words"),
    Register("count", 0x20, 64, Access.RO, "an input of two words"),
))  # fmt: skip


class Host:
    """AXI4-Lite accesses on the wires, one at a time; `wait` cycles before each ready of ours."""

    def __init__(self, ctx, dut, wait=0):
        self.ctx, self.bus, self.wait = ctx, dut.bus, wait

    async def write(self, offset, value, strobe=0b1111):
        bus = self.bus
        for signal, value_in in ((bus.awaddr, offset), (bus.wdata, value), (bus.wstrb, strobe)):
            self.ctx.set(signal, value_in)
        self.ctx.set(bus.awvalid, 1)
        await self.ctx.tick().repeat(self.wait + 1)
        assert not self.ctx.get(bus.bvalid)  # the data did not come yet
        self.ctx.set(bus.wvalid, 1)
        await self.ctx.tick().until(bus.awready & bus.wready)
        self.ctx.set(bus.awvalid, 0)
        self.ctx.set(bus.wvalid, 0)
        return (await self._answer(bus.bvalid, bus.bready, bus.bresp))[0]

    async def read(self, offset):
        bus = self.bus
        self.ctx.set(bus.araddr, offset)
        self.ctx.set(bus.arvalid, 1)
        await self.ctx.tick().until(bus.arready)
        self.ctx.set(bus.arvalid, 0)
        return await self._answer(bus.rvalid, bus.rready, bus.rresp, bus.rdata)

    async def _answer(self, valid, ready, *values):
        for _ in range(self.wait):
            await self.ctx.tick()
        assert self.ctx.get(valid)
        got = tuple(self.ctx.get(value) for value in values)
        self.ctx.set(ready, 1)
        await self.ctx.tick()
        self.ctx.set(ready, 0)
        assert not self.ctx.get(valid)
        return got


@pytest.fixture
def run():
    def simulate(scenario, registers=SMALL, wait=0):
        dut = RegisterFile(registers)
        ran = []

        async def testbench(ctx):
            await scenario(ctx, dut, Host(ctx, dut, wait))
            ran.append(True)

        simulator = Simulator(dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
        assert ran

    return simulate


@pytest.mark.parametrize("wait", [0, 3])
def test_values_follow_writes_and_read_back(run, wait):
    async def scenario(ctx, dut, host):
        assert (ctx.get(dut.values.mode.low), ctx.get(dut.values.mode.high)) == (2, 3)
        assert await host.write(0x14, 0xA0000005) == OKAY
        assert (ctx.get(dut.values.mode.low), ctx.get(dut.values.mode.high)) == (5, 0xA)
        assert await host.write(0x18, 0x89ABCDEF) == OKAY
        assert await host.write(0x1C, 0x01234567) == OKAY
        assert ctx.get(dut.values.address) == 0x0123456789ABCDEF
        assert await host.read(0x18) == (OKAY, 0x89ABCDEF)
        assert await host.read(0x1C) == (OKAY, 0x01234567)
        assert await host.read(0x14) == (OKAY, 0xA0000005)

    run(scenario, wait=wait)


def test_strobes_select_bytes(run):
    async def scenario(ctx, dut, host):
        await host.write(0x18, 0x11223344)
        assert await host.write(0x18, 0xAABBCCDD, strobe=0b0101) == OKAY
        assert ctx.get(dut.values.address) == 0x11BB33DD
        await host.write(0x00, 1, strobe=0b1110)
        assert await host.read(0x00) == (OKAY, 4)  # ap_start not written: idle

    run(scenario)


def test_read_only_registers_show_constants_and_inputs(run):
    async def scenario(ctx, dut, host):
        ctx.set(dut.status.count, 0xFEDCBA9876543210)
        assert await host.read(0x10) == (OKAY, 0x1234)
        assert await host.read(0x20) == (OKAY, 0x76543210)
        assert await host.read(0x24) == (OKAY, 0xFEDCBA98)

    run(scenario)


@pytest.mark.parametrize("offset", [0x10, 0x20, 0x28, 0x3C])
def test_what_cannot_be_written_answers_an_error_and_changes_nothing(run, offset):
    async def scenario(ctx, dut, host):
        before = {at: await host.read(at) for at in range(0, 0x40, 4)}
        assert await host.write(offset, 0xFFFFFFFF) == SLVERR
        assert {at: await host.read(at) for at in range(0, 0x40, 4)} == before

    run(scenario)


def test_offsets_without_a_register_read_zero_with_an_error(run):
    async def scenario(ctx, dut, host):
        await host.read(0x10)
        assert await host.read(0x28) == (SLVERR, 0)

    run(scenario)


def test_start_done_and_interrupt(run):
    async def scenario(ctx, dut, host):
        await host.write(0x04, 1)
        await host.write(0x08, 1)
        starts = []

        for _ in range(2):
            ctx.set(dut.bus.awaddr, 0)
            ctx.set(dut.bus.wdata, 1)
            ctx.set(dut.bus.wstrb, 1)
            ctx.set(dut.bus.awvalid, 1)
            ctx.set(dut.bus.wvalid, 1)
            ctx.set(dut.bus.bready, 1)
            await ctx.tick()
            ctx.set(dut.bus.awvalid, 0)
            ctx.set(dut.bus.wvalid, 0)
            for _ in range(4):
                starts.append(ctx.get(dut.start))
                await ctx.tick()
            ctx.set(dut.bus.bready, 0)
            ctx.set(dut.done, 1)
            await ctx.tick()
            ctx.set(dut.done, 0)
            assert ctx.get(dut.interrupt)
            assert await host.read(0x00) == (OKAY, 0b1110)
            await host.write(0x0C, 1)
            assert not ctx.get(dut.interrupt)
        assert starts == [1, 0, 0, 0] * 2

    run(scenario)


def test_every_register_of_the_update_kernel_is_there(run):
    async def scenario(ctx, dut, host):
        mapped = {r.offset + step: r for r in UPDATE for step in range(0, r.width_bits // 8, 4)}
        for offset in range(0, UPDATE.size_bytes, 4):
            response, value = await host.read(offset)
            assert response == (OKAY if offset in mapped else SLVERR)
            if offset in mapped and mapped[offset].access is Access.RO and mapped[offset].width_bits == 32:
                assert value == mapped[offset].reset
        for register in UPDATE:
            if register.access is Access.RW:
                assert await host.write(register.offset, 0xFFFFFFFF) == OKAY

    run(scenario, registers=UPDATE)


def test_testbench():
    assert run_testbench("gateware.bus.registers").failed == ()
