"""The cost model against a simulation of the schedules that it summarises, layer by layer and batch by batch.

The simulation knows nothing of sums over layers: it has resources that do one thing at a time, and waits where a
runtime waits.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from nearflash.planning.cost import predict
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.shapes import from_config
from nearflash.planning.terms import Workload

STEPS = 12


@dataclass
class Resource:
    """Does one thing at a time; `free_s` is when it can begin the next."""

    free_s: float = 0.0
    busy_s: float = field(default=0.0)

    def work(self, ready_s: float, seconds: float) -> float:
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


def overlapped(layers, batches, weight_s, disk_s, cache_s, compute_s):
    """A runtime with events: a layer's weights load while the layer before computes, caches one batch ahead."""
    disk, link, gpu = Resource(), Resource(), Resource()
    done = 0.0
    buffer_free = [0.0, 0.0]  # two layers' weights lie on the GPU at a time
    staging_free = [0.0, 0.0]  # and two in pinned memory
    for at in range(layers * STEPS):
        arrived = disk.work(staging_free[at % 2], disk_s)
        there = link.work(max(arrived, buffer_free[at % 2]), weight_s)
        staging_free[at % 2] = there
        for _ in range(batches):
            cache = link.work(0.0, cache_s)
            done = gpu.work(max(there, cache), compute_s)
        buffer_free[at % 2] = done
    return done / STEPS


def one_after_another(layers, batches, weight_s, disk_s, cache_s, compute_s):
    seconds = 0.0
    for _ in range(layers):
        seconds += disk_s + weight_s
        for _ in range(batches):
            seconds += cache_s + compute_s
    return seconds


def machine_of(weight_s, disk_s, cache_s, compute_s, shape, policy, tokens):
    """A machine on which a layer's load, a batch's cache and a batch's computing take these seconds."""
    base = load_machine("gpu24")
    layer = max(shape.layer_bytes())
    cache = shape.kv_layer_bytes * policy.batch_size * tokens
    # Weights and cache share the link: its rate is the weights', and the cache's size gives the rest.
    assert cache_s == pytest.approx(cache / layer * weight_s), "one link has one rate"
    active = 2 * shape.layers[0].active_parameters * policy.batch_size
    return replace(
        base,
        links=replace(base.links, host_to_gpu_bytes_per_s=layer / weight_s, gpu_to_host_bytes_per_s=1e18),
        disk=replace(base.disk, read_weights_bytes_per_s=layer / disk_s),
        compute=replace(base.compute, matmul_decode_flops_per_s=active / compute_s, gpu_memory_bytes_per_s=1e18,
                        gpu_attention_bytes_per_s=1e18),
        schedule=replace(base.schedule, per_layer_s=0.0, per_routing_s=0.0, visits_ahead=0),
    )  # fmt: skip


@pytest.fixture
def shape():
    config = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 100,
              "intermediate_size": 4096, "rms_norm_eps": 1e-5}  # fmt: skip
    return from_config(config)


@pytest.mark.parametrize("batches", [1, 2, 6])
@pytest.mark.parametrize("disk_s", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("compute_s", [0.05, 0.4, 3.0])
def test_a_step_takes_what_the_simulated_schedule_takes(shape, batches, disk_s, compute_s):
    policy = OffloadPolicy(4, batches, Shares(disk=1), Shares(host=1), Shares(gpu=1))
    workload = Workload(100, 2)
    weight_s, tokens = 0.5, workload.average_tokens
    cache_s = shape.kv_layer_bytes * 4 * tokens / max(shape.layer_bytes()) * weight_s
    machine = machine_of(weight_s, disk_s, cache_s, compute_s, shape, policy, tokens)
    times = (24, batches, weight_s, disk_s, cache_s, compute_s)
    assert predict(shape, machine, workload, policy).decode_s == pytest.approx(overlapped(*times), rel=0.08)
    apart = predict(shape, machine, workload, replace(policy, overlap=False)).decode_s
    assert apart == pytest.approx(one_after_another(*times), rel=0.02)


def waiting_at_every_step(layers, batches, weight_s, compute_s):
    """FlexGen's loop: the next layer's weights are loaded beside the first batch, then all streams are waited for."""
    seconds = 0.0
    for _ in range(layers):
        seconds += max(weight_s, compute_s) + (batches - 1) * compute_s
    return seconds


@pytest.mark.parametrize("batches", [1, 4, 16])
@pytest.mark.parametrize("compute_s", [0.01, 0.1])
def test_a_runtime_that_waits_exposes_its_loads(shape, batches, compute_s):
    """Exposed loads bound what such a loop takes from above, by a batch's computing at most."""
    policy = OffloadPolicy(4, batches, Shares(host=1), Shares(gpu=1), Shares(gpu=1))
    workload = Workload(100, 2)
    cache_s = shape.kv_layer_bytes * 4 * workload.average_tokens / max(shape.layer_bytes()) * 0.5
    machine = machine_of(0.5, 1.0, cache_s, compute_s, shape, policy, workload.average_tokens)
    waits = replace(machine, schedule=replace(machine.schedule, exposed_weight_loads=1.0))
    simulated = waiting_at_every_step(24, batches, 0.5, compute_s)
    predicted = predict(shape, waits, workload, policy).decode_s
    assert simulated * 0.99 <= predicted <= (simulated + 24 * compute_s) * 1.01
    assert predict(shape, machine, workload, policy).decode_s <= simulated * 1.01


def varying(compute_s, load_s, ahead, visits=40_000):
    """Seconds a visit where loads, at most so many visits ahead, and computing vary by .8 of their mean."""
    random = np.random.default_rng(1)
    loads, computing = (random.gamma(1.5, mean / 1.5, visits) for mean in (load_s, compute_s))
    loaded, done = 0.0, [0.0] * (ahead + 1)
    for load, compute in zip(loads.tolist(), computing.tolist(), strict=True):
        loaded = max(loaded, done[-ahead - 1]) + load
        done.append(max(loaded, done[-1]) + compute)
    return done[-1] / visits


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("ahead", [2, 4, 8])
def test_times_that_vary_make_loads_and_computing_wait_for_each_other(shape, share, ahead):
    policy = OffloadPolicy(4, 1, Shares(disk=1), Shares(gpu=1), Shares(gpu=1))
    workload = Workload(100, 2)
    for disk_s, compute_s in ((1.0, share), (share, 1.0)):
        cache_s = shape.kv_layer_bytes * 4 * workload.average_tokens / max(shape.layer_bytes()) * 1e-9
        machine = machine_of(1e-9, disk_s, cache_s, compute_s, shape, policy, workload.average_tokens)
        queued = replace(machine, schedule=replace(machine.schedule, visits_ahead=ahead))
        found = predict(shape, queued, workload, policy).decode_s / 24
        assert found == pytest.approx(varying(compute_s, disk_s, ahead), rel=0.05)
        assert found >= predict(shape, machine, workload, policy).decode_s / 24


def test_the_simulation_keeps_resources_busy_one_thing_at_a_time():
    disk = Resource()
    assert [disk.work(0.0, 1.0), disk.work(5.0, 1.0), disk.work(0.0, 2.0)] == [1.0, 6.0, 8.0]
    assert disk.busy_s == 4.0
