from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearflash.abi.errors import AlignmentError, NonFiniteError
from nearflash.abi.topk import longest_stream_bytes
from nearflash.device.backends.host.topk import expand
from nearflash.support import native
from nearflash.training.gradients.compression import Compressor, TopK, loops

top_k = partial(TopK, warmup_steps=0)
GENERIC = native.ProcessorLevel("generic", ("-O1",), frozenset())
AVX2 = next(target for target in native.TARGETS if target.name == "x86-64-v3")
LEVELS = {target.name: target for target in (native.pick_target(), AVX2, GENERIC)}


def gradients(seed, params=512):
    return np.random.default_rng(seed).standard_normal(params).astype(np.float32)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.integers(1, 64), st.sampled_from([0.01, 0.3, 1.0]))
def test_selection_is_that_of_a_sort(seed, distinct, ratio):
    """Few distinct magnitudes, so that many are equal: the lower index wins."""
    rng = np.random.default_rng(seed)
    g = (rng.integers(-distinct, distinct + 1, 160) / 4).astype(np.float32)
    kept = np.flatnonzero(expand(Compressor(top_k(ratio, value_format="fp32"), 160).compress(0, g, 1), 160))
    order = sorted(range(160), key=lambda i: (-abs(g[i]), i))[: top_k(ratio).count(160, 1)]
    assert kept.tolist() == sorted(i for i in order if g[i])


@pytest.mark.parametrize("value_format", ["fp16", "bf16", "fp32"])
def test_kept_and_left_out_add_up_exactly(value_format):
    """Over several steps, and to the bit: a difference of a number and its rounding is exact in fp32."""
    compressor = Compressor(top_k(0.05, value_format=value_format, residual="fp32"), 512)
    for step in range(1, 6):
        g, before = gradients(step), compressor.arrays().get("residual", np.zeros(512, np.float32)).copy()
        kept = expand(compressor.compress(0, g, step), 512)
        compressor.commit()
        np.testing.assert_array_equal(kept + compressor.arrays()["residual"], before + g)


def test_nothing_is_lost_over_the_range_of_fp16():
    g = np.zeros(16, np.float32)
    g[3], g[5] = 100_000, 1e-9
    compressor = Compressor(top_k(1.0, value_format="fp16", residual="fp32"), 16)
    kept = expand(compressor.compress(0, g, 1), 16)
    compressor.commit()
    assert kept[3] == 65504 and kept[5] == 0
    np.testing.assert_array_equal(compressor.arrays()["residual"][[3, 5]], np.float32([100_000 - 65504, 1e-9]))


@pytest.mark.parametrize("residual", ["fp32", "int4"])
def test_a_skipped_step_changes_nothing(residual):
    one, other = (Compressor(top_k(0.05, residual=residual), 512) for _ in range(2))
    for compressor in (one, other):
        compressor.compress(0, gradients(1), 1)
        compressor.commit()
    one.compress(0, gradients(9), 2)
    one.abort()
    assert one.compress(0, gradients(2), 2).tobytes() == other.compress(0, gradients(2), 2).tobytes()


@pytest.mark.parametrize("residual", ["fp32", "int4"])
def test_resumed_from_its_arrays_it_goes_on_the_same(residual):
    one, other = (Compressor(top_k(0.05, residual=residual), 512) for _ in range(2))
    for step in (1, 2):
        one.compress(0, gradients(step), step)
        one.commit()
    other.load({name: array.copy() for name, array in one.arrays().items()})
    assert one.compress(0, gradients(3), 3).tobytes() == other.compress(0, gradients(3), 3).tobytes()


def test_ranges_are_selected_from_by_themselves_in_any_order():
    g = gradients(4, 1024)
    one, other = (Compressor(top_k(0.05), 1024) for _ in range(2))
    for step in (1, 2):
        streams = [one.compress(start, g[start : start + 512], step).tobytes() for start in (0, 512)]
        assert streams[::-1] == [other.compress(start, g[start : start + 512], step).tobytes() for start in (512, 0)]
        one.commit()
        other.commit()
    np.testing.assert_array_equal(one.arrays()["residual"], other.arrays()["residual"])


def test_without_feedback_there_is_no_state():
    compressor = Compressor(top_k(0.05, feedback=False), 512)
    first = compressor.compress(0, gradients(1), 1).tobytes()
    compressor.commit()
    assert compressor.compress(0, gradients(1), 1).tobytes() == first and compressor.arrays() == {}


