"""Each measure against the systems that it compares, or by hand."""

from math import prod

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.studies.measures import measure
from nearflash.explore.systems.flexgen import flexgen, zero_inference
from nearflash.explore.systems.ifc import QUANTS, Arrangement, Decode
from nearflash.explore.systems.instinfer import Serving, instinfer_step, instinfer_throughput
from nearflash.explore.systems.kvnand import best, decode_step, splits
from nearflash.explore.systems.smart_infinity import Training, training_step
from nearflash.planning.profile import load_machine

ONE = {"ssd": 1}


def seconds(**given):
    return measure("pass_seconds", {"model": "opt-66b", "layers": ONE} | given)


def test_passes():
    assert seconds() > seconds(format="bitmap") > seconds(format="bitmap", direct=True)
    assert seconds(bits=8) < 0.55 * seconds()
    assert seconds(layers={"gpu": 1, "ssd": 1}) == pytest.approx(seconds() + seconds(layers={"gpu": 1}))


def test_speed_ups_of_passes():
    given = {"model": "opt-66b", "layers": {"cpu": 2, "ssd": 3}, "format": "bitmap", "over": {"ssd": 5}}
    expected = seconds(layers={"ssd": 5}) / seconds(layers={"cpu": 2, "ssd": 3}, format="bitmap")
    assert measure("pass_speed_up", given) == pytest.approx(expected)
    same = {"model": "opt-66b", "layers": ONE, "over": ONE}
    assert measure("pass_speed_up", same) == 1.0
    eight = {"model": "opt-66b", "layers": ONE, "over": ONE, "bits": 8, "format": "bitmap"}
    assert measure("pass_speed_up", eight) == pytest.approx(seconds(bits=8) / seconds(bits=8, format="bitmap"))


@pytest.mark.parametrize("drives", [1, 2, 20])
def test_throughput_of_drives(drives):
    ours = {"system": "instinfer", "batch": 64, "drives": drives, "selection": "sparf-8"}
    over = {"system": "instinfer", "batch": 64}
    expected = instinfer_throughput(Serving(), drives, "sparf-8") / instinfer_throughput(Serving())
    assert measure("throughput_ratio", {"ours": ours, "over": over}) == pytest.approx(expected)


def test_throughput_of_hosts():
    ratio = measure(
        "throughput_ratio", {"ours": {"system": "flexgen", "batch": 8}, "over": {"system": "deepspeed", "batch": 8}}
    )
    assert ratio == pytest.approx(flexgen(Serving(batch=8)).rate / zero_inference(Serving(batch=8)).rate)


def test_batches_that_fit():
    assert measure("feasible_batch", {"system": "flexgen"}) == 64
    assert measure("best_batch", {"system": "deepspeed"}) == 16
    assert measure("rate", {"system": "flexgen", "batch": 8}) == pytest.approx(flexgen(Serving(batch=8)).rate)


def test_room_and_multipliers():
    given = {"model": "llama2-7b", "context": 100_000, "quant": "w16a16"}
    assert measure("room", given | {"arrangement": "Base-1"}) == pytest.approx(16e9 / Decode(**given).kv_bytes)
    assert measure("room", given | {"arrangement": "C"}) > 1
    assert measure("multiply_share", {"reuse": 8, "multipliers": 16}) == pytest.approx(2048 / 2 / 400 / 4)


def test_the_best_batch_is_of_all():
    ratios = [
        measure(
            "throughput_ratio",
            {"ours": {"system": "flexgen", "batch": batch}, "over": {"system": "flexgen", "batch": "best"}},
        )
        for batch in (4, 16, 32, 64)
    ]
    assert max(ratios) == pytest.approx(1.0)
    assert min(ratios) < 1.0


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"system": "instinfer", "batch": 64}, instinfer_step(Serving()).share("flash")),
        ({"system": "flexgen", "batch": 16}, flexgen(Serving(batch=16)).share("KV read", "KV write")),
        ({"system": "flexgen-sparq", "batch": 16}, flexgen(Serving(batch=16), sparq=True).share("KV read", "KV write")),
        ({"system": "deepspeed", "batch": 16}, zero_inference(Serving(batch=16)).share("KV read", "KV write")),
    ],
)
def test_shares_of_kv_access(given, found):
    assert measure("kv_share", given) == pytest.approx(found)
    assert 0 < found < 1


def test_training():
    given = {"model": "gpt2-8.4b", "drives": 3}
    found = training_step(Training(**given))
    update = found.phases["state read"] + found.phases["update"] + found.phases["state write"]
    assert measure("update_share", given) == pytest.approx(update / found.seconds)
    faster = training_step(Training(method="SU+O", **given))
    assert measure("speed_up", given | {"method": "SU+O"}) == pytest.approx(found.seconds / faster.seconds)


@pytest.mark.parametrize(("gain", "drives"), [(0.5, 2), (0.3, 3), (0.05, 4), (0.001, 5)])
def test_where_scaling_stops(gain, drives):
    assert measure("saturation", {"model": "gpt2-4.0b", "gpu": "a5000", "gain": gain}) == drives


def test_scaling_that_does_not_stop():
    assert measure("saturation", {"model": "gpt2-4.0b", "gpu": "a5000", "gain": -1.0, "most": 7}) == 7


