"""Device `model` of the attend kernel: what it does beside computing heads as tests/system have it do."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.drivers.attend import attend
from nearflash.device.memory import SimulatedMemory
from nearflash.device.selftest.attend import place_heads
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.random_vectors import random_vector

SIZE = 1 << 24


@pytest.fixture
def device():
    with AttendModelDevice(attend_config("attend-tiny"), SimulatedMemory(SIZE)) as opened:
        yield opened


@pytest.fixture
def heads(device):
    settings = HeadSettings(
        Mode.PAGE | Mode.PROBABILITY, 32, 0.18, score_dims=8, top_k=3, group_tokens=8, block_tokens=32
    )
    vectors = [random_vector(settings, 100, 2, seed=index, head=index) for index in range(3)]
    with place_heads(device, vectors) as (heads, _):
        yield heads


def faults(done):
    return [one.completion.faults for one in done.heads]


def test_counters(device, heads):
    heads[1] = replace(heads[1], token_table=heads[1].token_table[::-1].copy())
    done = attend(device, heads)
    counters = done.batches[0].counters
    assert faults(done) == [Fault(0), Fault.MISDIRECTED, Fault(0)]
    assert (counters["heads_done"], counters["heads_faulty"]) == (3, 1)
    requests = counters["index_requests"] + counters["token_requests"]
    assert requests == sum(one.completion.pages for one in done.heads)
    assert counters["codewords_asked"] == counters["codewords_received"] > counters["codewords_foreign"] > 0


@pytest.mark.parametrize("table", ["token_table", "index_table"])
def test_a_page_outside_the_memory_and_every_head_behind_it(device, heads, table):
    outside = np.full_like(getattr(heads[1], table), PageEntry(0, address=SIZE).pack())
    heads[1] = replace(heads[1], **{table: outside})
    done = attend(device, heads)
    assert faults(done) == [Fault(0), Fault.MEMORY, Fault.MEMORY]
    assert [one.completion.entries for one in done.heads] == [13, 13, 13]
    assert faults(attend(device, heads[2:])) == [Fault(0)]


def test_a_blank_nand_page_is_lost(device, heads):
    table = np.full_like(heads[0].token_table, PageEntry(1, 3, 7).pack())
    assert faults(attend(device, [replace(heads[0], token_table=table)])) == [Fault.UNCORRECTABLE]
    table = np.full_like(heads[0].token_table, PageEntry(1, 4, 7).pack())
    assert faults(attend(device, [replace(heads[0], token_table=table)])) == [Fault.ENTRY]
