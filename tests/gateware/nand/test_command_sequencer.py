"""Every phrase cycle by cycle, and its waits in clocks."""

from dataclasses import replace

import pytest

from nearflash.abi.attention.nand import NandTiming
from nearflash.gateware.nand.command_sequencer import FORMS, PhraseKind, PhrasePlayer
from nearflash.gateware.nand.link import CycleKind
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

TIMING = NandTiming(4_000, 75_000, 1_000_000, 1_400_000_000)
CLOCK_HZ = 100_000_000

COLUMN, ROW = "56 34", "BC 9A 78"
GOLDEN = {
    PhraseKind.READ: f"00h {COLUMN} {ROW} 30h",
    PhraseKind.CACHE_READ: f"00h {COLUMN} {ROW} 31h",
    PhraseKind.CACHE_END: "3Fh",
    PhraseKind.STATUS: "70h R5",
    PhraseKind.STATUS_OF_ROW: f"78h {ROW} R5",
    PhraseKind.SELECT: f"06h {COLUMN} {ROW} E0h",
    PhraseKind.COLUMN: f"05h {COLUMN} E0h",
    PhraseKind.DATA: "R5",
    PhraseKind.PROGRAM: f"80h {COLUMN} {ROW} W5 10h",
    PhraseKind.ERASE: f"60h {ROW} D0h",
    PhraseKind.RESET: "FFh",
}


def phrase(kind):
    return {"kind": kind, "lun": 3, "column": 0x3456, "row": 0x789ABC, "beats": 5}


def text(cycle):
    data = f"{cycle.byte:02X}"
    return {
        CycleKind.COMMAND: f"{data}h",
        CycleKind.ADDRESS: data,
        CycleKind.READ: f"R{cycle.beats}",
        CycleKind.WRITE: f"W{cycle.beats}",
    }[cycle.kind]


def test_every_phrase_has_its_golden_text():
    assert set(GOLDEN) == set(FORMS) == set(PhraseKind)


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_phrases(stalls):
    kinds = list(PhraseKind)
    count = sum(len(GOLDEN[kind].split()) for kind in kinds)
    player = PhrasePlayer(TIMING, CLOCK_HZ)
    cycles = run_streams(player, {"i": [phrase(kind) for kind in kinds]}, {"o": count}, stalls=stalls, seed=1)["o"]
    assert [text(cycle) for cycle in cycles] == " ".join(GOLDEN[kind] for kind in kinds).split()
    assert {cycle.lun for cycle in cycles} == {3}


@pytest.mark.parametrize(
    ("kinds", "at", "wait_ns"),
    [
        ([PhraseKind.STATUS], 0, 120),
        ([PhraseKind.STATUS_OF_ROW], 3, 120),
        ([PhraseKind.PROGRAM], 5, 400),
        ([PhraseKind.SELECT, PhraseKind.DATA], 6, 300),
        ([PhraseKind.COLUMN, PhraseKind.DATA], 3, 300),
        ([PhraseKind.DATA, PhraseKind.RESET], 0, 100),
        ([PhraseKind.STATUS, PhraseKind.RESET], 1, 100),
        ([PhraseKind.READ], 0, 0),
        ([PhraseKind.READ, PhraseKind.READ], 6, 0),
    ],
)
def test_waits(kinds, at, wait_ns):
    count = sum(len(GOLDEN[kind].split()) for kind in kinds)
    moved = transfer_cycles(PhrasePlayer(TIMING, CLOCK_HZ), {"i": [phrase(kind) for kind in kinds]}, {"o": count})["o"]
    between = moved[at + 1] - moved[at] - 1  # clocks in which the bus stands still
    assert between == wait_ns // 10


def test_other_phrases_pass_while_a_column_settles():
    kinds = [PhraseKind.SELECT, PhraseKind.READ, PhraseKind.DATA]
    timing = replace(TIMING, ccs_ns=200)
    moved = transfer_cycles(PhrasePlayer(timing, CLOCK_HZ), {"i": [phrase(kind) for kind in kinds]}, {"o": 15})["o"]
    assert moved[7] == moved[6] + 1 and moved[14] == moved[6] + 21
