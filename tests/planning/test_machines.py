"""The profiles that come with nearflash against the figures that they state as their source."""

from dataclasses import replace

import pytest

pytest.importorskip("scipy")

from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.search import Space, plan_for, search
from nearflash.planning.terms import Workload

GB = 2**30


@pytest.mark.parametrize(
    ("key", "published_gb"),
    [
        ("links.host_to_gpu_bytes_per_s", 12.89),
        ("links.gpu_to_host_bytes_per_s", 4.82),
        ("links.gpu_to_host_cache_bytes_per_s", 0.97),
        ("compute.gpu_memory_bytes_per_s", 240),
        ("memory.gpu_bytes", 15),
        ("memory.host_bytes", 204),
        ("memory.disk_bytes", 1500),
    ],
)
def test_the_authors_constants_are_in_binary_gigabytes(t4, key, published_gb):
    table, name = key.split(".")
    assert getattr(getattr(t4, table), name) == pytest.approx(published_gb * GB, rel=1e-6)


def test_the_disk_is_what_the_breakdown_implies(t4):
    """Five times what the authors' cost model has: 2.4 to 2.8 GB/s."""
    assert 2.4e9 <= t4.disk.read_weights_bytes_per_s <= t4.disk.read_cache_bytes_per_s <= 2.8e9
    read = 4 * 12288 * 256 * 96 * (512 + 16) * 31
    assert read / t4.disk.read_cache_bytes_per_s == pytest.approx(7046, rel=0.01)
    written = 4 * 12288 * 256 * 96 * 512
    assert written / t4.disk.write_cache_bytes_per_s == pytest.approx(261, rel=0.01)


def test_each_part_of_the_method_pays_on_the_t4(opt_175b, t4):
    """The paper's ablation in kind: without overlap, or with everything on the disk, it is slower."""
    work = Workload(512, 32)
    plan = search(opt_175b, t4, work, Space(max_sequences=256))
    apart = plan_for(opt_175b, t4, work, replace(plan.policy, overlap=False))
    disk = OffloadPolicy(4, 1, Shares(disk=1), Shares(disk=1), Shares(host=1))
    alone = plan_for(opt_175b, t4, work, disk)
    speeds = [each.prediction.tokens_per_second for each in (plan, apart, alone)]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 5 * speeds[2]


def test_a_mixture_larger_than_memory_is_planned_with_its_routed_experts(mixtral):
    machine = load_machine("gpu24").with_memory(gpu_bytes=12e9, host_bytes=24e9)
    plan = search(mixtral, machine, Workload(128, 64), Space(max_sequences=1))
    assert plan.policy.weights.disk > 0.3
    step = plan.prediction.bytes_per_token["weights disk to host"]
    everything = 2 * mixtral.parameters * plan.policy.weights.disk
    assert step < 0.45 * everything, "two experts of eight, and what every token reads"
    # Reading the router's output costs each layer, which a plan of bytes alone does not see.
    free = replace(machine, schedule=replace(machine.schedule, per_routing_s=0.0, per_layer_s=0.0))
    assert plan_for(mixtral, free, plan.workload, plan.policy).prediction.seconds <= plan.prediction.seconds
