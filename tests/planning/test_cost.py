from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy")

from nearflash.abi.errors import PlanError
from nearflash.planning.cost import FORMS, chains, expert_seconds, place_policy, predict
from nearflash.planning.memory import peaks
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import DeviceTier, load_machine
from nearflash.planning.search import Space, search
from nearflash.planning.terms import PolicyOptions, Workload, shares_vector, terms

GPU, HOST, DISK, DEVICE = Shares(gpu=1), Shares(host=1), Shares(disk=1), Shares(device=1)
WORK = Workload(512, 32)


def policy(weights=HOST, cache=HOST, states=HOST, size=8, count=2, **more):
    return OffloadPolicy(size, count, weights, cache, states, **more)


def own(machine, **changes):
    """The machine with a runtime of our own: everything overlaps."""
    return replace(
        machine, schedule=replace(machine.schedule, exposed_weight_loads=0.0, places_tensors=False, **changes)
    )


def test_bytes_over_each_link_are_the_shares_of_what_there_is(opt_6_7b, t4):
    found = predict(opt_6_7b, own(t4, offloads_embeddings=False), Workload(100, 11), policy(Shares(0.25, 0.5, 0.25)))
    layers = sum(opt_6_7b.layer_bytes())
    tokens, passes = 16 * 11, 11
    assert found.bytes_per_token["weights disk to host"] == pytest.approx(0.25 * layers * passes / tokens)
    assert found.bytes_per_token["weights host to gpu"] == pytest.approx(0.75 * layers * passes / tokens)
    kv = 2 * 2 * 4096 * 32  # K and V, fp16, all layers
    written = 16 * kv * (100 + 10)
    assert found.bytes_per_token["cache gpu to host"] == pytest.approx(written / tokens)
    read = 16 * kv * (100 + 11 / 2 - 1) * 10  # the newest token's are there
    assert found.bytes_per_token["cache host to gpu"] == pytest.approx(read / tokens)


def test_attention_where_the_cache_lies_moves_queries_alone(opt_6_7b, t4):
    here, there = (predict(opt_6_7b, t4, WORK, policy(cpu_attention=where)) for where in (False, True))
    queries = 2 * 4096 * 32 * 16 * 31 / (16 * 32)
    assert there.bytes_per_token["cache host to gpu"] == pytest.approx(queries)
    assert here.bytes_per_token["cache host to gpu"] > 100 * queries
    assert there.decode["host"] > 0 == here.decode["host"]


def test_the_host_attends_beside_the_gpu(opt_6_7b):
    """But for one batch of a layer; with a single batch one waits for the other."""
    gpu24, sums = load_machine("gpu24"), []
    for batches in (4, 1):
        held = policy(GPU, HOST, GPU, 8, batches, cpu_attention=True)
        options, shares = PolicyOptions.of(held), shares_vector(held)
        phases = terms(opt_6_7b, gpu24, WORK, options)
        here, there = (float(phases.decode[name] @ shares) for name in ("gpu", "host"))
        decode = {name: float(part @ shares) for name, part in chains(phases, gpu24, options)[1].items()}
        sums.append((here, there, decode))
    (here, there, four), (alone, waited, one) = sums
    assert there > here > 0 and four["host attention"] == pytest.approx(there + here / 4)
    assert four["computing"] == pytest.approx(here + there / 4)
    assert one["computing"] == pytest.approx(alone + waited) and "host attention" not in one


def test_a_gpu_attends_to_codes_of_four_bits(opt_6_7b, t4):
    """Which cross the link, and are expanded there faster."""
    here, there = (policy(cpu_attention=where, cache_bits=4) for where in (False, True))
    assert predict(opt_6_7b, t4, WORK, there) == predict(opt_6_7b, t4, WORK, here)
    assert peaks(opt_6_7b, t4, WORK, there) == peaks(opt_6_7b, t4, WORK, here)
    assert not search(opt_6_7b, t4, WORK, Space((4,), (2,), cache_bits=(4,))).policy.cpu_attention


