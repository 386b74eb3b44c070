"""Shares rounded to units, the memory of links, and what a ledger counts."""

import itertools
import threading

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.offload.tiers.ledger import Budgets, Ledger
from nearflash.offload.tiers.link import DeviceLink, StagedBuffer, host_memory
from nearflash.planning.placement import place_units
from nearflash.planning.policy import Shares


@pytest.mark.parametrize("tier", ["gpu", "host", "disk"])
def test_all_on_one_tier(tier):
    assert place_units(Shares(**{tier: 1}), [5] * 7) == [tier] * 7


@pytest.mark.parametrize("count", [1, 2, 3, 10, 47])
@pytest.mark.parametrize("gpu", [0.0, 0.1, 0.33, 0.5, 0.9])
def test_shares_are_met_within_a_unit(count, gpu):
    rest = (1 - gpu) / 2
    tiers = place_units(Shares(gpu=gpu, host=rest, disk=rest), [8] * count)
    for tier, share in (("gpu", gpu), ("host", rest), ("disk", rest)):
        assert abs(tiers.count(tier) - share * count) <= 1


def test_units_of_a_tier_lie_apart():
    tiers = place_units(Shares(gpu=0.75, disk=0.25), [1] * 40)
    places = [place for place, tier in enumerate(tiers) if tier == "disk"]
    assert len(places) == 10
    assert {after - before for before, after in itertools.pairwise(places)} == {4}


def test_shares_are_of_bytes():
    tiers = place_units(Shares(gpu=0.5, disk=0.5), [100, 1, 1, 100])
    sizes = {
        tier: sum(s for s, t in zip([100, 1, 1, 100], tiers, strict=True) if t == tier) for tier in ("gpu", "disk")
    }
    assert sizes["gpu"] > 90 and sizes["disk"] > 90


def test_a_share_on_devices_alone_leaves_the_rest_in_memory():
    assert place_units(Shares(device=1), [1, 1]) == ["gpu", "gpu"]
    assert place_units(Shares(device=0.5, disk=0.5), [1, 1]) == ["disk", "disk"]
    assert place_units(Shares(gpu=1), []) == []


def test_memory_begins_at_a_page():
    for size in (1, 4096, 5000):
        memory = host_memory(size)
        assert len(memory) == size and memory.dtype is torch.uint8 and memory.data_ptr() % 4096 == 0
    assert len(host_memory(0)) == 0


def test_a_cpus_memory_is_the_hosts():
    link = DeviceLink("cpu")
    buffer = link.buffer(64)
    assert buffer.memory.data_ptr() == buffer.host.data_ptr()
    buffer.host.fill_(3)
    link.before_fill(buffer)
    link.push("weights", buffer.host, buffer.memory)
    link.before_use(buffer)
    link.after_use(buffer)
    link.finish()
    assert (buffer.memory == 3).all() and buffer.pushed is None and buffer.used is None


class Event:
    """Counts who waits for it."""

    def __init__(self):
        self.waited = 0

    def synchronize(self):
        self.waited += 1


def test_a_buffer_is_filled_after_its_copy_and_its_use():
    link, buffer = DeviceLink("cpu"), StagedBuffer(host_memory(8), host_memory(8))
    buffer.pushed, buffer.used = pushed, used = Event(), Event()
    link.before_fill(buffer)
    assert pushed.waited == used.waited == 1 and buffer.pushed is None and buffer.used is None
    link.before_fill(buffer)
    assert pushed.waited == 1


def test_a_ledger_counts_bytes_and_keeps_peaks():
    ledger = Ledger()
    ledger.take("gpu", 100, "a")
    ledger.take("gpu", 50, "b")
    ledger.give("gpu", 120)
    ledger.take("host", 7, "c")
    assert ledger.held == {"gpu": 30, "host": 7} and ledger.peaks == {"gpu": 150, "host": 7}
    ledger.count_bytes("weights disk to host", 5)
    ledger.count_bytes("weights disk to host", 6)
    with ledger.span("compute", layer=1):
        pass
    assert ledger.links == {"weights disk to host": 11} and ledger.timeline.seconds["compute"] > 0
    ledger.clear()
    assert not ledger.links and not ledger.timeline.seconds and ledger.peaks == {"gpu": 30, "host": 7}


def test_a_budget_is_refused_and_nothing_taken():
    ledger = Ledger(Budgets(host=100))
    ledger.take("host", 60, "weights")
    with pytest.raises(CommandError, match="budget of host must be 101 bytes at least with the cache, not 100"):
        ledger.take("host", 41, "the cache")
    assert ledger.held == {"host": 60} == ledger.peaks
    ledger.take("host", 40, "the cache")
    ledger.take("gpu", 10**12, "no budget")


def test_threads_count_together():
    ledger = Ledger()

    def work():
        for _ in range(500):
            ledger.count_bytes("link", 1)
            ledger.take("gpu", 2, "part")
            ledger.give("gpu", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.links == {"link": 2000} and ledger.held == {"gpu": 2000}
