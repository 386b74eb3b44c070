"""The event model: what it must not pass, and what follows from more of something."""

from dataclasses import replace

import pytest

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.sim.nand.parts import nand_part
from nearflash.verify.bench.attend_events import Cycles, Load, simulate
from nearflash.verify.fixtures.nand_channel import ChannelTiming

CONFIG = replace(attend_config("attend-zynq7045"), score_blocks=8, mask_beats=0)
SETTINGS = HeadSettings(
    Mode.PAGE | Mode.PROBABILITY, 128, 0.1275, score_dims=32, top_k=1, group_tokens=8, interleaved=True,
    block_tokens=1024, index_format=IndexFormat.INT4,
)  # fmt: skip
PHASES = ["prepare_cycles", "scan_cycles", "select_cycles", "gather_cycles", "finish_cycles"]


def link_bound(tokens, gathered, part):
    """Cycles of all links for the data of one head, spread evenly; for the index its codewords alone."""
    timing = ChannelTiming(part.timing, CONFIG.clock_hz)
    per_block = 32 * (timing.data(2) - timing.data(1))
    groups = round(tokens / 8 * gathered)
    return (tokens // 1024 * per_block + groups * timing.data(8)) / CONFIG.channels


@pytest.mark.parametrize(("name", "least"), [("slc-1400", 0.95), ("instinfer-1400", 0.78)])
def test_many_heads_in_flight_keep_the_links_busy(name, least):
    part, load = nand_part(name), Load(SETTINGS, 4096, 4, 1 / 8)
    outcomes = [simulate(CONFIG, part, load, contexts, heads=3 * contexts) for contexts in (2, 8, 32)]
    busy = [outcome.channel_busy_fraction for outcome in outcomes]
    assert busy == sorted(busy) and busy[0] < 0.6 and least < busy[2] <= 1
    assert all(outcome.cycles_per_head >= link_bound(4096, 1 / 8, part) for outcome in outcomes)
    assert outcomes[2].cycles_per_head < 1.54 / least * link_bound(4096, 1 / 8, part)
    assert all(list(outcome.phases) == PHASES and min(outcome.phases.values()) > 0 for outcome in outcomes)


def test_one_head_alone_is_the_sum_of_its_phases():
    outcome = simulate(CONFIG, nand_part("slc-1400"), Load(SETTINGS, 2048, 1, 1 / 8), 1)
    assert outcome.cycles_per_head == pytest.approx(sum(outcome.phases.values()), rel=0.02)
    slower = simulate(CONFIG, nand_part("slc-1400"), Load(SETTINGS, 2048, 1, 1 / 8), 1, cycles=Cycles(select=5600))
    assert slower.phases["select_cycles"] == pytest.approx(outcome.phases["select_cycles"] + 5000)


def test_score_buffers_hide_the_time_of_sensing():
    part, load = nand_part("instinfer-1400"), Load(SETTINGS, 4096, 4, 1 / 8)
    few, many = (simulate(replace(CONFIG, score_blocks=blocks), part, load, 32, heads=96) for blocks in (1, 4))
    assert few.channel_busy_fraction < 0.7 < 0.8 < many.channel_busy_fraction


def test_with_few_contexts_a_head_takes_several_slots():
    part, load = nand_part("slc-1400"), Load(SETTINGS, 4096, 4, 1 / 8)
    shared, single = (simulate(replace(CONFIG, gather_slots=slots), part, load, 8, heads=24) for slots in (4, 32))
    assert shared.cycles_per_head > single.cycles_per_head


def test_a_tail_is_scored_from_its_groups():
    part = nand_part("slc-1400")
    whole, ragged = (simulate(CONFIG, part, Load(SETTINGS, tokens, 1, 1 / 8), 1) for tokens in (2048, 2048 + 800))
    assert ragged.phases["scan_cycles"] > whole.phases["scan_cycles"]
    short = simulate(CONFIG, part, Load(SETTINGS, 100, 1, 1 / 8), 4)
    assert short.channel_busy_fraction > 0


def test_heads_that_fill_the_store_overlap_where_they_take_its_lines():
    part, load = nand_part("slc-1400"), Load(SETTINGS, 8192, 4, 1 / 8)
    alone = simulate(replace(CONFIG, score_entries=4096), part, load, 1, heads=8)
    taken = simulate(replace(CONFIG, score_entries=4096, mask_beats=256), part, load, 4, heads=16)
    assert alone.channel_busy_fraction < 0.8 < 0.86 < taken.channel_busy_fraction
    assert taken.phases["gather_cycles"] > alone.phases["gather_cycles"]  # beside the next one's scan
