"""Every term of the cost model by hand, for one small decoder and a machine of round numbers."""

from dataclasses import replace

import pytest

from nearflash.planning.cost import predict
from nearflash.planning.memory import ALIGNMENT_BYTES, peak_vectors, peaks
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import Compute, DeviceTier, Disk, Links, Machine, MemorySizes, RuntimeCosts
from nearflash.planning.shapes import from_config
from nearflash.planning.terms import VARIABLES, PolicyOptions, Workload, on, shares_vector, terms

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 2, 64, 4, 2, 16, 128, 100
PROMPT, NEW, SIZE, COUNT = 10, 5, 3, 2
BLOCK = SIZE * COUNT
#: Parameters of a layer: q, k, v, o, gate, up, down, and two norms.
MATRICES = HIDDEN * (64 + 32 + 32 + 64) + 3 * HIDDEN * INNER
LAYER_BYTES = 2 * (MATRICES + 2 * HIDDEN)
WEIGHTS = LAYERS * LAYER_BYTES
KV_TOKEN = 2 * 2 * KV_HEADS * HEAD_DIM * LAYERS
STATES = 2 * HIDDEN * LAYERS
QUERIES = 2 * HEADS * HEAD_DIM * LAYERS


@pytest.fixture
def shape():
    return from_config(
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": INNER,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
    )


@pytest.fixture
def machine():
    """Each rate a power of ten of its own, so that no term can pass for another."""
    return Machine(
        "round numbers",
        MemorySizes("test", 1e9, 1e9, 1e9),
        Links("test", 1e3, 1e4, 1e5),
        Disk("test", 1e6, 1e7, 1e8, 1e9, 1e10),
        Compute("test", 1e11, 1e12, 1e13, 1e14, 1e18, 1e15, 1e16, 1e5),
        RuntimeCosts("test"),
        DeviceTier("test", 1e9, 1e2, 1e3, 1e4),
    )


WORK = Workload(PROMPT, NEW)
OPTIONS = PolicyOptions(SIZE, COUNT)


@pytest.mark.parametrize(
    ("link", "share", "expected"),
    [
        ("weights host to gpu", "weights.host", WEIGHTS),
        ("weights host to gpu", "weights.disk", WEIGHTS),
        ("weights host to gpu", "weights.gpu", 0),
        ("weights disk to host", "weights.disk", WEIGHTS),
        ("weights disk to host", "weights.host", 0),
        ("activations host to gpu", "activations.host", STATES * BLOCK * PROMPT),
        ("activations gpu to host", "activations.disk", STATES * BLOCK * PROMPT),
        ("activations host to disk", "activations.disk", STATES * BLOCK * PROMPT),
        ("activations disk to host", "activations.host", 0),
        ("cache gpu to host", "cache.host", KV_TOKEN * BLOCK * PROMPT),
        ("cache gpu to host", "cache.gpu", 0),
        ("cache host to disk", "cache.disk", KV_TOKEN * BLOCK * PROMPT),
        ("cache host to device", "cache.device", KV_TOKEN * BLOCK * PROMPT),
    ],
)
def test_prefill_moves(shape, machine, link, share, expected):
    vector = terms(shape, machine, WORK, OPTIONS).prefill_bytes[link]
    assert vector[VARIABLES.index(share)] == pytest.approx(expected)


READ = KV_TOKEN * BLOCK * (PROMPT + NEW / 2)
NEW_KV = KV_TOKEN * BLOCK
LOADED = READ - NEW_KV
"""The newest token's are where they were computed."""
ATTENDED = READ / 1e14
"""Seconds of attention on the GPU, over K and V that all query heads of a group share."""


@pytest.mark.parametrize(
    ("link", "share", "cpu_attention", "expected"),
    [
        ("weights host to gpu", "weights.host", False, WEIGHTS),
        ("weights disk to host", "weights.disk", False, WEIGHTS),
        ("activations host to gpu", "activations.host", False, STATES * BLOCK),
        ("cache host to gpu", "cache.host", False, LOADED),
        ("cache host to gpu", "cache.disk", False, LOADED),
        ("cache host to gpu", "cache.host", True, QUERIES * BLOCK),
        ("cache host to gpu", "cache.device", False, QUERIES * BLOCK),
        ("cache disk to host", "cache.disk", False, LOADED),
        ("cache disk to host", "cache.disk", True, LOADED),
        ("cache disk to host", "cache.host", False, 0),
        ("cache gpu to host", "cache.host", False, NEW_KV),
        ("cache gpu to host", "cache.host", True, NEW_KV + QUERIES * BLOCK),
        ("cache host to disk", "cache.disk", False, NEW_KV),
        ("cache host to device", "cache.device", False, NEW_KV + QUERIES * BLOCK),
        ("cache device to host", "cache.device", False, QUERIES * BLOCK),
    ],
)
def test_a_step_of_decode_moves(shape, machine, link, share, cpu_attention, expected):
    options = replace(OPTIONS, cpu_attention=cpu_attention)
    vector = terms(shape, machine, WORK, options).decode_bytes[link]
    assert vector[VARIABLES.index(share)] == pytest.approx(expected)


