"""A bus without NAND: takes every cycle, reads ones, and lets a controller report that its pages failed."""

import pytest
from amaranth import Module
from amaranth.lib import wiring

from nearflash.abi.nand import NandTiming
from nearflash.boards.vendor.absent_nand import AbsentNand
from nearflash.gateware.nand.controller import NandController
from nearflash.gateware.nand.link import RAW_BEATS, BusCycle, CycleKind
from nearflash.sim.pysim.harness import run_streams

STALLS = ["none", "source", "sink", "both"]


def cycle(kind, beats=0, byte=0):
    return {"lun": 1, "kind": kind, "byte": byte, "beats": beats}


@pytest.mark.parametrize("stalls", STALLS)
def test_reads_are_ones_and_writes_are_swallowed(stalls):
    cycles = [cycle(CycleKind.COMMAND, byte=0x70), cycle(CycleKind.READ, 1), cycle(CycleKind.ADDRESS, byte=3),
              cycle(CycleKind.WRITE, 3), cycle(CycleKind.READ, 5), cycle(CycleKind.WRITE, 1)]  # fmt: skip
    found = run_streams(AbsentNand(), {"cycles": cycles, "write": [7, 8, 9, 10]}, {"read": 6}, stalls=stalls, seed=4)
    assert found["read"] == [(1 << 64) - 1] * 6


def test_nothing_is_read_without_a_cycle():
    assert run_streams(AbsentNand(), {"cycles": [cycle(CycleKind.COMMAND)], "write": []}, {"read": 0}) == {"read": []}


class Absent(wiring.Component):
    """A controller whose bus has no NAND."""

    def __init__(self, controller):
        self.controller = controller
        names = ("i", "header", "codewords", "operations", "program", "results")
        super().__init__({name: controller.signature.members[name] for name in names})

    def elaborate(self, platform):
        m = Module()
        m.submodules.controller = controller = self.controller
        m.submodules.phy = phy = AbsentNand()
        for name in ("cycles", "read", "write"):
            wiring.connect(m, getattr(controller.link, name), getattr(phy, name))
        for name in self.signature.members:
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(controller, name))
        return m


@pytest.fixture(scope="module")
def results():
    """A page of two codewords is read, another is programmed, a block is erased."""
    timing = NandTiming(read_ns=100, program_ns=200, erase_ns=300, cache_busy_ns=50, link_bytes_per_s=1_400_000_000)
    reads = [{"tag": 5, "codewords": 3, "page_log2": 3, "row": 9, "lun": 1}]
    operations = [
        {"erase": erase, "lun": 0, "row": 3, "codewords": 8 * (not erase), "number": erase} for erase in (0, 1)
    ]
    return run_streams(
        Absent(NandController(2, timing, 100_000_000, tag=8)),
        {"i": reads, "operations": operations, "program": [1] * (8 * RAW_BEATS)},
        {"header": 1, "codewords": 2 * RAW_BEATS, "results": 2}, timeout_cycles=20_000,
    )  # fmt: skip


def test_a_page_that_is_not_there_is_all_ones(results):
    """Which the checker behind the controller reports as an erased page."""
    assert results["header"][0].tag == 5
    assert [beat.number for beat in results["codewords"]] == [0] * RAW_BEATS + [1] * RAW_BEATS
    assert {beat.data for beat in results["codewords"]} == {(1 << 64) - 1}


def test_programs_and_erases_fail(results):
    assert sorted((result.number, result.failed) for result in results["results"]) == [(0, 1), (1, 1)]


def test_a_bus_cycle_has_the_layout_that_boards_are_given():
    """bitstreams/README.md has this table for those who write a PHY."""
    fields = {name: (field.offset, field.width) for name, field in BusCycle.as_shape()}
    assert fields == {"lun": (0, 8), "kind": (8, 2), "byte": (10, 8), "beats": (18, 12)}