def test_torch_tensors_of_other_dtypes():
    half = torch.randn(64).bfloat16()
    by_torch = Compressor(top_k(0.1), 64).compress(0, half, 1)
    assert by_torch.tobytes() == Compressor(top_k(0.1), 64).compress(0, half.float().numpy(), 1).tobytes()


def test_feedback_brings_every_gradient_in_the_end():
    """A constant gradient: the sum of what was kept follows the sum of gradients within a few steps' worth."""
    g, total = gradients(5), np.zeros(512, np.float32)
    compressor = Compressor(top_k(0.1), 512)
    for step in range(1, 201):
        total += expand(compressor.compress(0, g, step), 512)
        compressor.commit()
    assert np.abs(total / 200 - g).max() < 0.1 * np.abs(g).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite_are_refused(value):
    g = gradients(1)
    g[7] = value
    compressor = Compressor(top_k(0.1), 512)
    with pytest.raises(NonFiniteError, match="gradients must be finite, not NaN or infinite in 1 elements"):
        compressor.compress(0, g, 1)
    compressor.commit()
    assert not compressor.arrays()["residual"].any()


@pytest.mark.parametrize("value_format", ["fp16", "fp32"])
@pytest.mark.parametrize("ratio", [0.001, 0.03, 1.0])
def test_streams_fit_what_is_said(ratio, value_format):
    topk = top_k(ratio, value_format=value_format)
    compressor = Compressor(topk, 9008)
    longest = longest_stream_bytes(9008, topk.count(9008, 1), topk.wire_format)
    assert compressor.compress(0, gradients(6, 9008), 1).size <= longest


def test_ranges_are_multiples_of_16():
    with pytest.raises(AlignmentError, match="params must be a multiple of 16 parameters, not 17; pad with zeros"):
        Compressor(top_k(0.1), 17)
    with pytest.raises(AlignmentError, match="start must be a multiple of 16 parameters, not 8"):
        Compressor(top_k(0.1), 32).compress(8, np.zeros(16, np.float32), 1)


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """The compiled passes for this processor, for one without AVX-512, and for one without vectors."""
    if not LEVELS[request.param].features <= native._features():
        pytest.skip(f"this processor is no {request.param}")
    monkeypatch.setattr(native, "pick_target", lambda: LEVELS[request.param])
    loops._load.cache_clear()
    yield
    loops._load.cache_clear()


def wide(params, seed):
    """Exponents over the whole range, subnormal and zero blocks, values half way between two, and many equal ones."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(params) * 10 ** rng.uniform(-44, 37, params)).astype(np.float32)
    values[: params // 4] = rng.integers(-3, 4, params // 4) / 4
    values[-64:-16] = np.arange(48) / 2 - 12
    values[-16:] = -0.0
    return values


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("params", [80, 4096, 9008, 70_000])
@pytest.mark.parametrize(
    "options", [{}, {"residual": "fp32", "value_format": "fp32"}, {"feedback": False, "value_format": "fp16"}],
    ids=["int4", "fp32", "none"],
)  # fmt: skip
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_compiled_passes_have_the_bits_of_torch(monkeypatch, params, options, ratio):
    found = []
    for compiled in (True, False):
        compressor = Compressor(top_k(ratio, **options), params)
        assert compressor._is_compiled(torch.zeros(16))
        monkeypatch.setattr(compressor, "_is_compiled", lambda _, compiled=compiled: compiled)
        streams = []
        for step in (1, 2, 3):
            streams.append(compressor.compress(0, wide(params, step), step).tobytes())
            compressor.commit()
        found.append((streams, {name: array.tobytes() for name, array in compressor.arrays().items()}))
    assert found[0] == found[1]


def test_a_sample_that_misleads_costs_time_alone():
    """All that is looked at first is large, or nothing of it is."""
    for first, rest in ((9.0, 1.0), (0.0, 1.0)):
        g = np.full(64_000, rest, np.float32)
        g[::251] = first
        kept = np.flatnonzero(expand(Compressor(top_k(0.01), g.size).compress(0, g, 1), g.size))
        order = np.lexsort((np.arange(g.size), -g))[:640]
        assert kept.tolist() == sorted(order.tolist())
