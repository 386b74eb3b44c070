"""The control that the kernels' sequencers share, on a sequencer of three rules."""

import pytest
from amaranth import Module
from amaranth.lib import data, wiring
from amaranth.sim import Simulator

from nearflash.abi.kernel.commands import Status
from nearflash.gateware.bus.command import await_start, command_members, finish, reject, report


class Sequencer(wiring.Component):
    """Rejects odd addresses and, before those, a count of zero; a run of 13 ends with a write error."""

    def __init__(self):
        super().__init__(command_members(data.StructLayout({"address": 8, "count": 8})))

    def elaborate(self, platform):
        m = Module()
        with m.FSM():
            with m.State("WAIT-START"):
                await_start(m, self)
            with m.State("CHECK"):
                m.next = "RUN"
                reject(m, self, self.values.address[0], Status.MISALIGNED, self.values.address)
                reject(m, self, self.values.count == 0, Status.EMPTY)
            with m.State("RUN"):
                report(m, self, self.values.count == 13, Status.WRITE_ERROR, 0x40)
                m.next = "FINISH"
            with m.State("FINISH"):
                finish(m, self)
        return m


def run(commands):
    """(status, fault address, cycles from start to done) of each command."""
    dut, found = Sequencer(), []

    async def drive(ctx):
        for address, count in commands:
            ctx.set(dut.values, {"address": address, "count": count})
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            cycles = 1
            while not ctx.get(dut.done):
                await ctx.tick()
                cycles += 1
            found.append((Status(ctx.get(dut.status)), ctx.get(dut.fault_address), cycles))
            await ctx.tick()
            assert not ctx.get(dut.done), "a pulse"

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()
    return found


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ((2, 1), (Status.OK, 0, 3)),
        ((3, 1), (Status.MISALIGNED, 3, 2)),
        ((2, 0), (Status.EMPTY, 0, 2)),
        ((3, 0), (Status.EMPTY, 0, 2)),
        ((2, 13), (Status.WRITE_ERROR, 0x40, 3)),
    ],
)
def test_a_command_ends_with_its_status(command, wanted):
    assert run([command]) == [wanted]


def test_a_good_command_after_a_bad_one_is_good():
    assert [status for status, _, _ in run([(3, 0), (2, 13), (2, 1)])] == [Status.EMPTY, Status.WRITE_ERROR, Status.OK]