MATMUL = 2 * (LAYERS * (MATRICES + 2 * HIDDEN)) * SIZE * COUNT
HEAD = 2 * VOCABULARY * HIDDEN * SIZE * COUNT


@pytest.mark.parametrize(
    ("term", "share", "expected"),
    [
        ("gpu", None, (MATMUL * PROMPT + HEAD) / 1e11
         + 4 * BLOCK * PROMPT**2 * HEADS * HEAD_DIM * LAYERS / 1e13),
        ("weights to gpu", "weights.host", WEIGHTS / 1e3),
        ("weights from disk", "weights.disk", WEIGHTS / 1e6),
        ("activations to gpu", "activations.host", STATES * BLOCK * PROMPT / 1e3),
        ("activations to host", "activations.host", STATES * BLOCK * PROMPT / 1e4),
        ("cache to host", "cache.host", KV_TOKEN * BLOCK * PROMPT / 1e5),
        ("cache to page cache", "cache.disk", KV_TOKEN * BLOCK * PROMPT / 1e8),
        ("cache to disk", "cache.disk", KV_TOKEN * BLOCK * PROMPT / 1e9),
        ("device", "cache.device", KV_TOKEN * BLOCK * PROMPT / 1e3),
        ("device link", "cache.device", KV_TOKEN * BLOCK * PROMPT / 1e4),
    ],
)  # fmt: skip
def test_prefill_takes(shape, machine, term, share, expected):
    vector = terms(shape, machine, WORK, OPTIONS).prefill[term]
    assert vector[VARIABLES.index(share) if share else -1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("term", "share", "cpu_attention", "expected"),
    [
        ("gpu", None, False, (MATMUL + HEAD) / 1e12),
        ("gpu", "cache.gpu", False, ATTENDED),
        ("gpu", "cache.host", False, ATTENDED),
        ("gpu", "cache.host", True, 0),
        ("gpu", "cache.device", False, 0),
        ("host", "cache.host", True, READ / 1e15),
        ("host", "cache.disk", True, READ / 1e16),
        ("host", "cache.host", False, 0),
        ("cache to gpu", "cache.host", False, LOADED / 1e3),
        ("cache from disk", "cache.disk", False, LOADED / 1e7),
        ("cache to disk", "cache.disk", False, NEW_KV / 1e10),
        ("activations to disk", "activations.disk", False, STATES * BLOCK / 1e10),
        ("activations from disk", "activations.disk", False, STATES * BLOCK / 1e6),
        ("device", "cache.device", False, READ / 1e2 + NEW_KV / 1e3),
        ("device link", "cache.device", False, (NEW_KV + 2 * QUERIES * BLOCK) / 1e4),
    ],
)
def test_a_step_of_decode_takes(shape, machine, term, share, cpu_attention, expected):
    options = replace(OPTIONS, cpu_attention=cpu_attention)
    vector = terms(shape, machine, WORK, options).decode[term]
    assert vector[VARIABLES.index(share) if share else -1] == pytest.approx(expected)


def test_weights_of_a_host_that_computes_are_not_copied(shape, machine):
    machine = replace(machine, links=replace(machine.links, one_memory=True))
    found = terms(shape, machine, WORK, OPTIONS)
    assert not found.prefill["weights to gpu"].any() and not found.decode["weights to gpu"].any()
    assert found.decode["cache to gpu"].any()


def test_products_of_few_tokens_take_longer(shape, machine):
    compute = replace(machine.compute, matmul_tokens=(1.0, 4.0, 64.0), matmul_factors=(1.0, 2.0, 1.0))
    assert [compute.matmul_factor(tokens) for tokens in (0.5, 1, 2, 4, 16, 64, 1000)] == pytest.approx(
        [1, 1, 1.5, 2, 1.5, 1, 1]
    )
    slow = terms(shape, replace(machine, compute=compute), WORK, replace(OPTIONS, batch_size=4))
    fast = terms(shape, machine, WORK, replace(OPTIONS, batch_size=4))
    assert slow.decode["gpu"][-1] == pytest.approx(2 * fast.decode["gpu"][-1])


