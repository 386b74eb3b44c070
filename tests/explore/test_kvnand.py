"""In-flash computing without DRAM, and its baselines."""

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.systems.kvnand import (
    QUANTS,
    Arrangement,
    Decode,
    Die,
    best,
    decode_step,
    endurance_cycles,  # fmt: skip
    splits,
)
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
    assert shown == pytest.approx((shown + hidden) / groups)
    assert found.phases["attention"] > found.phases["QKV"]


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
    """One byte of KV an element: 1.31 MB a token of a 65B model."""
    cycles = endurance_cycles(Decode("llama-65b", 1, "w8a8"), 3, 128e9, 5)
    written = 2 * 80 * 8192 * 3 * 5 * 365.25 * 86400
    assert cycles == pytest.approx(written / (128e9 - 65.3e9), rel=0.01)
    assert endurance_cycles(Decode("llama-65b", 1, "w4a16"), 3, 128e9, 10) > cycles


def test_no_room_beside_the_weights():
    with pytest.raises(PlanError, match="region_bytes must be above 0"):
        endurance_cycles(Decode("llama-65b", 1, "w16a16"), 3, 128e9, 5)


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
