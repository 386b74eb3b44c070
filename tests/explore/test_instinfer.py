"""Decode attention in drives, and what FlexGen and DeepSpeed do on the same host."""

import dataclasses

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.processors import Gpu, Runtime
from nearflash.explore.ssd import Ssd
from nearflash.explore.systems.flexgen import (
    flexgen,
    flexgen_machine,
    prefill_bytes,
    sparq_page_fraction,
    zero_inference,
)
from nearflash.explore.systems.instinfer import (
    Csd,
    KvShare,
    Serving,
    _mean_rest,
    instinfer_step,
    instinfer_throughput,
)
from nearflash.explore.systems.nearflash import MeasuredHeads, sparf_page_step
from nearflash.explore.tables import part_names, read_part

BATCHES = (4, 16, 64, 256)


def test_kv_of_the_batch():
    """OPT-13B, 4 x 5120 bytes a token and layer; 1,536 tokens on average."""
    assert Serving().kv_bytes == pytest.approx(64 * 1536 * 40 * 2 * 5120 * 2)


@pytest.mark.parametrize("given", [{"batch": 0}, {"prompt": 0}, {"new": -1}])
def test_no_sequences(given):
    with pytest.raises(PlanError, match="prompt, new and batch must be 1 at least"):
        Serving(**given)


def test_a_dense_step_by_hand():
    found = instinfer_step(Serving())
    assert found.phases["flash"] == pytest.approx(Serving().kv_bytes / 11.2e9)
    lanes = 768 / 4 / 2
    assert found.phases["engine Q·K"] == pytest.approx(Serving().kv_bytes / 4 / (lanes * 285e6))
    assert found.phases["engine select"] == 0
    assert found.units == 64


@pytest.mark.parametrize("selection", ["dense", "sparf-8"])
def test_larger_batches_take_longer_and_give_more(selection):
    steps = [instinfer_step(Serving(batch=batch), 1, selection) for batch in BATCHES]
    assert [each.seconds for each in steps] == sorted(each.seconds for each in steps)
    assert [each.rate for each in steps] == sorted(each.rate for each in steps)


@pytest.mark.parametrize("selection", ["dense", "sparf-8"])
def test_more_drives_are_never_slower(selection):
    rates = [instinfer_step(Serving(batch=256), drives, selection).rate for drives in range(1, 21)]
    assert rates == sorted(rates)
    assert rates[19] < 20 * rates[0], "the GPU's part does not shrink"


def test_heads_that_drives_cannot_share_evenly():
    two, three, four = (instinfer_step(Serving(), drives).phases["flash"] for drives in (2, 3, 4))
    assert two == pytest.approx(2 * four)
    assert three == pytest.approx(two * (14 / 40) / (20 / 40))


def test_selection_reads_less_and_selects():
    dense, sparse = (instinfer_step(Serving(), 1, name) for name in ("dense", "sparf-8"))
    # From 1,024 to 2,047 tokens: an index block, and 511.5 tokens on average whose K is read whole.
    read = 0.229 * 1536 + 0.5 * 0.23 * (1536 - 511.5) + 0.5 * (1 - 0.229) * 511.5
    assert sparse.phases["flash"] == pytest.approx(read / 1536 * dense.phases["flash"])
    assert sparse.phases["engine select"] > 0
    assert sparse.seconds < dense.seconds
    assert sparse.memory_bytes["flash of a drive"] == pytest.approx(1.5 * dense.memory_bytes["flash of a drive"])


def test_a_faster_engine_helps():
    csd = read_part(Csd, "instinfer")
    twice = dataclasses.replace(csd, dsps_count=2 * csd.dsps_count)
    slow, fast = instinfer_step(Serving(), csd=csd), instinfer_step(Serving(), csd=twice)
    assert fast.phases["engine P·V"] == pytest.approx(slow.phases["engine P·V"] / 2)
    assert fast.phases["flash"] == slow.phases["flash"]


def test_prefill_lowers_the_throughput():
    step = instinfer_step(Serving())
    assert 0.95 * step.rate < instinfer_throughput(Serving()) < step.rate
    long = Serving(prompt=1024, new=1)
    assert instinfer_throughput(long) < 0.5 * instinfer_step(long).rate


def test_no_drives():
    with pytest.raises(PlanError, match="csds must be 1 at least, not 0"):
        instinfer_step(Serving(), 0)


def test_unknown_selections_name_the_known():
    with pytest.raises(PlanError, match="selection must be one of dense, sparf-8, sparf-page, not 'topk'"):
        instinfer_step(Serving(), 1, "topk")


