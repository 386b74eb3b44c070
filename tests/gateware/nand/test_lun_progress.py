"""What a lun wants and what becomes of it, case by case."""

import pytest
from amaranth.sim import Simulator

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import CommandKind
from nearflash.gateware.nand.lun_progress import LunProgress
from nearflash.gateware.nand.luns import TRIES_MAX, LunPhase

# At 16 MHz a tick is a microsecond; one more is added to every time.
TIMING = NandTiming(32_000, 160_000, 1_600_000, 1_400_000_000, cache_busy_ns=3_000, reset_ns=10_000)
READY, BUSY = 0x40, 0
NOW = 100


def evaluate(record, **inputs):
    dut = LunProgress(TIMING, 16_000_000)
    found = {}

    async def look(ctx):
        ctx.set(dut.record, record)
        for name, value in {"now": NOW, "due": 1, **inputs}.items():
            ctx.set(getattr(dut, name), value)
        new = ctx.get(dut.new)
        found.update(phase=new.phase, behind=new.behind, failed=new.failed, tries=new.tries, due=new.due - NOW)
        found.update({name: ctx.get(getattr(dut, name)) for name in ("choice", "arrives", "ends", "late")})

    simulator = Simulator(dut)
    simulator.add_testbench(look)
    simulator.run()
    return found


@pytest.mark.parametrize(
    ("phase", "inputs", "choice"),
    [
        (LunPhase.START, {}, CommandKind.RESET),
        (LunPhase.RESET, {}, CommandKind.STATUS),
        (LunPhase.IDLE, {}, CommandKind.READ),
        (LunPhase.IDLE, {"operation": 1}, CommandKind.PROGRAM),
        (LunPhase.IDLE, {"operation": 1, "erase": 1}, CommandKind.ERASE),
        (LunPhase.SENSE, {"more": 1}, CommandKind.STATUS),
        (LunPhase.CHAIN, {"more": 1}, CommandKind.CACHE_READ),
        (LunPhase.CHAIN, {"more": 0}, CommandKind.CACHE_END),
        (LunPhase.CHAIN, {"more": 1, "operation": 1}, CommandKind.CACHE_END),
        (LunPhase.WORK, {}, CommandKind.STATUS),
    ],
)
def test_choice(phase, inputs, choice):
    assert evaluate({"phase": phase}, **inputs)["choice"] == choice


@pytest.mark.parametrize(
    ("record", "inputs", "wanted"),
    [
        ({"phase": LunPhase.IDLE}, {"kind": CommandKind.READ}, {"phase": LunPhase.SENSE, "due": 33}),
        ({"phase": LunPhase.CHAIN, "behind": 1, "due": NOW + 5}, {"kind": CommandKind.CACHE_END, "due": 0},
         {"phase": LunPhase.TURN, "behind": 0, "due": 5 + 4}),
        ({"phase": LunPhase.CHAIN, "behind": 1, "due": NOW - 5}, {"kind": CommandKind.CACHE_READ},
         {"phase": LunPhase.TURN, "behind": 1, "due": 4}),
        ({"phase": LunPhase.IDLE}, {"kind": CommandKind.ERASE}, {"phase": LunPhase.WORK, "behind": 1, "due": 1601}),
        ({"phase": LunPhase.SENSE, "tries": 3}, {"kind": CommandKind.STATUS, "status": READY},
         {"phase": LunPhase.READY, "arrives": 1, "tries": 0}),
        ({"phase": LunPhase.TURN, "behind": 1}, {"kind": CommandKind.STATUS, "status": READY},
         {"phase": LunPhase.READY, "behind": 1, "arrives": 1, "due": 33}),
        ({"phase": LunPhase.WORK, "behind": 1}, {"kind": CommandKind.STATUS, "status": READY},
         {"phase": LunPhase.IDLE, "behind": 0, "ends": 1}),
        ({"phase": LunPhase.SENSE, "tries": 3}, {"kind": CommandKind.STATUS, "status": BUSY},
         {"phase": LunPhase.SENSE, "tries": 4, "due": 3, "arrives": 0}),
        ({"phase": LunPhase.WORK, "behind": 1}, {"kind": CommandKind.STATUS, "status": BUSY}, {"due": 101, "ends": 0}),
        ({"phase": LunPhase.SENSE, "tries": TRIES_MAX}, {"kind": CommandKind.STATUS, "status": BUSY, "jobs": 1},
         {"phase": LunPhase.START, "failed": 1, "arrives": 1, "late": 1}),
        ({"phase": LunPhase.WORK, "tries": TRIES_MAX}, {"kind": CommandKind.STATUS, "status": BUSY, "jobs": 1},
         {"phase": LunPhase.START, "failed": 0, "arrives": 0, "ends": 1, "late": 1}),
        ({"phase": LunPhase.RESET, "tries": TRIES_MAX, "failed": 1}, {"kind": CommandKind.STATUS, "jobs": 1},
         {"phase": LunPhase.START, "failed": 1, "arrives": 0, "late": 1}),
    ],
)  # fmt: skip
def test_progress(record, inputs, wanted):
    found = evaluate(record, **inputs)
    assert {name: found[name] for name in wanted} == wanted
