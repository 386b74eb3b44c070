"""In-flash computing without DRAM, and its baselines."""

import math

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.processors import Npu
from nearflash.explore.systems.ifc import EVERY_MECHANISM, MECHANISMS, QUANTS, Arrangement, Decode, Die
from nearflash.explore.systems.kvnand import best, decode_step, endurance_cycles, splits
from nearflash.explore.tables import read_part

FIVE = ("opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b")
BASE_1, BASE_2, C_16 = Arrangement("Base-1"), Arrangement("Base-2"), Arrangement("C", 16)
CONTEXTS = (128, 1_000, 10_000, 100_000)


def test_a_die():
    die = read_part(Die, "kvnand")
    assert die.flash_bytes * 8 / 2**30 == 132.75
    assert die.seconds(32.768e9, 16, 1, 1) == pytest.approx(1.0), "32 planes x 4 KB in 4 us"
    assert die.seconds(32.768e9, 16, 1, 16) == pytest.approx(1 / 16)


def test_multipliers_bound_elements_that_are_reused_much():
    die = read_part(Die, "kvnand")
    assert die.seconds(1e9, 16, 8, 1) == die.seconds(1e9, 16, 1, 1), "8 uses of 2,048 elements take 2.56 of 4 us"
    assert die.seconds(1e9, 16, 16, 1) > die.seconds(1e9, 16, 1, 1)
    assert die.seconds(1e9, 4, 4, 1) > die.seconds(1e9, 8, 4, 1)


@pytest.mark.parametrize("model", FIVE)
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("arrangement", [BASE_1, BASE_2, C_16, Arrangement("D", 8, 8)], ids=lambda one: one.name)
def test_longer_contexts_take_longer(model, quant, arrangement):
    times = [decode_step(Decode(model, context, quant), arrangement).seconds for context in CONTEXTS]
    assert times == sorted(times)


@pytest.mark.parametrize("model", FIVE)
def test_fewer_bits_are_faster(model):
    wide, narrow, weights = (decode_step(Decode(model, 1000, quant), C_16).seconds for quant in QUANTS)
    assert weights < narrow < wide


def test_more_dies_are_faster():
    times = [decode_step(Decode("llama2-7b", 10_000), Arrangement("C", dies)).seconds for dies in (4, 8, 16, 32)]
    assert times == sorted(times, reverse=True)
    assert times[2] > times[3] > times[2] / 2, "inputs and first pages do not shrink"


def test_weights_bound_short_contexts():
    """Twice the dies, nearly twice the speed."""
    for model in FIVE:
        ratio = decode_step(Decode(model, 128), BASE_1).seconds / decode_step(Decode(model, 128), C_16).seconds
        assert 1.9 < ratio < 2.0


def test_kv_bounds_long_contexts_of_the_baselines():
    found = decode_step(Decode("llama2-7b", 100_000), BASE_2)
    assert found.share("attention") > 0.9
    assert found.phases["attention"] == pytest.approx(Decode("llama2-7b", 100_000).kv_bytes / (8 * 4.8e9))
    dram = decode_step(Decode("llama2-7b", 10_000), BASE_1)
    assert dram.phases["attention"] == pytest.approx(Decode("llama2-7b", 10_000).kv_bytes / 64e9)


def test_a_discrete_split_overlaps_head_groups():
    decode = Decode("llama3.1-70b", 100_000, "w4a16")
    found = decode_step(decode, Arrangement("D", 4, 4))
    groups = decode.shape.kv_heads
    shown, hidden = found.phases["QKV"], found.hidden["QKV"]
    input_s = 80 * 8192 * 2 / 4.8e9
    assert shown - input_s == pytest.approx((shown - input_s + hidden) / groups)
    assert found.phases["attention"] > found.phases["QKV"]
    serial = decode_step(decode, Arrangement("D", 4, 4), EVERY_MECHANISM.without("pipelined"))
    assert serial.seconds == pytest.approx(found.seconds + hidden)
    assert serial.hidden["QKV"] == 0


def test_a_stage_that_generates_longer_hides_attention():
    found = decode_step(Decode("llama2-7b", 128), Arrangement("D", 1, 15))
    assert found.hidden["attention"] == pytest.approx(31 * found.phases["attention"])
    assert found.hidden["QKV"] == 0


def test_a_head_group_takes_whole_rounds_of_pages():
    """One group at a time: 8 pages of K on 15 dies of 32 planes take a whole tR, and as long as 480 pages."""
    few, many, more = (
        decode_step(Decode("llama2-7b", tokens), Arrangement("D", 1, 15)).hidden["attention"]
        for tokens in (16 * 8, 16 * 480, 16 * 481)
    )
    assert few == many
    assert more > 1.8 * many