def test_flexgen_gets_what_its_runtime_states():
    serving = Serving()
    found = flexgen(serving)
    read = serving.kv_bytes / 1.33e9
    assert found.phases["KV read"] == pytest.approx(read, rel=0.01)
    assert found.phases["weights"] == 0


def test_no_second_drive_widens_flexgens_path():
    """KV passes the host's file system, which gives less than one drive would."""
    assert read_part(Runtime, "flexgen").read_bytes_per_s < read_part(Ssd, "instinfer").read_bytes_per_s
    assert flexgen(Serving(), 2).phases == flexgen(Serving()).phases


def test_batches_that_flexgens_prefill_holds():
    """InstInfer: feasible to 64, out of GPU memory at 128; a layer's scores of 128 prompts alone are 10.7 GB, twice."""
    assert [flexgen(Serving(batch=batch)).fits for batch in (32, 64, 128)] == [True, True, False]
    width = 128 * 1024 * 5120 * 2
    assert prefill_bytes(Serving(batch=128)) == 7 * width + 2 * 128 * 40 * 1024**2 * 2


def test_deepspeed_swaps_where_host_memory_is_full():
    """Every page of weights and KV faults once a step: eight pages a fault."""
    inside, beyond = zero_inference(Serving(batch=16)), zero_inference(Serving(batch=32))
    assert inside.phases["swap"] == 0
    used = 2 * Serving().shape.parameters + Serving(batch=32).kv_bytes
    assert beyond.phases["swap"] == pytest.approx(used / 32768 * 81e-6)
    assert beyond.rate < inside.rate / 10


def test_what_more_drives_do_not_shorten():
    one, twenty = (instinfer_step(Serving(batch=256), drives) for drives in (1, 20))
    for name in ("GPU", "link", "dispatch", "barrier"):
        assert one.phases[name] == twenty.phases[name]
    assert one.phases["dispatch"] == pytest.approx(256 * 40 * 40 * 1e-6)
    assert one.phases["barrier"] == pytest.approx(40 * 20e-6)


def test_bytes_over_the_gpus_link():
    """Of each query head: a query down; an output, a maximum and a sum back, and the logits of 1,536 tokens."""
    heads, new = 64 * 40 * 40, 2 * 2 * 40 * 5120 * 64
    dense, sparse, ours = (
        instinfer_step(Serving(), 1, name, logits=logits).traffic_bytes["host link"]
        for name, logits in (("dense", True), ("sparf-8", True), ("sparf-8", False))
    )
    assert dense == pytest.approx(heads * (2 * 256 + 8 + 2 * 1536) + new)
    assert dense - ours == pytest.approx(heads * 2 * 1536)
    assert sparse - ours == pytest.approx(heads * 2 * 1536 / 16)


def test_the_planners_machine():
    runtime, gpu, link = read_part(Runtime, "flexgen"), read_part(Gpu, "t4"), read_part(Link, "pcie3-x16")
    machine = flexgen_machine(runtime, gpu, link)
    assert machine.compute.matmul_decode_flops_per_s == pytest.approx(4.3e12, rel=0.01)
    assert machine.compute.matmul_prefill_flops_per_s == pytest.approx(21.24e12, rel=0.01)
    assert machine.compute.gpu_attention_bytes_per_s == pytest.approx(0.079e12, rel=0.01)
    chain = 1 / machine.disk.read_cache_bytes_per_s + 1 / machine.links.host_to_gpu_bytes_per_s
    assert 1 / chain == pytest.approx(1.33e9)


def test_sparq_reads_whole_pages():
    """16 heads of a token share a page of 4 KB, each chooses a token in 16; a row of the index is a page."""
    fraction = sparq_page_fraction(Serving())
    tokens = 1 - (15 / 16) ** 16
    assert fraction == pytest.approx(tokens + 0.5 * (4096 / 3072) / 8)
    assert sparq_page_fraction(Serving(), 32) < fraction
    assert flexgen(Serving(), sparq=True).phases["KV read"] == pytest.approx(
        fraction * flexgen(Serving()).phases["KV read"]
    )


def test_deepspeed_loads_weights_at_every_step():
    small, large = zero_inference(Serving(batch=1)), zero_inference(Serving(batch=16))
    assert small.phases["weights"] == pytest.approx(large.phases["weights"])
    assert large.phases["KV read"] == pytest.approx(16 * small.phases["KV read"])
    assert small.phases["weights"] == pytest.approx(2 * 40 * 314.6e6 / 10.2e9, rel=0.01)


