import pytest
from amaranth.sim import Simulator

from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.control import KernelControl

CONTROL, ENABLE, MASK, STATUS = 0x0, 0x4, 0x8, 0xC
START, DONE, IDLE, READY, CONTINUE, RESTART = 0x01, 0x02, 0x04, 0x08, 0x10, 0x80


class Host:
    """Drives the access pulses as the register file does."""

    def __init__(self, ctx, dut):
        self.ctx, self.dut = ctx, dut

    async def write(self, offset, value):
        self.ctx.set(self.dut.write_offset, offset)
        self.ctx.set(self.dut.write_data, value)
        await self.pulse(self.dut.write)

    async def read(self, offset):
        self.ctx.set(self.dut.read_offset, offset)
        value = self.ctx.get(self.dut.read_data)
        await self.pulse(self.dut.read)
        return value

    async def pulse(self, signal):
        self.ctx.set(signal, 1)
        await self.ctx.tick()
        self.ctx.set(signal, 0)


@pytest.fixture
def run():
    def simulate(scenario):
        dut = KernelControl(UPDATE)
        ran = []

        async def testbench(ctx):
            await scenario(ctx, dut, Host(ctx, dut))
            ran.append(True)

        simulator = Simulator(dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
        assert ran

    return simulate


def test_a_run_from_start_to_acknowledge(run):
    async def scenario(ctx, dut, host):
        assert await host.read(CONTROL) == IDLE
        await host.write(CONTROL, START)
        assert ctx.get(dut.start)
        await ctx.tick()
        assert not ctx.get(dut.start)
        assert await host.read(CONTROL) == START
        await host.pulse(dut.done)
        assert await host.read(CONTROL) == DONE | IDLE | READY
        assert await host.read(CONTROL) == IDLE

    run(scenario)


def test_the_next_start_waits_until_done_is_acknowledged(run):
    async def scenario(ctx, dut, host):
        await host.write(CONTROL, START)
        await ctx.tick()
        await host.pulse(dut.done)
        await host.write(CONTROL, START)
        for _ in range(3):
            assert not ctx.get(dut.start)
            await ctx.tick()
        await host.write(CONTROL, CONTINUE)
        assert ctx.get(dut.start)

    run(scenario)


def test_auto_restart_starts_again(run):
    async def scenario(ctx, dut, host):
        await host.write(CONTROL, START | RESTART)
        for _ in range(3):
            assert ctx.get(dut.start)
            await ctx.tick()
            assert not ctx.get(dut.start)
            await host.pulse(dut.done)
        await host.write(CONTROL, 0)
        await host.pulse(dut.done)
        assert await host.read(CONTROL) == DONE | IDLE | READY

    run(scenario)


def test_other_reads_do_not_clear_done(run):
    async def scenario(ctx, dut, host):
        await host.pulse(dut.done)
        for offset in (ENABLE, MASK, STATUS):
            assert await host.read(offset) == 0
        assert await host.read(CONTROL) & DONE

    run(scenario)


@pytest.mark.parametrize(("mask", "status"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_the_mask_selects_what_raises_the_interrupt(run, mask, status):
    async def scenario(ctx, dut, host):
        await host.write(ENABLE, 1)
        await host.write(MASK, mask)
        await host.pulse(dut.done)
        assert await host.read(STATUS) == status
        assert ctx.get(dut.interrupt) == bool(status)
        await host.write(STATUS, status)
        assert await host.read(STATUS) == 0
        assert not ctx.get(dut.interrupt)

    run(scenario)


def test_the_global_enable_gates_the_interrupt_but_not_the_status(run):
    async def scenario(ctx, dut, host):
        await host.write(MASK, 3)
        await host.pulse(dut.done)
        assert not ctx.get(dut.interrupt)
        await host.write(ENABLE, 1)
        assert ctx.get(dut.interrupt)
        assert (await host.read(ENABLE), await host.read(MASK)) == (1, 3)

    run(scenario)


def test_an_event_wins_over_a_simultaneous_toggle(run):
    async def scenario(ctx, dut, host):
        await host.write(MASK, 1)
        await host.pulse(dut.done)
        ctx.set(dut.done, 1)
        await host.write(STATUS, 1)
        ctx.set(dut.done, 0)
        assert await host.read(STATUS) == 1

    run(scenario)