SHORT, LONG = Decode("llama3.1-70b", 30_000, "w4a16"), Decode("llama3.1-70b", 100_000, "w4a16")


def test_heads_of_a_compact_one_wait_for_the_memory_of_logits():
    """16 bytes of logits a token and head group: 5 MB hold eight groups of 30,000 tokens, three of 100,000."""
    assert read_part(Npu, "kvnand").buffer_bytes // (8 * 2 * 100_000) == 3
    short, long, unbounded = (
        decode_step(decode, Arrangement("C", 8), has).phases["attention"]
        for decode, has in ((SHORT, EVERY_MECHANISM), (LONG, EVERY_MECHANISM),
                            (LONG, EVERY_MECHANISM.without("bounded")))
    )  # fmt: skip
    assert long == pytest.approx(3 * unbounded, rel=0.01)
    assert unbounded == pytest.approx(short * 100 / 30, rel=0.05)


def test_one_head_alone_cannot_use_the_planes_of_others():
    spread = EVERY_MECHANISM.without("confined")
    confined, free = (
        decode_step(LONG, Arrangement("C", 8), has).phases["attention"] for has in (EVERY_MECHANISM, spread)
    )
    assert confined == pytest.approx(3 * free, rel=0.03)


def test_where_a_discrete_split_wins_and_what_it_needs():
    """The paper's conclusion: C at short contexts, D at long ones. It needs heads that wait, and idle planes."""
    assert best(SHORT, 8).system == "C-8"
    assert best(LONG, 8).system == "D-(4+4)"
    for needed in ("confined", "bounded"):
        assert best(LONG, 8, mechanisms=EVERY_MECHANISM.without(needed)).system == "C-8"


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_changes_a_step(name):
    every = [(decode_step(decode, arrangement), decode_step(decode, arrangement, EVERY_MECHANISM.without(name)))
             for decode in (SHORT, LONG) for arrangement in (Arrangement("C", 8), Arrangement("D", 4, 4))]  # fmt: skip
    assert any(each.seconds != other.seconds or dict(each.phases) != dict(other.phases) for each, other in every)
    limits = name in ("confined", "bounded", "contended", "refreshed")
    for each, other in every:
        without = other.seconds - other.phases.get("KV gather", 0)
        assert without == pytest.approx(each.seconds) or (without < each.seconds) == limits


def test_a_mechanism_that_is_none():
    with pytest.raises(PlanError, match=r"mechanism must be one of pipelined, confined, .*, not 'magic'"):
        EVERY_MECHANISM.without("magic")


def test_blocks_are_refreshed_before_they_are_read_too_often():
    """A block of 768 pages stands a million reads: 1,302 tokens. Then each of its pages is read and programmed."""
    decode = Decode("llama2-7b", 10_000)
    pages = (2 * decode.shape.active + decode.kv_bytes) / (16 * 32 * 4096)
    assert decode_step(decode, C_16).phases["refresh"] == pytest.approx(pages * 79e-6 * 768 / 1e6)
    assert decode_step(decode, BASE_1).phases["refresh"] == pytest.approx(
        2 * decode.shape.active / (8 * 32 * 4096) * 79e-6 * 768 / 1e6
    )


def test_a_compact_one_does_not():
    found = decode_step(Decode("llama3.1-70b", 100_000, "w4a16"), Arrangement("C", 8))
    assert not found.hidden
    assert {"QKV", "attention", "logits", "softmax", "KV program"} <= found.phases.keys()


@pytest.mark.parametrize(
    ("model", "context", "quant", "arrangement", "fits"),
    [
        ("llama2-7b", 10_000, "w16a16", BASE_1, True),
        ("llama2-7b", 100_000, "w16a16", BASE_1, False),  # 52 GB of KV, 16 GB of DRAM
        ("llama2-7b", 100_000, "w16a16", BASE_2, True),
        ("opt-30b", 100_000, "w8a8", BASE_1, False),
        ("llama3.1-70b", 1_000, "w16a16", Arrangement("C", 4), False),
        ("llama3.1-70b", 1_000, "w4a16", Arrangement("C", 4), True),
        ("llama3.1-70b", 1_000, "w16a16", Arrangement("D", 7, 9), False),
        ("llama3.1-70b", 1_000, "w16a16", Arrangement("D", 8, 8), True),
        ("llama2-7b", 100_000, "w16a16", Arrangement("D", 14, 2), False),
    ],
)
def test_what_fits(model, context, quant, arrangement, fits):
    assert decode_step(Decode(model, context, quant), arrangement).fits is fits