def test_shares_of_the_drive():
    assert measure("serial_share", {}) == pytest.approx((16 / 3.3) / (16 / 3.3 + 12 / 2.85))
    assert measure("updater_rate", {}) == pytest.approx(7 / 16)


FIVE = ["opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b"]


def test_a_geometric_mean_of_decode():
    found = measure(
        "decode_ratio", {"models": FIVE, "context": 1000, "over": "Base-1", "arrangement": "C", "quant": "w8a8"}
    )
    each = [
        decode_step(Decode(name, 1000, "w8a8"), Arrangement("Base-1")).seconds
        / decode_step(Decode(name, 1000, "w8a8"), Arrangement("C", 16)).seconds
        for name in FIVE
    ]
    assert found == pytest.approx(prod(each) ** 0.2)


@pytest.mark.parametrize("context", [128, 10_000])
def test_the_best_is_at_least_as_fast_as_either(context):
    given = {"models": FIVE, "context": context, "over": "Base-1", "quant": "w8a8"}
    one, compact, discrete = (measure("decode_ratio", given | {"arrangement": kind}) for kind in ("best", "C", "D"))
    assert one >= max(compact, discrete) * 0.999999


def test_energy():
    given = {"model": "llama2-7b", "context": 10_000, "quant": "w16a16"}
    decode = Decode(**given)
    expected = decode_step(decode, Arrangement("C", 16)).joules / decode_step(decode, Arrangement("Base-2")).joules
    assert measure("energy_ratio", given | {"over": "Base-2", "arrangement": "C"}) == pytest.approx(expected)
    assert measure("energy_ratio", given | {"over": "Base-2", "arrangement": "Base-2"}) == 1.0


def test_the_fastest_of_all_quantisations():
    found = measure("decode_rate", {"model": "llama3.1-8b", "context": 100_000})
    every = [decode_step(Decode("llama3.1-8b", 100_000, quant), each) for quant in QUANTS for each in splits(16)]
    assert found == pytest.approx(max(each.rate for each in every if each.fits))


@pytest.mark.parametrize("context", [1_000, 100_000])
def test_dies_of_the_best_split(context):
    given = {"model": "llama3.1-70b", "context": context, "quant": "w4a16", "dies": 8}
    weights, kv = (measure("best_split", given | {"part": part}) for part in ("weights", "kv"))
    assert weights + kv == 8
    assert best(Decode("llama3.1-70b", context, "w4a16"), 8, "D").system == f"D-({weights:.0f}+{kv:.0f})"


def test_parts_of_a_split_are_two():
    given = {"model": "llama3.1-70b", "context": 100, "quant": "w4a16", "dies": 8, "part": "cache"}
    with pytest.raises(PlanError, match="part must be weights or kv, not 'cache'"):
        measure("best_split", given)


def fastest(model, context, quant, dies):
    return min(splits(dies), key=lambda each: decode_step(Decode(model, context, quant), each).seconds).kind


def test_where_a_split_gets_ahead():
    context = int(measure("crossing", {"model": "llama3.1-70b", "quant": "w4a16", "dies": 8}))
    assert fastest("llama3.1-70b", context - 1, "w4a16", 8) == "C"
    assert fastest("llama3.1-70b", context, "w4a16", 8) == "D"
    assert best(Decode("llama3.1-70b", 100_000, "w4a16"), 8).system == "D-(4+4)"


def test_a_split_that_never_gets_ahead():
    """Where every plane of C works on any head, the same dies divided cannot be faster."""
    given = {"model": "llama3.1-70b", "quant": "w4a16", "dies": 8}
    assert measure("crossing", given | {"without": ["confined"]}) == float("inf")
    assert measure("crossing", given | {"without": ["bounded"]}) == float("inf")


def test_wear():
    given = {"model": "llama-65b", "quant": "w16a16", "tokens_per_s": 3.0, "context": 50_000}
    five, ten = (measure("endurance", given | {"years": years}) for years in (5, 10))
    assert ten == pytest.approx(2 * five)


def test_flash():
    assert measure("die_gigabits", {}) == 132.75
    rate = measure("flash_rate", {"drive": "instinfer"})
    assert measure("head_seconds", {"drive": "instinfer", "tokens": 1000, "dim": 64}) == pytest.approx(
        256e3 / (rate * 1e9)
    )


T4 = {"model": "opt-175b", "prompt": 512, "gbs": 32, "batches": 8, "percent": [0, 50, 0, 0, 0, 100], "overlap": False}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_flexgens_own_machine(phase):
    whole = measure("flexgen_t4", T4 | {"part": phase})
    parts = {
        part: measure("flexgen_t4", T4 | {"part": f"{phase} {part}"})
        for part in ("compute", "weight_read", "cache_read", "cache_write")
    }
    assert all(0 <= each < whole for each in parts.values())
    assert 0.7 * whole < sum(parts.values()) < 1.5 * whole


def test_overlap_helps_flexgen():
    slow, fast = (measure("flexgen_t4", T4 | {"overlap": each, "part": "tokens_per_second"}) for each in (False, True))
    assert fast > slow
    assert load_machine("t4").disk is not None


def test_shares_of_a_policy_are_pairs():
    with pytest.raises(PlanError, match="percent must be six numbers"):
        measure("flexgen_t4", T4 | {"percent": [0, 50, 0], "part": "decode"})