def test_decode_is_no_faster_than_gpu_memory_gives_weights(opt_6_7b, t4):
    found = predict(opt_6_7b, t4, Workload(32, 32), policy(GPU, GPU, GPU, 1, 1))
    read = 2 * opt_6_7b.parameters / t4.compute.gpu_memory_bytes_per_s
    assert found.decode_s / 31 >= 0.99 * read
    flops = 2 * opt_6_7b.parameters / t4.compute.matmul_decode_flops_per_s
    assert found.decode_s / 31 > flops


def test_four_bits_move_less_and_cost_work(opt_6_7b, t4):
    plain, packed = (predict(opt_6_7b, t4, WORK, policy(weight_bits=bits, cache_bits=bits)) for bits in (16, 4))
    for name in ("weights to gpu", "cache to gpu"):
        assert 0.27 < packed.decode[name] / plain.decode[name] < 0.35
    assert packed.decode["weights unpacked"] > 0 == plain.decode["weights unpacked"]
    assert packed.decode["cache unpacked"] > 0 == plain.decode["cache unpacked"]
    assert packed.prefill["cache packed"] > 0


def test_compressed_weights_need_a_rate_of_expanding(opt_6_7b, t4):
    with pytest.raises(PlanError, match=r"expand_bytes_per_s .*: measure it"):
        predict(opt_6_7b, t4, WORK, policy(stored_fraction=0.5))
    ours = own(t4, offloads_embeddings=False)
    fast = replace(ours, compute=replace(t4.compute, expand_bytes_per_s=1e11))
    small, dense = (predict(opt_6_7b, fast, WORK, policy(stored_fraction=share)) for share in (0.5, 1.0))
    assert 0.5 < small.decode["weights to gpu"] / dense.decode["weights to gpu"] < 0.53
    assert small.decode["weights unpacked"] > 0 == dense.decode["weights unpacked"]


def test_attention_that_chooses_reads_less_and_stores_all(opt_6_7b, t4):
    every, eighth = (predict(opt_6_7b, t4, WORK, policy(read_fraction=share)) for share in (1.0, 0.125))
    assert eighth.bytes_per_token["cache host to gpu"] == pytest.approx(every.bytes_per_token["cache host to gpu"] / 8)
    assert eighth.bytes_per_token["cache gpu to host"] == every.bytes_per_token["cache gpu to host"]
    assert eighth.decode["gpu"] <= every.decode["gpu"] and eighth.prefill == every.prefill


def test_grouped_queries_move_less(llama_70b, t4):
    assert llama_70b.kv_bytes_per_token == 80 * 2 * 2 * 8 * 128
    found = predict(llama_70b, t4, WORK, policy(DISK, DISK, HOST, 1, 1))
    read = llama_70b.kv_bytes_per_token * (512 + 16 - 1) * 31
    assert found.bytes_per_token["cache disk to host"] == pytest.approx(read / 32)


def test_only_routed_experts_are_read(mixtral, t4):
    ours = own(t4, offloads_embeddings=False)
    one = predict(mixtral, ours, WORK, policy(DISK, HOST, HOST, 1, 1))
    many = predict(mixtral, ours, WORK, policy(DISK, HOST, HOST, 64, 4))
    layer = mixtral.layers[0]
    per_step = 2 * 32 * (layer.shared + 2 * layer.expert)
    moved = one.bytes_per_token["weights disk to host"] * 32
    prefill = sum(mixtral.layer_bytes())  # 512 tokens reach every expert
    assert moved == pytest.approx(prefill + 31 * per_step, rel=1e-6)
    assert many.bytes_per_token["weights disk to host"] * 256 * 32 == pytest.approx(32 * prefill, rel=1e-6)


def test_experts_are_read_beside_what_computes(mixtral, t4):
    """Measured, 4.1 GB of experts and a quarter of them in memory: a step takes as long as its reads."""
    ours = own(t4, offloads_embeddings=False)
    on_disk = policy(DISK, HOST, HOST, 4, 1)
    prefill, decode = expert_seconds(mixtral, ours, WORK, on_disk, 0.25)
    cached = predict(mixtral, ours, WORK, replace(on_disk, weights=Shares(gpu=0.25, disk=0.75)))
    assert prefill == predict(mixtral, ours, WORK, on_disk).prefill_s > cached.prefill_s
    assert decode == cached.decode_s >= cached.decode["weights from disk"]
    waiting = expert_seconds(mixtral, ours, WORK, replace(on_disk, overlap=False), 0.25)[1]
    assert waiting == pytest.approx(sum(cached.decode.values())) and waiting > decode
    assert expert_seconds(mixtral, ours, WORK, on_disk, 0)[1] > decode


