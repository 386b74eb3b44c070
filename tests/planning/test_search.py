import time
from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("scipy")

from nearflash.abi.errors import PlanError
from nearflash.planning.memory import ALIGNMENT_BYTES, peaks
from nearflash.planning.policy import STAGED_TENSORS, OffloadPolicy, Shares
from nearflash.planning.profile import DeviceTier
from nearflash.planning.search import Space, plan_for, search
from nearflash.planning.terms import Workload

WORK = Workload(512, 32)
HOST, DISK = Shares(host=1), Shares(disk=1)


def layer_placed(machine):
    return replace(machine, schedule=replace(machine.schedule, places_tensors=False))


def fits(plan):
    found = peaks(plan.shape, plan.machine, plan.workload, plan.policy)
    return all(peak.fits for peak in found.values()) and found == plan.peaks


@pytest.mark.parametrize("model", ["opt_175b", "opt_6_7b", "llama_70b", "mixtral"])
def test_plans_fit_and_lie_on_whole_parts(model, t4, request):
    shape = request.getfixturevalue(model)
    machine = layer_placed(t4)
    plan = search(shape, machine, WORK, Space(max_sequences=256))
    assert fits(plan) and plan.policy.block_size <= 256
    layers, batches = len(shape.layers), plan.policy.num_batches
    for shares, grain in ((plan.policy.weights, layers), (plan.policy.cache, layers * batches),
                          (plan.policy.activations, batches)):  # fmt: skip
        for share in (shares.gpu, shares.host, shares.disk):
            assert share * grain == pytest.approx(round(share * grain), abs=1e-6)


def test_the_plan_is_no_slower_than_the_papers_own(opt_175b, t4):
    own = OffloadPolicy(32, 8, Shares(host=0.5, disk=0.5), DISK, HOST, cpu_attention=True)
    plan = search(opt_175b, t4, WORK, Space(max_sequences=256))
    assert plan.prediction.tokens_per_second >= plan_for(opt_175b, t4, WORK, own).prediction.tokens_per_second


@pytest.mark.parametrize("gpu_gb", [2, 4, 8, 16, 40])
@pytest.mark.parametrize("host_gb", [4, 12, 80])
def test_smaller_budgets_never_overflow(opt_6_7b, t4, gpu_gb, host_gb):
    machine = layer_placed(t4).with_memory(gpu_bytes=gpu_gb * 1e9, host_bytes=host_gb * 1e9)
    plan = search(opt_6_7b, machine, WORK, Space(batch_sizes=(1, 4, 16), batch_counts=(1, 4)))
    assert fits(plan)
    if gpu_gb == 40:
        assert plan.policy.weights.gpu == 1


@pytest.mark.parametrize("sequences", [7, 100, 130])
def test_blocks_divide_the_prompts_evenly(opt_6_7b, t4, sequences):
    """A block of 96 would leave one of 4 behind, which takes as long for its weights."""
    machine = layer_placed(t4).with_memory(gpu_bytes=16e9, host_bytes=30e9)
    space = Space(max_sequences=sequences)
    plan = search(opt_6_7b, machine, WORK, space)
    assert fits(plan) and plan.policy.block_size <= sequences + 3
    assert space.share_filled(plan.policy.block_size) > 0.8


def test_places_of_blocks_that_are_filled():
    assert Space(max_sequences=100).share_filled(96) == pytest.approx(100 / 192)
    assert Space(max_sequences=100).share_filled(50) == 1 and Space().share_filled(96) == 1


def test_more_memory_is_never_slower(opt_6_7b, t4):
    space = Space(batch_sizes=(1, 4, 16), batch_counts=(1, 4))
    machines = [layer_placed(t4).with_memory(gpu_bytes=size * 1e9, host_bytes=40e9) for size in (3, 6, 12, 24)]
    speeds = [search(opt_6_7b, machine, WORK, space).prediction.tokens_per_second for machine in machines]
    assert all(after > 0.98 * before for before, after in pairwise(speeds))
    assert speeds[-1] > 2 * speeds[0]


def test_what_memory_holds_is_not_put_on_disk(opt_6_7b, t4):
    machine = layer_placed(t4).with_memory(gpu_bytes=8e9, host_bytes=100e9)
    slow = replace(machine, compute=replace(machine.compute, matmul_decode_flops_per_s=1e10,
                                            matmul_prefill_flops_per_s=1e10))  # fmt: skip
    plan = search(opt_6_7b, slow, WORK, Space(batch_sizes=(4,), batch_counts=(2,)))
    assert plan.policy.weights.disk == plan.policy.cache.disk == plan.policy.activations.disk == 0
    assert plan.prediction.bottleneck == "computing"


