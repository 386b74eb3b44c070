"""Every command cycle by cycle, and its waits in clocks."""

from dataclasses import replace

import pytest

from nearflash.abi.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import FORMS, CommandKind, CommandSequencer
from nearflash.gateware.nand.link import CycleKind
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

TIMING = NandTiming(4_000, 75_000, 1_000_000, 1_400_000_000)
CLOCK_HZ = 100_000_000

COLUMN, ROW = "56 34", "BC 9A 78"
GOLDEN = {
    CommandKind.READ: f"00h {COLUMN} {ROW} 30h",
    CommandKind.CACHE_READ: f"00h {COLUMN} {ROW} 31h",
    CommandKind.CACHE_END: "3Fh",
    CommandKind.STATUS: "70h R5",
    CommandKind.STATUS_OF_ROW: f"78h {ROW} R5",
    CommandKind.SELECT: f"06h {COLUMN} {ROW} E0h",
    CommandKind.COLUMN: f"05h {COLUMN} E0h",
    CommandKind.DATA: "R5",
    CommandKind.PROGRAM: f"80h {COLUMN} {ROW} W5 10h",
    CommandKind.ERASE: f"60h {ROW} D0h",
    CommandKind.RESET: "FFh",
}


def command(kind):
    return {"kind": kind, "lun": 3, "column": 0x3456, "row": 0x789ABC, "beats": 5}


def text(cycle):
    data = f"{cycle.byte:02X}"
    return {
        CycleKind.COMMAND: f"{data}h",
        CycleKind.ADDRESS: data,
        CycleKind.READ: f"R{cycle.beats}",
        CycleKind.WRITE: f"W{cycle.beats}",
    }[cycle.kind]


def test_every_command_has_its_golden_text():
    assert set(GOLDEN) == set(FORMS) == set(CommandKind)


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_commands(stalls):
    kinds = list(CommandKind)
    count = sum(len(GOLDEN[kind].split()) for kind in kinds)
    player = CommandSequencer(TIMING, CLOCK_HZ)
    cycles = run_streams(player, {"i": [command(kind) for kind in kinds]}, {"o": count}, stalls=stalls, seed=1)["o"]
    assert [text(cycle) for cycle in cycles] == " ".join(GOLDEN[kind] for kind in kinds).split()
    assert {cycle.lun for cycle in cycles} == {3}


@pytest.mark.parametrize(
    ("kinds", "at", "wait_ns"),
    [
        ([CommandKind.STATUS], 0, 120),
        ([CommandKind.STATUS_OF_ROW], 3, 120),
        ([CommandKind.PROGRAM], 5, 400),
        ([CommandKind.SELECT, CommandKind.DATA], 6, 300),
        ([CommandKind.COLUMN, CommandKind.DATA], 3, 300),
        ([CommandKind.DATA, CommandKind.RESET], 0, 100),
        ([CommandKind.STATUS, CommandKind.RESET], 1, 100),
        ([CommandKind.READ], 0, 0),
        ([CommandKind.READ, CommandKind.READ], 6, 0),
    ],
)
def test_waits(kinds, at, wait_ns):
    count = sum(len(GOLDEN[kind].split()) for kind in kinds)
    moved = transfer_cycles(CommandSequencer(TIMING, CLOCK_HZ), {"i": [command(kind) for kind in kinds]}, {"o": count})[
        "o"
    ]
    between = moved[at + 1] - moved[at] - 1  # clocks in which the bus stands still
    assert between == wait_ns // 10


def test_other_commands_pass_while_a_column_settles():
    kinds = [CommandKind.SELECT, CommandKind.READ, CommandKind.DATA]
    timing = replace(TIMING, ccs_ns=200)
    moved = transfer_cycles(CommandSequencer(timing, CLOCK_HZ), {"i": [command(kind) for kind in kinds]}, {"o": 15})[
        "o"
    ]
    assert moved[7] == moved[6] + 1 and moved[14] == moved[6] + 21