def test_routing_costs_every_layer_with_experts(mixtral, opt_6_7b, t4):
    slow = own(t4, per_layer_s=1e-3, per_routing_s=2e-3)
    for shape, expected in ((mixtral, 32 * 3e-3), (opt_6_7b, 32 * 1e-3)):
        times = [predict(shape, each, WORK, policy(GPU, GPU, GPU, 1, 2)).decode_s for each in (own(t4), slow)]
        assert (times[1] - times[0]) / 31 == pytest.approx(2 * expected)


def test_forms_order_as_they_are_defined(opt_175b, t4):
    block = policy(Shares(host=0.5, disk=0.5), DISK, HOST, 32, 8, cpu_attention=True)
    seconds = {form: predict(opt_175b, t4, WORK, block, form).seconds for form in FORMS}
    apart = predict(opt_175b, t4, WORK, replace(block, overlap=False)).seconds
    assert seconds["paper"] < seconds["released"] < seconds["nearflash"] < apart


def test_a_runtime_that_hides_loads_is_faster(opt_175b, t4):
    block = policy(Shares(host=0.5, disk=0.5), DISK, HOST, 32, 8, cpu_attention=True)
    exposed, hidden = predict(opt_175b, t4, WORK, block), predict(opt_175b, own(t4), WORK, block)
    assert exposed.decode_s - hidden.decode_s == pytest.approx(
        exposed.decode["weights to gpu"] + exposed.decode["activations to gpu"]
    )


def test_the_longest_chain_is_the_prediction(opt_175b, t4):
    block = policy(Shares(host=0.5, disk=0.5), DISK, HOST, 32, 8)
    found = terms(opt_175b, t4, WORK, PolicyOptions.of(block))
    shares = shares_vector(place_policy(opt_175b, t4, block))
    prefill, decode = chains(found, t4, PolicyOptions.of(block))
    prediction = predict(opt_175b, t4, WORK, block)
    assert prediction.prefill_s == pytest.approx(max(float(each @ shares) for each in prefill.values()))
    assert prediction.decode_s == pytest.approx(31 * max(float(each @ shares) for each in decode.values()))
    assert prediction.bottleneck in decode


@pytest.mark.parametrize("lost", [0.0, 0.5, 1.0])
def test_computing_loses_to_what_is_loaded_beside_it(opt_6_7b, t4, lost):
    """Disk reads and copies cost computing their share; at 1 nothing overlaps."""
    own = replace(t4, schedule=replace(t4.schedule, exposed_weight_loads=0.0))
    schedule = replace(own.schedule, computing_lost_to_reads=lost, computing_lost_to_copies=lost)
    policy = OffloadPolicy(4, 2, Shares(disk=1), Shares(host=1), Shares(gpu=1))
    free = predict(opt_6_7b, own, WORK, policy)
    slow = predict(opt_6_7b, replace(own, schedule=schedule), WORK, policy)
    assert slow.seconds >= free.seconds
    loads = [
        free.decode[name] for name in ("weights to gpu", "weights from disk", "cache to gpu", "activations to gpu")
    ]
    back = [free.decode[name] for name in ("cache to host", "activations to host")]
    computing = free.decode["gpu"] + free.decode["host"] + lost * sum(loads + back)
    assert slow.decode_s == pytest.approx(max(computing, free.decode_s))


def test_reads_lose_to_what_is_computed_beside_them(opt_6_7b, t4):
    own = replace(t4, schedule=replace(t4.schedule, exposed_weight_loads=0.0))
    slow = replace(own, schedule=replace(own.schedule, reads_lost_to_computing=0.5))
    policy = OffloadPolicy(4, 2, Shares(disk=1), Shares(gpu=1), Shares(gpu=1))
    free = predict(opt_6_7b, own, WORK, policy)
    assert free.bottleneck == "disk"
    lost = 0.5 * (free.decode["gpu"] + free.decode["host"])
    assert predict(opt_6_7b, slow, WORK, policy).decode_s == pytest.approx(free.decode_s + lost)


