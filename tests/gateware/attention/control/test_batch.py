"""From start to done: descriptors out, heads ended, and what is refused."""

import pytest
from amaranth.lib import data
from amaranth.sim import Simulator

from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.batch import Batch

ARGUMENTS = data.StructLayout(
    {"count": 32, "descriptors_address": 64, "completions_address": 64, "contexts": 32, "watchdog": 32, "command": 32}
)
VALUES = {"count": 3, "descriptors_address": 0x1080, "completions_address": 0x2020, "contexts": 4, "watchdog": 0}
VALUES |= {"command": 0}


def run(values, *, lost=0, limit=200, config="attend-tiny"):
    """Descriptors, cycles from start to done, status, fault address, contexts_log2 while it runs."""
    dut = Batch(CONFIGS[config], ARGUMENTS)
    seen = {"descriptors": [], "begins": 0}

    async def bench(ctx):
        ctx.set(dut.values, values)
        ctx.set(dut.o.ready, 1)
        ctx.set(dut.lost, lost)
        ctx.set(dut.error, {"address": 0x5000, "seen": lost})
        ctx.set(dut.start, 1)
        await ctx.tick()
        ctx.set(dut.start, 0)
        pending = 0
        for cycle in range(limit):
            seen["begins"] += ctx.get(dut.begin)
            if ctx.get(dut.o.valid):
                seen["descriptors"].append(ctx.get(dut.o.payload))
                pending += 1
                seen.update(log2=ctx.get(dut.contexts_log2), pages=ctx.get(dut.pages))
            if ctx.get(dut.done):
                seen.update(cycles=cycle + 1, status=Status(ctx.get(dut.status)))
                seen["address"] = ctx.get(dut.fault_address)
                return
            ends = pending > 0 and cycle % 7 == 6
            ctx.set(dut.ended, ends)
            pending -= ends
            await ctx.tick()
        raise TimeoutError("the batch must end")

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return seen


def test_every_descriptor_once_and_done_after_the_last_head():
    got = run(VALUES)
    assert (got["descriptors"], got["status"], got["begins"]) == ([0, 1, 2], Status.OK, 1)
    assert got["cycles"] > 7 * 3


@pytest.mark.parametrize(("contexts", "log2"), [(1, 0), (2, 1), (3, 1), (4, 2), (64, 2), (1 << 31, 2)])
def test_contexts_are_a_power_of_two_that_the_build_has(contexts, log2):
    assert run(VALUES | {"contexts": contexts})["log2"] == log2


@pytest.mark.parametrize(
    ("changes", "status", "address"),
    [
        ({"count": 0}, Status.EMPTY, 0),
        ({"contexts": 0}, Status.EMPTY, 0),
        ({"command": 2}, Status.UNSUPPORTED, 0),
        ({"command": 1, "count": 1 << 16}, Status.UNSUPPORTED, 0),
        ({"descriptors_address": 0x1040}, Status.MISALIGNED, 0x1040),
        ({"completions_address": 0x2010}, Status.MISALIGNED, 0x2010),
    ],
)
def test_what_cannot_begin_ends_at_once(changes, status, address):
    got = run(VALUES | changes)
    assert (got["descriptors"], got["cycles"], got["status"], got["address"]) == ([], 2, status, address)


@pytest.mark.parametrize("command", [0, 1])
def test_page_operations_are_told_from_heads(command):
    got = run(VALUES | {"command": command})
    assert (got["descriptors"], got["status"], got["pages"]) == ([0, 1, 2], Status.OK, command)


def test_a_build_without_nand_has_no_page_operations():
    assert run(VALUES | {"command": 1}, config="attend-pynq-z2")["status"] == Status.UNSUPPORTED


def test_a_lost_completion_is_a_fault_of_the_batch():
    got = run(VALUES, lost=1)
    assert (got["status"], got["address"]) == (Status.WRITE_ERROR, 0x5000)
