import pytest
from amaranth import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

ITEMS = list(range(1, 200))


class Incrementer(wiring.Component):
    """A datapath of `latency` plain registers that adds 1; it also counts its items."""

    i: In(stream.Signature(16))
    o: Out(stream.Signature(16))

    def __init__(self, latency, depth=None, memory="distributed"):
        self.latency, self.depth, self.memory = latency, depth, memory
        super().__init__()

    def elaborate(self, platform):
        m = Module()
        m.submodules.credit = credit = CreditPipeline(self.latency, 16, 16, depth=self.depth, memory=self.memory)
        wiring.connect(m, wiring.flipped(self.i), credit.i)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        value = credit.core_i + 1
        for _ in range(self.latency):
            register = Signal(16, reset_less=True)
            m.d.sync += register.eq(value)
            value = register
        m.d.comb += credit.core_o.eq(value)
        return m


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(("latency", "depth"), [(1, None), (5, None), (5, 2), (3, 20)])
def test_results_leave_in_order(latency, depth, stalls):
    got = run_streams(Incrementer(latency, depth), {"i": ITEMS}, {"o": len(ITEMS)}, stalls=stalls)["o"]
    assert got == [item + 1 for item in ITEMS]


@pytest.mark.parametrize("memory", ["distributed", "block"])
@pytest.mark.parametrize("latency", [1, 4, 9])
def test_default_depth_gives_one_item_a_cycle(latency, memory):
    cycles = transfer_cycles(Incrementer(latency, memory=memory), {"i": ITEMS}, {"o": len(ITEMS)})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + len(ITEMS)))


def test_smaller_depth_gives_depth_items_per_round_trip():
    cycles = transfer_cycles(Incrementer(6, depth=4), {"i": ITEMS}, {"o": len(ITEMS)})["o"]
    assert cycles[4 * 8] - cycles[0] == 8 * (6 + 2)


@pytest.mark.parametrize("latency", [1, 7])
def test_latency(latency):
    assert measure_latency(Incrementer(latency), {"i": [5]}) == CreditPipeline(latency, 8, 8).LATENCY


def test_latency_message():
    with pytest.raises(ValueError, match="core_latency must be at least 1 cycle, not 0"):
        CreditPipeline(0, 8, 8)


def test_depth_message():
    with pytest.raises(ValueError, match="depth must be at least 2 items, not 1"):
        CreditPipeline(3, 8, 8, depth=1)