def test_tensors_lie_where_their_middle_falls(opt_175b, t4):
    placed = place_policy(opt_175b, t4, policy(Shares(0.2, 0.8)))
    # Of attention's four equal matrices, the last; of the FFN's two, none.
    assert placed.weights.gpu == pytest.approx(1 / 12) and placed.weights.host == pytest.approx(11 / 12)
    half = place_policy(opt_175b, t4, policy(Shares(host=0.5, disk=0.5)))
    assert half.weights.disk == pytest.approx(0.5)
    assert place_policy(opt_175b, own(t4), policy(Shares(0.2, 0.8))).weights.gpu == 0.2


def test_near_storage_drives_attend_beside_the_gpu(opt_6_7b, t4):
    device = DeviceTier("test", 1e13, 11.2e9, 2e9, 3e9)
    machine = replace(own(t4), device=device)
    found = predict(opt_6_7b, machine, WORK, policy(GPU, DEVICE, GPU, 64, 4))
    kv = 2 * 2 * 4096 * 32 * 256
    assert found.decode["device"] == pytest.approx(31 * kv * (528 / 11.2e9 + 1 / 2e9))
    sparse = replace(machine, device=replace(device, read_fraction=0.125))
    assert predict(opt_6_7b, sparse, WORK, policy(GPU, DEVICE, GPU, 64, 4)).decode_s < found.decode_s
    assert found.bytes_per_token["cache disk to host"] == 0
    # With one batch there is nothing to compute beside it.
    alone = predict(opt_6_7b, machine, WORK, policy(GPU, DEVICE, GPU, 64, 1))
    assert alone.decode_s == pytest.approx(alone.decode["gpu"] + alone.decode["device"])


def test_tiers_that_are_not_there_are_rejected(opt_6_7b, t4):
    with pytest.raises(PlanError, match=r"no table \[disk\]"):
        predict(opt_6_7b, replace(t4, disk=None), WORK, policy(DISK))
    with pytest.raises(PlanError, match=r"no table \[device\]"):
        predict(opt_6_7b, t4, WORK, policy(cache=DEVICE))
    predict(opt_6_7b, replace(t4, disk=None), WORK, policy())


def test_one_new_token_has_no_decode(opt_6_7b, t4):
    found = predict(opt_6_7b, t4, Workload(16, 1), policy())
    assert found.decode_s == 0 == found.decode_tokens_per_second and found.tokens_per_second > 0


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (-3, 2)])
def test_workloads_of_no_tokens_are_rejected(counts):
    with pytest.raises(PlanError, match="1 at least"):
        Workload(*counts)


def test_vectors_are_linear_in_the_shares(opt_6_7b, t4):
    found = terms(opt_6_7b, t4, WORK, PolicyOptions(4, 2))
    both = [shares_vector(policy(*kinds)) for kinds in ((GPU, GPU, GPU), (DISK, HOST, DISK))]
    for vector in (*found.prefill.values(), *found.decode.values()):
        middle = float(vector @ (0.5 * (both[0] + both[1])))
        assert middle == pytest.approx(0.5 * float(vector @ both[0]) + 0.5 * float(vector @ both[1]))
        assert np.all(vector >= 0)


