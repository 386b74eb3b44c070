"""The whole attend kernel on Verilator: against cocotb's AXI models, and head by head against the model."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config
from nearflash.device.drivers.attend import attend
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.random_vectors import random_vector
from nearflash.model.attention.vectors import differences
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.heads import place_heads
from nearflash.verify.cocotb.run import run_testbench

SCALE = 0.18
PAGE = Mode.PAGE | Mode.PROBABILITY


@pytest.mark.full  # a simulator of its own, four minutes to build
def test_testbench() -> None:
    result = run_testbench("gateware.top.attend")
    assert result.failed == ()
    assert len(result.passed) == 3


@pytest.fixture(scope="module")
def device():
    """The tiny build: two channels with NAND."""
    with VerilatorDevice(attend_config("attend-tiny"), memory_bytes=1 << 26) as opened:
        yield opened


def settings(mode, dim=64, **options):
    common = {"score_dims": dim // 4, "top_k": 4, "local_window": 2, "group_tokens": 16, "block_tokens": 64}
    return HeadSettings(mode, dim, SCALE, **(common | options))


#: Name -> settings, S, g.
HEADS = {
    "dense": (HeadSettings(Mode.DENSE | Mode.REFERENCE, 64, SCALE, reference=(3,)), 70, 1),
    "dense, group": (HeadSettings(Mode.DENSE | Mode.REFERENCE, 128, SCALE, reference=(12,) * 8), 33, 8),
    "one token": (settings(PAGE, top_k=1, local_window=1), 1, 2),
    "tail only": (settings(PAGE), 63, 3),
    "pages, fp16 index": (settings(PAGE), 300, 2),
    "pages, int8 index": (settings(PAGE, index_format=IndexFormat.INT8), 260, 1),
    "pages, int4 index": (settings(PAGE, index_format=IndexFormat.INT4, block_tokens=128), 420, 4),
    "pages by logit": (settings(Mode.PAGE, dim=128, group_tokens=8), 200, 2),
    "pages by mass": (settings(PAGE, top_p=45_000, top_k=9), 300, 3),
    "interleaved": (settings(PAGE, group_tokens=8, interleaved=True), 250, 2),
    "tokens": (settings(Mode(0), top_k=40), 300, 2),
    "tokens by probability": (settings(Mode.PROBABILITY, top_k=25, local_window=8), 200, 4),
    "all pages": (settings(PAGE, top_k=64), 200, 2),
    "odd dimension": (settings(PAGE, dim=80, score_dims=9, group_tokens=20, block_tokens=80), 250, 3),
}


def vectors(seed, *, names=tuple(HEADS)):
    return [random_vector(*HEADS[name], seed=seed + index, head=index) for index, name in enumerate(names)]


def run(device, heads, *, nand, **options):
    """Completions and outputs of cases whose pages lie on NAND or in memory; what differs from the model."""
    with place_heads(device, heads, memory=not nand) as operands:
        done = attend(device, operands, repeats=0, watchdog_cycles=100_000, **options)
    wrong = {
        index: text
        for index, (vector, one) in enumerate(zip(heads, done.heads, strict=True))
        if (text := differences(vector, one.completion, one.out))
    }
    return done, wrong


@pytest.mark.parametrize("nand", [False, True], ids=["memory", "nand"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_equals_the_model(device, name, nand) -> None:
    done, wrong = run(device, vectors(1, names=[name]), nand=nand)
    assert not wrong
    assert done.batches[0].counters["heads_done"] == 1


def test_a_drain_does_not_disturb_the_head_that_is_being_weighed(device) -> None:
    """Totals of the head under way were once mixed with those that the drain looked at."""
    names = ["tokens", "pages, int4 index", "tail only", "odd dimension"]
    assert not run(device, vectors(1, names=names * 3), nand=False)[1]


@pytest.mark.parametrize("contexts", [1, 4])
def test_heads_in_flight_together_equal_the_model(device, contexts) -> None:
    done, wrong = run(device, vectors(20), nand=True, contexts=contexts)
    assert not wrong
    assert all(one.completion.faults == Fault(0) for one in done.heads)


def test_heads_wait_for_lines_of_the_selection_store(device) -> None:
    """Each takes 3,000 of 8,192 lines: two are scanned at once, those behind them as lines come back, and wrap."""
    many = settings(Mode.PROBABILITY, dim=16, top_k=25, local_window=8), 1500, 8
    heads = [random_vector(*many, seed=30 + index, head=index) for index in range(5)]
    assert 2 * 3000 < device.identity.config.score_entries // 4 < 3 * 3000
    assert not run(device, heads, nand=False, contexts=4)[1]


def test_counters_count_the_pages_of_the_heads(device) -> None:
    heads = vectors(3)
    done, _ = run(device, heads, nand=True)
    counters = done.batches[0].counters
    assert counters["index_requests"] + counters["token_requests"] == sum(one.completion.pages for one in done.heads)
    assert counters["codewords_asked"] == counters["codewords_received"]
    assert counters["heads_done"] == len(heads) and counters["heads_faulty"] == 0
    assert counters["codewords_uncorrectable"] == counters["codewords_foreign"] == 0
    assert 0 < counters["beats_used"] <= 64 * counters["codewords_received"]


def test_a_wrong_reference_is_told_and_the_right_one_helps(device) -> None:
    low, high = ((HeadSettings(Mode.DENSE | Mode.REFERENCE, 64, SCALE, reference=(r,)), 40, 1) for r in (60, -60))
    heads = [random_vector(*low, seed=1), random_vector(*high, seed=2)]
    done, wrong = run(device, heads, nand=True)
    assert not wrong
    assert [one.completion.faults for one in done.heads] == [Fault.REFERENCE_LOW, Fault.REFERENCE_HIGH]
    with place_heads(device, heads) as operands:
        assert all(one.out is not None for one in attend(device, operands).heads)


def test_faults_stay_with_their_heads(device) -> None:
    heads = vectors(5, names=["tokens", "pages, fp16 index", "dense", "interleaved"])
    heads[1].k[-1] = np.inf  # of the local window, so it is gathered
    heads[2].q[0, 0] = np.nan
    done, wrong = run(device, heads, nand=True)
    faults = [one.completion.faults for one in done.heads]
    assert faults[0] == faults[3] == Fault(0)
    assert faults[1] & Fault.NONFINITE and faults[2] == Fault.NONFINITE
    assert not {0, 3} & set(wrong)


@pytest.fixture
def bit_errors(device):
    """Sets the raw bit error rate of all channels; afterwards there are none."""

    def rate(bit_error_rate):
        for index, channel in enumerate(device.kernel.channels):
            channel.configure(replace(channel.model, bit_error_rate=bit_error_rate, seed=index))

    yield rate
    rate(0.0)


def test_bit_errors_are_corrected(device, bit_errors) -> None:
    bit_errors(5e-4)
    done, wrong = run(device, vectors(7, names=["pages, int4 index", "tokens", "interleaved"]), nand=True)
    counters = done.batches[0].counters
    assert not wrong
    assert counters["codewords_corrected"] > counters["codewords_received"] / 2
    assert counters["codewords_uncorrectable"] == 0


def test_what_cannot_be_corrected_is_told_and_never_used(device, bit_errors) -> None:
    bit_errors(1e-2)
    done, _ = run(device, vectors(7, names=["pages, fp16 index", "dense"]), nand=True)
    assert all(one.completion.faults & Fault.UNCORRECTABLE and one.out is None for one in done.heads)
    assert done.batches[0].counters["codewords_uncorrectable"] > 0