@pytest.mark.parametrize("part", part_names(MeasuredHeads))
def test_our_engine_at_measured_contexts(part):
    measured = read_part(MeasuredHeads, part)
    for tokens, cycles in zip(measured.context_tokens, measured.head_cycles, strict=True):
        assert measured.cycles(tokens) == pytest.approx(cycles)
    between = measured.cycles(2048)
    assert measured.head_cycles[0] < between < measured.head_cycles[1]
    assert measured.cycles(65536) > 3.5 * measured.head_cycles[2]
    assert measured.cycles(512) < measured.head_cycles[0]


@pytest.mark.parametrize(
    ("selection", "fraction"),
    [("dense", 1.0), ("sparf-8", 0.344), ("sparf-page", 0.179)],
)
def test_pages_read_with_a_whole_index(selection, fraction):
    """flash fractions .34 and .18 at 4,096 tokens."""
    chosen = read_part(KvShare, selection)
    assert chosen.flash_fraction(4096, 0) == pytest.approx(fraction, abs=0.001)
    assert chosen.flash_fraction(4096, 4096 % chosen.block_tokens) == pytest.approx(fraction, abs=0.001)


def test_a_suffix_without_index_is_read_whole():
    separate, both = (read_part(KvShare, name) for name in ("sparf-8", "sparf-page"))
    assert separate.flash_fraction(512, 512) == pytest.approx(0.5 + 0.5 * 0.229)
    assert both.flash_fraction(512, 512) == 1.0
    fractions = [separate.flash_fraction(4096, each) for each in (0, 100, 1000)]
    assert fractions == sorted(fractions)


@pytest.mark.parametrize(
    ("prompt", "new", "block", "mean"), [(1024, 1024, 1024, 511.5), (4, 4, 4, 1.5), (0, 3, 10, 1.0)]
)
def test_the_mean_suffix(prompt, new, block, mean):
    assert _mean_rest(prompt, new, block) == mean


def test_our_engine_reads_what_has_no_index_yet():
    serving = Serving(batch=256)
    found, measured = sparf_page_step(serving), read_part(MeasuredHeads, "slc-1400")
    heads, rest = 256 * 40 * 40, 511.5 * 512 / read_part(Ssd, "slc-low-latency").read_bytes_per_s
    assert found.phases["engine and flash"] == pytest.approx(heads * (measured.cycles(1024.5) / 285e6 + rest))
    assert any("simulated" in text for text in found.assumptions)


@pytest.mark.parametrize("prompt", [8192, 16384, 32768])
def test_our_engine_beside_the_papers_at_long_contexts(prompt):
    """There the suffix is short beside the context; at 1,024 + 1,024 tokens most of what both read is the suffix."""
    serving = Serving(prompt=prompt, batch=16)
    assert sparf_page_step(serving).rate > 1.2 * instinfer_step(serving, 1, "sparf-8").rate


def test_shorter_index_blocks_win_with_short_contexts():
    """OPT-13B, 1K + 1K, batch 256: 40 KV heads, of each 512 tokens on average have no index of 1,024 yet."""
    serving = Serving(batch=256)
    paper, ours, short = (instinfer_step(serving, 1, "sparf-8"), sparf_page_step(serving),
                          sparf_page_step(serving, block_tokens=256))  # fmt: skip
    assert ours.rate < paper.rate < short.rate
    long = Serving("llama3.1-8b", 16_384, 1024, 16)
    assert sparf_page_step(long).rate > sparf_page_step(long, block_tokens=256).rate


def test_a_shorter_block_reads_the_whole_index():
    found = sparf_page_step(Serving(prompt=4096, new=1), block_tokens=256)
    other = sparf_page_step(Serving(prompt=4096, new=1))
    factor = (0.125 + 0.5 * 4 / 16) / (0.125 + 0.5 * 0.43 * 4 / 16)
    assert found.phases["engine and flash"] == pytest.approx(factor * other.phases["engine and flash"])


def test_overlap_hides_half_of_the_shorter_side():
    serving = Serving(batch=256)
    serial, overlapped = (sparf_page_step(serving, overlapped=each) for each in (False, True))
    other = sum(serial.phases[name] for name in ("GPU", "link", "dispatch", "barrier"))
    assert serial.seconds - overlapped.seconds == pytest.approx(other / 2)
    assert sparf_page_step(Serving(batch=1)).seconds == sparf_page_step(Serving(batch=1), overlapped=False).seconds