def test_kv_moves_from_weights_as_contexts_grow():
    """The best split gives KV more dies, the longer the context."""
    dies = [int(best(Decode("llama3.1-70b", context, "w4a16"), 8, "D").system[5]) for context in CONTEXTS]
    assert dies == sorted(dies)
    assert dies[0] == 1 and dies[-1] > 2


def test_the_best_is_the_fastest_that_fits():
    decode = Decode("llama3.1-8b", 10_000)
    every = [decode_step(decode, each) for each in splits(16)]
    assert len(every) == 16
    assert best(decode, 16).seconds == min(each.seconds for each in every if each.fits)
    assert best(Decode("llama3.1-70b", 1000), 2) is None
    assert best(decode, 16, "D").system.startswith("D-(")


def test_energy_by_hand():
    decode = Decode("llama2-7b", 10_000)
    found = decode_step(decode, BASE_1)
    assert found.energy_j["DRAM"] == pytest.approx(decode.kv_bytes * 8 * 7e-12, rel=0.001)
    weights = decode.shape.active * 2 * (1 + 448 / 4096)
    assert found.energy_j["flash read"] == pytest.approx(weights * 8 * 3e-12)
    flash = decode_step(decode, C_16)
    assert flash.energy_j["DRAM"] == 0
    assert flash.energy_j["flash program"] > 0


@pytest.mark.parametrize("context", [10_000, 100_000])
@pytest.mark.parametrize("model", FIVE)
def test_flash_reads_cost_less_than_dram_and_than_its_interface(model, context):
    decode = Decode(model, context)
    ours = decode_step(decode, C_16).joules
    assert ours < decode_step(decode, BASE_1).joules
    assert ours < decode_step(decode, BASE_2).joules


def test_buffers_that_are_short_program_more():
    """8 KB a plane hold two pages: 16 dies hold 1,024 streams of a page, a LLaMA2-7B has 2,048."""
    energy = [
        decode_step(Decode("llama2-7b", 1000), Arrangement("C", dies)).energy_j["flash program"]
        for dies in (4, 8, 16, 32)
    ]
    assert energy[0] == pytest.approx(2 * energy[1])
    assert energy[1] == pytest.approx(2 * energy[2])
    assert energy[2] == pytest.approx(2 * energy[3])


def test_experts_read_those_routed_to():
    found = decode_step(Decode("mixtral-8x7b", 128), C_16)
    assert found.traffic_bytes["weights"] == pytest.approx(2 * 12.75e9, rel=0.02)
    assert found.memory_bytes["dies"] == pytest.approx(2 * 46.7e9, rel=0.01)


def test_endurance():
    """K and V of 50,000 tokens of a 65B model fill eight dies of 16 GB: 2.62 MB a token."""
    decode = Decode("llama-65b", 50_000)
    assert decode.kv_bytes == pytest.approx(8 * 16.4e9, rel=0.01)
    cycles = endurance_cycles(decode, 3, 5)
    assert cycles == pytest.approx(3 * 5 * 365.25 * 86400 / 50_000)
    assert endurance_cycles(decode, 3, 10) == pytest.approx(2 * cycles)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("E", 4, 4), "kind must be C, D, Base-1 or Base-2, not 'E'"),
        (("C", 0), "dies must be 1 or more for weights"),
        (("C", 8, 8), "dies must be 1 or more for weights, and for KV in D alone"),
        (("D", 8), "dies must be 1 or more for weights, and for KV in D alone"),
        (("D", 8, -1), "dies must be 1 or more for weights, and for KV in D alone"),
    ],
)
def test_arrangements_that_cannot_be(given, message):
    with pytest.raises(PlanError, match=message):
        Arrangement(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("llama2-7b", 0), "context must be 1 token at least, not 0"),
        (("llama2-7b", 10, "w2a16"), "quant must be one of w16a16, w8a8, w4a16, not 'w2a16'"),
    ],
)
def test_tokens_that_cannot_be(given, message):
    with pytest.raises(PlanError, match=message):
        Decode(*given)


def test_names_as_the_paper_writes_them():
    assert [each.name for each in (BASE_1, C_16, Arrangement("D", 4, 12))] == ["Base-1", "C-16", "D-(4+12)"]


def test_a_die_that_computes_costs_its_area_and_its_yield():
    die = read_part(Die, "kvnand")
    added = 32 * (16 * 5000e-6 + 8192 * 8 / 2**20)
    assert die.price_factor == pytest.approx((1 + added / 100) * math.exp(added * 0.1 / 100))
    assert 1.04 < die.price_factor < 1.06
    found = decode_step(Decode("llama3.1-8b", 1000), Arrangement("C", 16))
    assert found.flash_bytes == pytest.approx(16 * die.flash_bytes * die.price_factor)