def test_tokens_are_chosen_of_all_logits(shape, machine):
    slow = replace(machine, schedule=replace(machine.schedule, per_logit_s=1.0))
    found, base = (terms(shape, each, WORK, OPTIONS).decode["gpu"][-1] for each in (slow, machine))
    assert found - base == pytest.approx(VOCABULARY * BLOCK)


def test_the_output_layer_has_a_rate_of_its_own(shape, machine):
    slow = replace(machine, compute=replace(machine.compute, head_bytes_per_s=1e3))
    found, base = (terms(shape, each, WORK, OPTIONS).decode["gpu"][-1] for each in (slow, machine))
    assert found - base == pytest.approx(OPTIONS.num_batches * 2 * shape.head / 1e3, rel=1e-3)


def test_four_bits_of_cache_are_four_and_a_half(shape, machine):
    packed = terms(shape, machine, WORK, replace(OPTIONS, cache_bits=4))
    at = VARIABLES.index("cache.host")
    assert packed.decode_bytes["cache host to gpu"][at] == pytest.approx(LOADED * 4.5 / 16)
    # Dequantised before attention, at 1e5 bytes a second where no rate of caches was measured.
    assert packed.decode["gpu"][at] == pytest.approx(ATTENDED)
    assert packed.decode["cache unpacked"][at] == pytest.approx(READ / 1e5)
    measured = replace(machine.compute, pack_cache_bytes_per_s=1e3, unpack_cache_bytes_per_s=1e4)
    packed = terms(shape, replace(machine, compute=measured), WORK, replace(OPTIONS, cache_bits=4))
    assert packed.decode["cache unpacked"][at] == pytest.approx(READ / 1e4)
    written = terms(shape, machine, WORK, OPTIONS).prefill_bytes["cache gpu to host"][at]
    assert packed.prefill["cache packed"][-1] == pytest.approx(written / 1e3)


def test_four_bits_of_weights_are_unpacked_once_for_all_batches(shape, machine):
    packed = terms(shape, machine, WORK, replace(OPTIONS, weight_bits=4))
    at = VARIABLES.index("weights.host")
    stored = LAYERS * (2 * MATRICES * 4.5 / 16 + 2 * 2 * HIDDEN)
    assert packed.decode_bytes["weights host to gpu"][at] == pytest.approx(stored)
    assert packed.decode["gpu"][-1] == pytest.approx((MATMUL + HEAD) / 1e12)
    assert packed.decode["weights unpacked"][-1] == pytest.approx(WEIGHTS / 1e5)


@pytest.mark.parametrize(("one_memory", "crossing"), [(False, 0.75), (True, 0.5)])
def test_what_crosses_to_a_gpu_may_be_more_than_what_is_stored(shape, machine, one_memory, crossing):
    """Where the host expands first. It is also what the GPU has of its own share."""
    machine = replace(machine, links=replace(machine.links, one_memory=one_memory))
    machine = replace(machine, compute=replace(machine.compute, expand_bytes_per_s=1.0))
    options = replace(OPTIONS, stored_fraction=0.5, crossing_fraction=0.75)
    found = terms(shape, machine, WORK, options)
    vectors = 2 * 2 * HIDDEN
    for link, fraction in (("weights disk to host", 0.5), ("weights host to gpu", crossing)):
        for moved in (found.prefill_bytes[link], found.decode_bytes[link]):
            expected = LAYERS * (2 * MATRICES * fraction + vectors)
            assert moved[VARIABLES.index("weights.disk")] == pytest.approx(expected)
    held = [
        peak_vectors(shape, machine, WORK, replace(options, crossing_fraction=fraction))["gpu"][1]
        for fraction in (0.5, 0.75)
    ]
    more = (held[1] - held[0])[VARIABLES.index("weights.gpu")]
    assert more == pytest.approx(0 if one_memory else LAYERS * 2 * MATRICES * 0.25)


def test_packed_weights_are_multiplied_dense(shape, machine):
    """What memory gives to products is what was unpacked, not what is stored."""
    slow = replace(machine, compute=replace(machine.compute, gpu_memory_bytes_per_s=1.0))
    dense = terms(shape, slow, WORK, OPTIONS).decode["gpu"][-1]
    for packed in (replace(OPTIONS, weight_bits=4), replace(OPTIONS, stored_fraction=0.5)):
        able = replace(slow, compute=replace(slow.compute, expand_bytes_per_s=1.0))
        assert terms(shape, able, WORK, packed).decode["gpu"][-1] == pytest.approx(dense)