def test_what_takes_as_long_as_computing_waits_for_it_now_and_then(opt_6_7b, t4):
    """Two visits ahead: a quarter more where both take as long, nothing where one takes none."""
    ours = own(t4, visits_ahead=2)
    placed = policy(DISK, HOST, HOST, 8, 4)
    alone = predict(opt_6_7b, own(t4), WORK, placed)
    waiting = predict(opt_6_7b, ours, WORK, placed)
    both = chains(terms(opt_6_7b, ours, WORK, PolicyOptions.of(placed)), ours, PolicyOptions.of(placed))
    for part, plain, found, steps in ((both[0], alone.prefill_s, waiting.prefill_s, 1),
                                      (both[1], alone.decode_s, waiting.decode_s, WORK.new_tokens - 1)):  # fmt: skip
        second, longest = sorted(float(vector @ shares_vector(placed)) * steps for vector in part.values())[-2:]
        share = second / longest
        assert plain == pytest.approx(longest)
        assert found == pytest.approx(longest * (1 + share**4 / (1 + share + share**2 + share**3)))
    assert predict(opt_6_7b, ours, WORK, placed, "paper") == predict(opt_6_7b, own(t4), WORK, placed, "paper")
    held = policy(GPU, GPU, GPU, 8, 4)
    assert predict(opt_6_7b, ours, WORK, held).seconds == predict(opt_6_7b, own(t4), WORK, held).seconds


@pytest.mark.parametrize("cache", [HOST, DISK], ids=["weights", "and KV"])
def test_who_waits_for_the_drive_alone_waits_for_nothing_else(opt_6_7b, t4, cache):
    """Threads that load are no second part beside the drive: with little to compute, it is what a step takes."""
    links = replace(t4.links, one_memory=True, host_to_gpu_bytes_per_s=1e15, gpu_to_host_bytes_per_s=1e15)
    slow = replace(t4.disk, read_weights_bytes_per_s=1e8, read_cache_bytes_per_s=1e8, write_tokens_bytes_per_s=1e8)
    machine = replace(own(t4, visits_ahead=2), links=links, disk=slow)
    found = predict(opt_6_7b, machine, WORK, policy(DISK, cache, HOST))
    drive = sum(seconds for name, seconds in found.decode.items() if "disk" in name)
    assert drive > 4 * found.decode["gpu"]
    assert found.decode_s == pytest.approx(drive, rel=0.01)


def test_threads_beside_what_computes_have_one_kind_of_load_each(opt_6_7b, t4):
    """On a machine without a GPU, KV is read and unpacked by one thread. Weights are unpacked while others are read, on
    the processors that compute.
    """
    links, schedule = replace(t4.links, one_memory=True), replace(t4.schedule, exposed_weight_loads=0.0)
    machine = replace(own(t4), links=links, schedule=schedule)
    found = policy(Shares(disk=1), Shares(disk=1), Shares(disk=1), cache_bits=4, weight_bits=4)
    options, shares = PolicyOptions.of(found), shares_vector(found)
    phases = terms(opt_6_7b, machine, WORK, options)
    _, decode = chains(phases, machine, options)
    parts = {name: float(vector @ shares) for name, vector in phases.decode.items()}
    computed = sum(parts[name] for name in ("gpu", "host", "weights unpacked", "cache unpacked"))
    rates = replace(schedule, computing_lost_to_reads=0.0, computing_lost_to_copies=0.0)
    _, least = chains(phases, replace(machine, schedule=rates), options)
    assert float(least["computing"] @ shares) == pytest.approx(computed)
    assert float(decode["cache loaded"] @ shares) == pytest.approx(parts["cache from disk"] + parts["cache unpacked"])


def test_a_single_batch_waits_for_its_hidden_states(opt_6_7b, t4):
    """Those of several are read and written while others compute."""
    machine = replace(t4, disk=replace(t4.disk, request_s=1e-3))
    for count in (2, 1):
        found = policy(GPU, GPU, DISK, 8, count)
        options, shares = PolicyOptions.of(found), shares_vector(found)
        phases = terms(opt_6_7b, machine, WORK, options)
        parts = {name: float(vector @ shares) for name, vector in phases.decode.items()}
        names = ("activations from disk", "activations to disk", "activations requested")
        states = sum(parts[name] for name in names)
        assert parts["activations requested"] == pytest.approx(2 * 32 * count * 1e-3)
        decode = {name: float(part @ shares) for name, part in chains(phases, machine, options)[1].items()}
        exposed = parts["activations to gpu"] * machine.schedule.exposed_weight_loads
        if count > 1:
            assert decode["hidden states"] == pytest.approx(states + exposed)
        else:
            assert "hidden states" not in decode and decode["computing"] >= parts["gpu"] + states