def test_a_bound_on_the_block_is_kept(opt_6_7b, t4):
    free = search(opt_6_7b, t4, WORK)
    bound = free.prediction.seconds / 2
    kept = search(opt_6_7b, t4, WORK, Space(max_seconds=bound))
    assert kept.prediction.seconds <= bound * 1.000001
    assert kept.prediction.tokens_per_second <= free.prediction.tokens_per_second
    with pytest.raises(PlanError, match=r"max_seconds must be .* or more for one sequence on t4, not 1e-09"):
        search(opt_6_7b, t4, WORK, Space(max_seconds=1e-9))


def test_four_bits_are_taken_where_they_help(opt_175b, t4):
    both = search(opt_175b, t4, WORK, Space(weight_bits=(16, 4), cache_bits=(16, 4), batch_counts=(1, 8)))
    plain = search(opt_175b, t4, WORK, Space(batch_counts=(1, 8)))
    assert both.policy.weight_bits == 4
    assert both.prediction.tokens_per_second > 1.2 * plain.prediction.tokens_per_second


def test_the_cache_goes_to_drives_that_attend_faster_than_a_disk_reads(opt_175b, t4):
    machine = replace(t4, device=DeviceTier("test", 20e12, 50e9, 8e9, 12e9))
    space = Space(batch_sizes=(32,), batch_counts=(8,))
    plan, without = search(opt_175b, machine, WORK, space), search(opt_175b, t4, WORK, space)
    assert plan.policy.cache.device > 0.5 and fits(plan)
    assert plan.prediction.tokens_per_second > 1.5 * without.prediction.tokens_per_second


def test_models_that_fit_nowhere_are_refused_with_what_they_need(opt_175b, t4):
    small = t4.with_memory(gpu_bytes=1e9, host_bytes=2e9, disk_bytes=10e9)
    with pytest.raises(PlanError, match=r"needs .* GB on gpu \(of 1.00 GB\).* GB on disk \(of 10.00 GB\)"):
        search(opt_175b, small, WORK)
    with pytest.raises(PlanError, match=r"everything on host needs"):
        search(opt_175b, replace(small, disk=None), WORK)


def test_prompts_longer_than_the_model_are_refused(opt_6_7b, t4):
    with pytest.raises(PlanError, match="must be 2048 at most for this model, not 2049"):
        search(opt_6_7b, t4, Workload(2040, 9))


def test_a_given_policy_that_does_not_fit_names_the_tier(opt_175b, t4):
    with pytest.raises(PlanError, match=r"a plan must fit gpu memory: it needs .* GB of the 16.11 GB that t4 has"):
        plan_for(opt_175b, t4, WORK, OffloadPolicy(1, 1, Shares(gpu=1), HOST, HOST))


def test_peaks_are_home_and_working_sets(opt_6_7b, t4):
    machine = replace(t4, schedule=replace(t4.schedule, offloads_embeddings=False, places_tensors=False))
    policy = OffloadPolicy(2, 3, Shares(0.5, 0.25, 0.25), Shares(host=1), HOST)
    found = peaks(opt_6_7b, machine, WORK, policy)
    weights, layer = (size + ALIGNMENT_BYTES * number for size, number in
                      ((sum(opt_6_7b.layer_bytes()), 32), (max(opt_6_7b.layer_bytes()), 1)))  # fmt: skip
    cache = opt_6_7b.kv_bytes_per_token * 6 * 544
    states = 2 * 4096 * 6 * 512
    assert found["disk"].peak_bytes == pytest.approx(0.25 * weights)
    host = 0.25 * weights + cache + states + 2 * 0.25 * layer
    assert found["host"].decode_bytes == pytest.approx(host)
    gpu = 0.5 * weights + 2 * opt_6_7b.outside + 2 * 0.5 * layer + 2 * opt_6_7b.kv_layer_bytes * 2 * 544
    assert gpu < found["gpu"].decode_bytes < 1.05 * gpu
    assert found["device"].peak_bytes == 0 == found["device"].limit_bytes


def test_attention_scores_count_where_the_runtime_stores_them(opt_6_7b, t4):
    policy = OffloadPolicy(8, 1, HOST, HOST, HOST)
    flash = replace(t4, schedule=replace(t4.schedule, stores_scores=False))
    stored, not_stored = (peaks(opt_6_7b, each, Workload(1024, 8), policy)["gpu"] for each in (t4, flash))
    assert stored.prefill_bytes - not_stored.prefill_bytes > 8 * 32 * 1024**2
    assert stored.decode_bytes == not_stored.decode_bytes


