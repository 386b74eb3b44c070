"""The event model: what it must not pass, and what follows from more of something."""

from dataclasses import replace

import pytest

from nearflash.abi.attend.descriptor import Mode
from nearflash.abi.attend.pages import IndexFormat
from nearflash.abi.config import attend_config
from nearflash.model.attend.settings import Settings
from nearflash.sim.bench.attend_events import Cycles, Load, simulate
from nearflash.sim.bench.channel_events import ChannelTiming
from nearflash.sim.nand.parts import nand_part

CONFIG = replace(attend_config("attend-zynq7045"), score_blocks=8)
SETTINGS = Settings(
    Mode.PAGE | Mode.PROBABILITY, 128, 0.1275, channels=32, budget=1, group_tokens=8, interleaved=True,
    block_tokens=1024, index_format=IndexFormat.INT4,
)  # fmt: skip
PHASES = ["prepare_cycles", "scan_cycles", "select_cycles", "gather_cycles", "finish_cycles"]


def link_bound(tokens, gathered, part):
    """Cycles of all links for one head, spread evenly."""
    timing = ChannelTiming(part, CONFIG.clock_hz)
    page = timing.link(0, 0)
    per_block = 32 * (timing.link(1, 1) - page)  # 32 rows, each a codeword and a run; beside the pages' commands
    groups = round(tokens / 8 * gathered)
    return (tokens // 1024 * per_block + groups * timing.link(8, 1)) / CONFIG.channels


@pytest.mark.parametrize("name", ["slc-1400", "instinfer-1400"])
def test_many_heads_in_flight_keep_the_links_busy(name):
    part, load = nand_part(name), Load(SETTINGS, 4096, 4, 1 / 8)
    outcomes = [simulate(CONFIG, part, load, contexts) for contexts in (1, 4, 32)]
    busy = [outcome.channel_busy_fraction for outcome in outcomes]
    assert busy == sorted(busy) and busy[0] < 0.5 and 0.9 < busy[2] <= 1
    assert all(outcome.cycles_per_head >= link_bound(4096, 1 / 8, part) for outcome in outcomes)
    assert outcomes[2].cycles_per_head < 1.3 * link_bound(4096, 1 / 8, part)
    assert all(list(outcome.phases) == PHASES and min(outcome.phases.values()) > 0 for outcome in outcomes)


def test_one_head_alone_is_the_sum_of_its_phases():
    outcome = simulate(CONFIG, nand_part("slc-1400"), Load(SETTINGS, 2048, 1, 1 / 8), 1)
    assert outcome.cycles_per_head == pytest.approx(sum(outcome.phases.values()), rel=0.02)
    slower = simulate(CONFIG, nand_part("slc-1400"), Load(SETTINGS, 2048, 1, 1 / 8), 1, cycles=Cycles(select=5600))
    assert slower.phases["select_cycles"] == outcome.phases["select_cycles"] + 5000


def test_score_buffers_hide_the_time_of_sensing():
    part, load = nand_part("instinfer-1400"), Load(SETTINGS, 4096, 4, 1 / 8)
    few = simulate(replace(CONFIG, score_blocks=2), part, load, 32)
    assert few.channel_busy_fraction < 0.7 < 0.9 < simulate(CONFIG, part, load, 32).channel_busy_fraction


def test_a_tail_is_scored_from_its_groups():
    part = nand_part("slc-1400")
    whole, ragged = (simulate(CONFIG, part, Load(SETTINGS, tokens, 1, 1 / 8), 1) for tokens in (2048, 2048 + 800))
    assert ragged.phases["scan_cycles"] > whole.phases["scan_cycles"]
    short = simulate(CONFIG, part, Load(SETTINGS, 100, 1, 1 / 8), 4)
    assert short.channel_busy_fraction > 0
