"""What holds for every system at any parameters."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearflash.explore.studies.dse import kvnand_row
from nearflash.explore.studies.sweeps import compare_systems, row_of
from nearflash.explore.systems.flexgen import flexgen, zero_inference
from nearflash.explore.systems.ifc import EVERY_MECHANISM, QUANTS, Arrangement, Decode
from nearflash.explore.systems.instinfer import Serving, instinfer_step
from nearflash.explore.systems.kvnand import decode_step
from nearflash.explore.systems.layered import LayeredHost, Placement, layer_pass
from nearflash.explore.systems.nearflash import sparf_page_step
from nearflash.explore.systems.smart_infinity import METHODS, Training, speed_up, training_step

FEW = settings(max_examples=40, deadline=None)
MODELS = ("opt-13b", "opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b")


def sound(found):
    """Times, joules and bytes are finite and not negative, a step takes time, and a row of it is JSON."""
    for values in (found.phases, found.hidden, found.energy_j, found.memory_bytes, found.traffic_bytes):
        assert all(math.isfinite(each) and each >= 0 for each in values.values()), found
    assert found.seconds > 0 and found.rate == found.units / found.seconds
    assert found.assumptions and found.system and found.model
    assert sum(found.share(name) for name in found.phases) == pytest.approx(1.0)
    assert json.loads(json.dumps(row_of(found)))["seconds"] == found.seconds


servings = st.builds(Serving, st.sampled_from(MODELS), st.integers(1, 8192), st.integers(2, 4096), st.integers(1, 512))


@FEW
@given(servings, st.integers(1, 40))
def test_serving(serving, drives):
    steps = [
        flexgen(serving, drives),
        flexgen(serving, drives, sparq=True),
        zero_inference(serving),
        instinfer_step(serving, drives),
        instinfer_step(serving, drives, "sparf-8"),
        sparf_page_step(serving, drives),
    ]
    for found in steps:
        sound(found)
        assert found.units == serving.batch
    assert steps[4].phases["flash"] < steps[3].phases["flash"]


@FEW
@given(servings, st.integers(1, 20))
def test_attention_in_drives_moves_less_over_the_link_than_the_cache(serving, drives):
    found = instinfer_step(serving, drives)
    tokens = serving.tokens
    if tokens > 4 * serving.shape.group + 4:
        assert found.traffic_bytes["host link"] < found.traffic_bytes["flash"]


trainings = st.builds(
    Training,
    st.sampled_from(("gpt2-1.16b", "gpt2-8.4b", "gpt2-33b")),
    st.sampled_from(METHODS),
    st.integers(1, 24),
    st.sampled_from(("a4000", "a5000", "a100")),
    st.sampled_from(("adam", "adagrad", "sgd-momentum", "adam-bf16")),
    st.floats(0.001, 1.0),
    st.integers(1, 64),
    st.integers(16, 4096),
    st.booleans(),
)


@FEW
@given(trainings)
def test_training(training):
    found = training_step(training)
    sound(found)
    assert speed_up(training) > 0
    if training.method == "ZeRO-Infinity":
        assert speed_up(training) == 1.0


@FEW
@given(trainings)
def test_a_longer_batch_leaves_the_update_as_it_is(training):
    longer = Training(training.model, training.method, training.drives, training.gpu, training.optimizer,
                      training.keep, training.batch * 2, training.sequence, training.congested)  # fmt: skip
    one, two = training_step(training), training_step(longer)
    for name in ("state read", "state write"):
        assert one.phases.get(name) == two.phases.get(name)
    assert two.seconds >= one.seconds * 0.999999


placements = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 24)).filter(any)


@FEW
@given(placements, st.floats(0.05, 1.0), st.sampled_from((4, 8, 16)), st.booleans())
def test_layers(layers, stored, bits, direct):
    found = layer_pass(
        "opt-66b", Placement(*layers), LayeredHost.endor(), stored_fraction=stored, bits=bits, direct=direct
    )
    sound(found)
    assert found.memory_bytes["drive"] == pytest.approx(layers[2] * stored * 1019252736 * bits / 8)


arrangements = st.one_of(
    st.builds(Arrangement, st.just("C"), st.integers(1, 64)),
    st.builds(Arrangement, st.just("D"), st.integers(1, 32), st.integers(1, 32)),
    st.sampled_from([Arrangement("Base-1"), Arrangement("Base-2")]),
)
decodes = st.builds(
    Decode, st.sampled_from(("mixtral-8x7b", *MODELS)), st.integers(1, 1 << 20), st.sampled_from(list(QUANTS))
)


@FEW
@given(decodes, arrangements)
def test_dies(decode, arrangement):
    found = decode_step(decode, arrangement)
    sound(found)
    assert found.joules > 0
    held = sum(found.memory_bytes.values())
    assert held == pytest.approx(decode.weight_bytes + decode.kv_bytes)


@FEW
@given(decodes, st.integers(1, 31))
def test_a_discrete_split_hides_what_a_compact_one_shows(decode, weights):
    """Everything that C waits for stands in D's phases or beneath them, where C's planes work on any head."""
    free = EVERY_MECHANISM.without("confined", "streamed")
    discrete = decode_step(decode, Arrangement("D", weights, 32 - weights), free)
    compact = decode_step(decode, Arrangement("C", 32), free)
    for name in ("QKV", "attention", "logits", "softmax"):
        both = discrete.phases.get(name, 0) + discrete.hidden.get(name, 0)
        assert both >= compact.phases[name] * 0.999, "fewer dies are never faster at one thing"


@FEW
@given(decodes, arrangements)
def test_a_row_of_the_grid(decode, arrangement):
    row = kvnand_row(decode, arrangement)
    assert (row["seconds"] is None) is not row["fits"]
    if row["fits"] and arrangement.kind in "CD":
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(1.0)
        assert row["years_to_wear"] > 0 and row["flash_usd"] > 0


def test_comparisons_have_ours_and_a_baseline():
    groups = compare_systems()
    assert len(groups) == 5
    for outcomes in groups.values():
        assert len(outcomes) >= 4
        for found in outcomes:
            sound(found)
    short, long, training, *_ = groups.values()
    assert short[-1].system.startswith("nearflash") and long[-1].system.startswith("nearflash")
    assert long[-2].rate == max(found.rate for found in long)
    assert short[-1].rate == max(found.rate for found in short)
    assert all(outcomes[-1].parts for outcomes in groups.values())
    assert {"nearflash, 6 drives", "software-only, 6 drives"} <= {found.system for found in training}