def test_prefill_of_a_large_batch_needs_what_a_part_of_it_needs(opt_6_7b, t4):
    schedule = replace(t4.schedule, stores_scores=False)
    ours, at_once = (replace(t4, schedule=replace(schedule, full_prefill=whole)) for whole in (False, True))
    work, policies = Workload(512, 8), [OffloadPolicy(size, 1, HOST, HOST, HOST) for size in (2, 16, 64)]
    split, whole = (
        [peaks(opt_6_7b, machine, work, policy)["gpu"] for policy in policies] for machine in (ours, at_once)
    )
    ffn = 2 * 2 * 512 * opt_6_7b.widest  # bytes a sequence
    saved = [one.prefill_bytes - other.prefill_bytes for one, other in zip(whole, split, strict=True)]
    assert saved[0] == 0 and saved[1] > 0.7 * 14 * ffn and saved[2] > 0.7 * 62 * ffn
    assert [peak.decode_bytes for peak in split] == [peak.decode_bytes for peak in whole]
    with_device = replace(ours, device=DeviceTier("none", 1e12, 1e9, 1e9, 1e9))
    assert peaks(opt_6_7b, with_device, work, policies[2])["gpu"] == whole[2], "a device attends for a whole batch"


@pytest.mark.parametrize("model", ["opt_175b", "llama_70b", "opt_6_7b"])
def test_a_search_takes_a_moment(model, t4, request):
    shape = request.getfixturevalue(model)
    start = time.process_time()
    search(shape, t4, WORK)
    taken = time.process_time() - start
    assert taken < 2, f"{taken:.2f} s"


def one_memory(machine, gpu_bytes, host_bytes):
    machine = layer_placed(machine).with_memory(gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    return replace(machine, links=replace(machine.links, one_memory=True))


@pytest.mark.parametrize("gpu_share", [0.0, 0.3, 1.0])
def test_one_memory_is_used_whole_however_it_is_divided(opt_6_7b, t4, gpu_share):
    """A third of the room stayed free: each tier had half, and two layers' buffers that there are not."""
    room, space = 6e9, Space(batch_sizes=(1,), batch_counts=(1,))
    plan = search(opt_6_7b, one_memory(t4, gpu_share * room, (1 - gpu_share) * room), Workload(16, 8), space)
    held = plan.peaks["gpu"].peak_bytes + plan.peaks["host"].peak_bytes
    layer = opt_6_7b.weight_bytes()[0] / len(opt_6_7b.layers)
    assert fits(plan) and room - layer - ALIGNMENT_BYTES < held <= room
    assert plan.policy.weights.disk > 0 == plan.policy.cache.disk, "what whole layers leave is room for all KV"


def test_one_memory_that_is_too_small_is_refused(opt_6_7b, t4):
    policy = OffloadPolicy(1, 1, HOST, HOST, HOST)
    size = sum(peak.peak_bytes for peak in peaks(opt_6_7b, t4, WORK, policy).values())
    plan_for(opt_6_7b, one_memory(t4, 0, size + 1), WORK, policy)
    with pytest.raises(PlanError, match="a plan must fit gpu memory"):
        plan_for(opt_6_7b, one_memory(t4, size / 4, size / 4), WORK, policy)


@pytest.mark.parametrize("stored", [1.0, 0.5])
def test_stored_tensors_alone_pass_one_memory_beside_its_buffers(opt_6_7b, t4, stored):
    policy = OffloadPolicy(1, 1, DISK, Shares(gpu=1), Shares(gpu=1), stored_fraction=stored)
    found = peaks(opt_6_7b, one_memory(t4, 1e12, 1e12), WORK, policy)
    largest = 2 * max(linear.parameters for linear in opt_6_7b.layers[0].linears)
    assert found["host"].peak_bytes == (pytest.approx(STAGED_TENSORS * stored * largest) if stored < 1 else 0)


def test_weights_that_are_compressed_are_planned_as_they_are():
    """4 bits of weights in .28 of their bytes were planned as 1.1 bits."""
    with pytest.raises(PlanError, match=r"bits must be 16 for weights that are compressed already, in 0\.28 of their"):
        Space(weight_bits=(16, 4), stored_fraction=0.28125)
    assert Space(weight_bits=(16, 4)).weight_bits == (16, 4)
