"""LUN table: which lun is found, when, and what changes a record."""

from amaranth.sim import Simulator

from nearflash.gateware.nand.luns import TICK_LOG2, LunPhase, LunTable

UNITS = 4


def simulate(drive):
    dut = LunTable(UNITS, 8)

    async def run(ctx):
        await drive(ctx, dut)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run)
    simulator.run()


async def find(ctx, dut, limit=2 * UNITS + 4):
    for _ in range(limit):
        if ctx.get(dut.found):
            return ctx.get(dut.found_unit)
        await ctx.tick()
    return None


async def write(ctx, dut, record, signal="update"):
    ctx.set(dut.new, record)
    ctx.set(getattr(dut, signal), 1)
    await ctx.tick()
    ctx.set(getattr(dut, signal), 0)


async def settle_all(ctx, dut, phase=LunPhase.IDLE):
    for _ in range(UNITS):
        await find(ctx, dut)
        await write(ctx, dut, {"phase": phase})


def test_all_units_start_with_a_reset_in_turn():
    async def drive(ctx, dut):
        found = []
        for _ in range(UNITS):
            found.append(await find(ctx, dut))
            assert ctx.get(dut.found_record.phase) == LunPhase.START
            await write(ctx, dut, {"phase": LunPhase.READY})
        assert sorted(found) == list(range(UNITS))
        assert await find(ctx, dut) is None

    simulate(drive)


def test_an_idle_unit_is_found_for_jobs_or_an_operation_unless_it_failed():
    async def drive(ctx, dut):
        await settle_all(ctx, dut)
        assert await find(ctx, dut) is None
        for cause in (dut.jobs, dut.operation):
            ctx.set(cause, 1)
            assert await find(ctx, dut) is not None
            ctx.set(cause, 0)
            await write(ctx, dut, {"phase": LunPhase.IDLE})
        for _ in range(UNITS):
            ctx.set(dut.jobs, 1)
            await find(ctx, dut)
            await write(ctx, dut, {"phase": LunPhase.IDLE, "failed": 1})
        assert await find(ctx, dut) is None

    simulate(drive)


def test_a_busy_unit_is_found_when_due():
    async def drive(ctx, dut):
        await settle_all(ctx, dut, LunPhase.READY)
        ctx.set(dut.peek, 1)
        ctx.set(dut.peek_unit, 2)
        due = ctx.get(dut.now) + 3
        await write(ctx, dut, {"phase": LunPhase.SENSE, "due": due}, "change")
        ctx.set(dut.peek, 0)
        assert await find(ctx, dut, limit=5 << TICK_LOG2) == 2
        assert 0 <= ctx.get(dut.now) - due <= 1 and ctx.get(dut.due)

    simulate(drive)


def test_a_changed_record_is_looked_at_again():
    async def drive(ctx, dut):
        await settle_all(ctx, dut)
        ctx.set(dut.jobs, 1)
        lun = await find(ctx, dut)
        ctx.set(dut.peek, 1)
        ctx.set(dut.peek_unit, lun ^ 1)
        await write(ctx, dut, {"phase": LunPhase.READY}, "change")
        assert ctx.get(dut.found)  # another lun's record
        ctx.set(dut.peek_unit, lun)
        await write(ctx, dut, {"phase": LunPhase.READY}, "change")
        assert not ctx.get(dut.found)
        ctx.set(dut.peek, 0)
        assert await find(ctx, dut) not in (lun, lun ^ 1)

    simulate(drive)