def test_each_batch_has_a_start_and_passes(shape, machine):
    slow = replace(machine, schedule=replace(machine.schedule, per_pass_s=3.0, per_start_s=5.0))
    plain, found = (terms(shape, each, WORK, OPTIONS) for each in (machine, slow))
    assert found.decode["gpu"][-1] - plain.decode["gpu"][-1] == pytest.approx(COUNT * 3)
    assert found.prefill["gpu"][-1] - plain.prefill["gpu"][-1] == pytest.approx(COUNT * 8)


def test_engines_take_their_time_for_each_layer_and_sequence(shape, machine):
    """Where a policy chooses what is read: there they hold all of the KV cache."""
    slow = replace(machine, schedule=replace(machine.schedule, per_engine_visit_s=7.0))
    for options, visits in ((OPTIONS, 0), (replace(OPTIONS, read_fraction=0.5), SIZE * COUNT * LAYERS)):
        plain, found = (terms(shape, each, WORK, options) for each in (machine, slow))
        assert found.decode["gpu"][-1] - plain.decode["gpu"][-1] == pytest.approx(visits * 7)
        assert found.prefill["gpu"][-1] == plain.prefill["gpu"][-1]


def test_hidden_states_on_disk_take_a_request_each_way(shape, machine):
    slow = replace(machine, disk=replace(machine.disk, request_s=2.0))
    plain, found = (terms(shape, each, WORK, OPTIONS) for each in (machine, slow))
    at = VARIABLES.index("activations.disk")
    name = "activations requested"
    assert found.decode[name][at] - plain.decode[name][at] == pytest.approx(2 * COUNT * LAYERS * 2)


def test_offloaded_embeddings_are_loaded_in_each_pass(shape, machine):
    offloading = replace(machine, schedule=replace(machine.schedule, offloads_embeddings=True))
    vector = terms(shape, offloading, WORK, OPTIONS).decode_bytes["weights host to gpu"]
    assert vector[VARIABLES.index("weights.host")] == pytest.approx(WEIGHTS + 2 * 2 * VOCABULARY * HIDDEN)


def test_a_machine_without_disk_or_device_has_no_such_terms(shape, machine):
    found = terms(shape, replace(machine, disk=None, device=None), WORK, OPTIONS)
    assert not [name for name in (*found.prefill, *found.decode) if "disk" in name or "device" in name]


def test_a_prediction_is_these_terms_by_the_shares(shape, machine):
    policy = OffloadPolicy(SIZE, COUNT, Shares(0.5, 0.5), Shares(0.25, 0.75), Shares(gpu=1), overlap=False)
    found = predict(shape, machine, WORK, policy)
    assert found.decode["weights to gpu"] == pytest.approx((NEW - 1) * 0.5 * WEIGHTS / 1e3)
    assert found.decode["cache to gpu"] == pytest.approx((NEW - 1) * 0.75 * LOADED / 1e3)
    assert found.decode_s == pytest.approx(sum(found.decode.values()))
    assert found.generated_tokens == BLOCK * NEW and found.decoded_tokens == BLOCK * (NEW - 1)
    assert found.tokens_per_second == pytest.approx(BLOCK * NEW / found.seconds)


def test_what_lies_outside_the_layers_stays_on_the_gpu(shape, machine):
    policy = OffloadPolicy(1, 1, Shares(host=1), Shares(host=1), Shares(host=1))
    found = peaks(shape, machine, WORK, policy)
    outside = 2 * (2 * VOCABULARY * HIDDEN + HIDDEN)
    assert found["gpu"].decode_bytes > outside + 2 * LAYER_BYTES
    assert found["host"].prefill_bytes == pytest.approx(
        WEIGHTS + LAYERS * ALIGNMENT_BYTES + KV_TOKEN * (PROMPT + NEW) + 2 * HIDDEN * PROMPT
    )  # fmt: skip


def test_a_vector_is_a_sum_of_shares():
    policy = OffloadPolicy(1, 1, Shares(0.1, 0.2, 0.7), Shares(0.1, 0.2, 0.3, 0.4), Shares(host=1))
    shares = shares_vector(policy)
    assert shares[-1] == 1 and len(shares) == len(VARIABLES) + 1
    assert float(on(10.0, "weights.disk", "cache.device") @ shares) == pytest.approx(11.0)
    assert float(on(3.0) @ shares) == 3.0
    assert float(on(2.0, "activations.host", "activations.disk") @ shares) == 2.0
