"""Clusters: layouts of serving and training, against counts by hand."""

from dataclasses import replace

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.shapes import decoder
from nearflash.explore.systems.cluster import Cluster
from nearflash.explore.systems.cluster_serving import LAYOUTS, serving_step
from nearflash.explore.systems.cluster_training import TRAINING_LAYOUTS, ClusterTraining, cluster_training_step
from nearflash.explore.systems.instinfer import Serving
from nearflash.explore.tables import what_if

SERVING = Serving("llama3.1-70b", 2_000, 500, 64)
TWO = Cluster(hosts=2, gpus=4, drives=4)


def test_weights_cross_gpu_memory_once_a_step_and_users_share_them():
    few = replace(SERVING, prompt=1, new=1, batch=1)
    step = serving_step(few, Cluster(gpus=8), "GPU memory")
    shape = decoder("llama3.1-70b")
    assert step.phases["matrices"] == pytest.approx((2 * shape.active + few.kv_bytes) / (8 * 1555e9))
    assert (
        serving_step(replace(few, batch=2), Cluster(gpus=8), "GPU memory").phases["matrices"]
        < 1.1 * (step.phases["matrices"])
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_of_hosts_pays_messages_and_one_host_does_not(layout):
    assert serving_step(SERVING, TWO, layout).phases["network"] > 0
    assert serving_step(SERVING, TWO, layout, replicas=2).phases["network"] == 0


def test_half_of_the_bytes_of_weights_and_of_a_slower_network_count():
    assert (
        serving_step(SERVING, TWO, "GPU memory", weight_bits=4).memory_bytes["GPU"]
        < serving_step(SERVING, TWO, "GPU memory").memory_bytes["GPU"]
    )
    slow = replace(TWO, network="ethernet-25g")
    assert (
        serving_step(SERVING, slow, "drives").phases["network"] > serving_step(SERVING, TWO, "drives").phases["network"]
    )


def test_the_shorter_of_two_halves_is_hidden():
    found = serving_step(SERVING, TWO, "drives")
    assert found.phases["matrices"] == 0 < found.hidden["shorter of matrices and attention"] < found.phases["attention"]
    with what_if({"attended.slc-1400.clock_hz": 285e9}):
        fast = serving_step(SERVING, TWO, "drives")
    assert fast.phases["attention"] == 0 < fast.phases["matrices"]


def test_drives_divide_attention_and_the_cpu_is_one():
    four, eight = (serving_step(SERVING, replace(TWO, drives=count), "drives") for count in (1, 2))
    assert eight.phases["attention"] == pytest.approx(four.phases["attention"] / 2, rel=0.05)
    few, many = (serving_step(SERVING, Cluster(1, gpus, 4), "host memory") for gpus in (2, 8))
    assert many.phases["attention"] == pytest.approx(few.phases["attention"], rel=0.3)


def test_memory_holds_weights_and_kv_as_long_as_they_become():
    shape = decoder("llama3.1-70b")
    kv = 2 * shape.kv * 64 * 2_500
    held = {layout: serving_step(SERVING, TWO, layout, 2).memory_bytes for layout in LAYOUTS}
    assert held["GPU memory"]["GPU"] == pytest.approx((2 * 2 * shape.parameters + kv) / 8)
    assert held["host memory"]["host"] == pytest.approx(kv / 2)
    assert held["drives"]["drive"] >= kv / 8


@pytest.mark.parametrize(
    ("cluster", "layout", "replicas", "text"),
    [
        (TWO, "tape", 1, "layout must be one of GPU memory, host memory, drives, not 'tape'"),
        (TWO, "drives", 3, "replicas must divide the 8 GPUs, not 3"),
        (replace(TWO, drives=0), "drives", 1, "drives must be 1 at least"),
        (Cluster(3, 4), "GPU memory", 2, "not of 6 GPUs"),
    ],
)
def test_what_cannot_be_is_named(cluster, layout, replicas, text):
    with pytest.raises(PlanError, match=text):
        serving_step(SERVING, cluster, layout, replicas)


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"gpus": 0}, {"drives": -1}, {"memory_bytes": 0}, {"gpu": "abacus"},
                                   {"network": "string"}])  # fmt: skip
def test_a_cluster_that_cannot_be_is_refused(wrong):
    with pytest.raises(PlanError):
        Cluster(**wrong)


def test_every_host_updates_its_part():
    one, four = (
        {layout: cluster_training_step(ClusterTraining(layout=layout), Cluster(hosts)) for layout in TRAINING_LAYOUTS}
        for hosts in (1, 4)
    )
    for layout in TRAINING_LAYOUTS:
        assert four[layout].phases["update"] == pytest.approx(one[layout].phases["update"] / 4)
        assert four[layout].units == 4 * one[layout].units
    shape = decoder("llama3.1-70b")
    written = 12 * shape.parameters / (4 * 2.85e9)
    assert one["drives"].phases["update"] == pytest.approx(written, rel=0.1) and not one["drives"].fits


def test_gathering_is_seen_where_it_takes_longer_than_computing():
    slow, short = Cluster(4, network="ethernet-25g"), ClusterTraining(tokens=512)
    found = cluster_training_step(short, slow)
    assert found.phases["gathering"] > 0 and found.hidden["gathering"] == found.phases["forward and backward"]
    assert cluster_training_step(ClusterTraining(), Cluster(4)).phases["gathering"] == 0


def test_training_that_cannot_be_is_named():
    with pytest.raises(PlanError, match="layout must be one of"):
        ClusterTraining(layout="tape")
    with pytest.raises(PlanError, match="tokens must be 1"):
        ClusterTraining(tokens=0)
    with pytest.raises(PlanError, match="drives must be 1 at least for layout plain drives"):
        cluster_training_step(ClusterTraining(layout="plain drives"), Cluster(drives=0))
