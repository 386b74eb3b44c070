"""Static timing of small netlists, computed by hand from prjxray's figures of a SLICEM (slow corner, ps)."""

from dataclasses import replace

import pytest

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.paths import Check, Clock, Delay, TimingGraph, TimingResult, analyse

LAUNCH, LUT = Delay(292, 362), Delay(100, 124)  # REG_INIT_FF CLK Q; LUT6 A1 O6
SETUP, HOLD = -60, 262  # REG_INIT_FF DIN
PIN = Delay(428, 531)  # CLBLM_M_A1
WEST = Clock("west", Delay(1000, 1200), shared=Delay(900, 1000))
EAST = Clock("east", Delay(1500, 1600), shared=Delay(1450, 1500))


def make_graph(*arcs, launch=WEST, capture=WEST):
    """A register Q, arcs (source, target, delay), and a register with the input D."""
    graph = TimingGraph(launches={"Q": (launch, LAUNCH)}, checks=[Check("D", arcs[-1][1], capture, SETUP, HOLD)])
    for source, target, delay in arcs:
        graph.arcs.setdefault(target, []).append((source, delay))
    return graph


def test_a_path_through_a_lut_takes_the_sum_of_its_delays():
    result = analyse(make_graph(("Q", "A1", PIN), ("A1", "O6", LUT)))
    # 1200 + 362 + 531 + 124 to O6, 60 less at D, 1000 is when the clock is there; 100 of both clocks are the same.
    period = 1200 + 362 + 531 + 124 - 60 - 1000 - 100
    assert result.fmax_hz == 10**12 // period and period == 1057
    assert result.critical_path == ("1.56 ns Q", "2.09 ns A1", "2.22 ns O6", "1.06 ns D")
    assert result.periods_ps == (1057,) and result.hold_violations == 0
    assert result.hold_slacks_ps == (1000 + 292 + 428 + 100 + 100 - 1200 - 262,)


def test_the_clock_decides_what_is_late():
    result = analyse(make_graph(("Q", "A1", PIN), ("A1", "O6", LUT)))
    assert [result.count_late(10**12 // period) for period in (1056, 1058)] == [1, 0]


def test_the_longest_way_counts_for_setup_and_the_shortest_for_hold():
    ways = [("Q", "A1", PIN), ("Q", "A6", Delay(13, 16)), ("A1", "O6", LUT), ("A6", "O6", LUT)]
    result = analyse(make_graph(*ways))
    assert result.fmax_hz == 10**12 // 1057 and "A1" in result.critical_path[1]
    assert result.hold_slacks_ps == (1000 + 292 + 13 + 100 + 100 - 1200 - 262,)


def test_a_path_between_regions_pays_for_their_skew():
    # Regression of the model: clocks without skew saw no hold violation at all.
    late = analyse(make_graph(("Q", "AX", Delay(100, 150)), capture=EAST))
    assert late.hold_slacks_ps == (1000 + 292 + 100 - 1600 - 262,) and late.hold_violations == 1
    early = analyse(make_graph(("Q", "AX", Delay(100, 150)), launch=EAST))
    assert early.fmax_hz == 10**12 // (1600 + 362 + 150 - 60 - 1000) and early.hold_violations == 0
    skewed = analyse(make_graph(("Q", "AX", Delay(100, 150)), launch=EAST), 300)
    assert skewed.fmax_hz == 10**12 // (1600 + 362 + 150 - 60 - 1000 + 300)
    assert skewed.hold_slacks_ps[0] == early.hold_slacks_ps[0] - 300
    within = make_graph(("Q", "AX", Delay(100, 150)))
    assert analyse(within, 300) == analyse(within)


def test_registers_of_two_regions_arrive_each_by_its_own_clock():
    graph = make_graph(("Q", "O6", LUT), ("R", "O6", LUT))
    graph.launches["R"] = (EAST, LAUNCH)
    result = analyse(graph)
    assert result.fmax_hz == 10**12 // (1600 + 362 + 124 - 60 - 1000) and result.critical_path[0] == "1.96 ns R"
    assert len(result.periods_ps) == len(result.hold_slacks_ps) == 1


def test_what_no_clock_launches_is_not_checked():
    graph = make_graph(("Q", "O6", LUT), ("pad", "O6", Delay(0, 90_000)))
    assert analyse(graph) == analyse(make_graph(("Q", "O6", LUT)))


def test_a_loop_is_an_error_and_a_netlist_without_paths_has_no_clock():
    with pytest.raises(FormatError, match="a netlist must have no loop without a register, as at O6"):
        analyse(make_graph(("Q", "O6", LUT), ("A1", "O6", LUT), ("O6", "A1", PIN), ("A1", "O6", LUT)))
    bare = replace(make_graph(("Q", "O6", LUT)), launches={})
    assert analyse(bare) == TimingResult((), (), ()) and analyse(bare).fmax_hz == analyse(bare).hold_violations == 0
