"""Several tokens at once, softcap and sinks: every engine against the formula in double precision."""

import numpy as np
import pytest
import torch

from nearflash.abi.errors import ShapeError, UnsupportedError
from nearflash.device import open_device
from nearflash.inference.engines.array import CsdArray
from nearflash.inference.engines.cpu import engine as cpu
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.engines.paged.softmax import OnlineSoftmax
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.kv import KvShape, KvStore

LENGTHS = [5, 70, 64, 139]
PAGE = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8)


def formula(q, k, v, scaling, softcap=None, sinks=None):
    """q (heads, t, g, d) of the last t of k, v (heads, S, d); double precision, token by token."""
    out = np.zeros(q.shape)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for head, token, member in np.ndindex(q.shape[:3]):
        seen = k.shape[1] - q.shape[1] + token + 1
        logits = k[head, :seen] @ q[head, token, member] * scaling
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits - logits.max())
        total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head, member]) - logits.max()))
        out[head, token, member] = weights @ v[head, :seen] / total
    return out


def draw(shape, new, sequences, group=2, seed=4):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((sequences, shape.kv_heads, new, group, shape.dim)).astype(np.float16)
    return q, rng.standard_normal((shape.kv_heads, group)).astype(np.float32)


@pytest.fixture
def make(make_store, make_layout, shape):
    def engine(name, interleaved, policy):
        layout = make_layout(interleaved=interleaved)
        if name == "cpu":
            return CpuEngine(make_store(shape, layout), policy)
        if name == "array":
            parts = [KvShape(shape.layers, heads, shape.dim) for heads in (2, 1)]
            return CsdArray([CpuEngine(make_store(part, layout), policy) for part in parts])
        device = open_device("model:attend-tiny")
        flash = MemoryFlash(device, FlashGeometry(layout.page_bytes, 32, device.identity.config.channels, 2, 32))
        return DeviceEngine(device, KvStore(flash, shape, layout), policy)

    return engine


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", ["cpu", "array", "model"])
@pytest.mark.parametrize("policy", [AttentionPolicy(), PAGE], ids=["dense", "page"])
@pytest.mark.parametrize("new", [1, 3, 5])
def test_several_tokens_see_the_tokens_up_to_themselves(make, shape, filled, name, interleaved, policy, new):
    engine = make(name, interleaved, policy)
    numbers, stored = filled(engine, shape, LENGTHS)
    q, _ = draw(shape, new, len(LENGTHS))
    out = engine.attend(1, numbers, q, 0.2)
    assert out.dtype == np.float32 and out.shape == q.shape
    for own, (k, v), got in zip(q, stored, out, strict=True):
        want = formula(own, k, v, 0.2)
        bound = 4e-3 * np.abs(want).max() if name == "model" else 2e-5
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound)
    engine.close()


def masked(q, k, v, visible, scaling, softcap, sinks):
    """q (heads, t, g, d) of any tokens; 0 for a query that sees none."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    logits = softcap * np.tanh(np.einsum("htgd,hsd->htgs", q, k) * scaling / softcap)
    weights = np.where(visible[None, :, None], np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64))[:, None, :, None]
    return np.einsum("htgs,hsd->htgd", weights / total, v)


@pytest.mark.parametrize("name", ["cpu", "array"])
@pytest.mark.parametrize("at_once", [1, 1 << 24], ids=["part by part", "at once"])
def test_queries_see_what_a_mask_shows(make, shape, filled, monkeypatch, name, at_once):
    """More queries than tokens, one that sees nothing, and whole parts that are hidden."""
    monkeypatch.setattr(cpu.CpuEngine, "logits_at_once", at_once)
    engine = make(name, True, PAGE)
    assert engine.takes_masks
    numbers, stored = filled(engine, shape, [5, 139])
    rng = np.random.default_rng(2)
    for number, (k, v) in zip(numbers, stored, strict=True):
        (q,), sinks = draw(shape, 8, 1)
        visible = rng.random((8, k.shape[1])) < 0.4
        visible[2] = False
        visible[3:5, : k.shape[1] * 3 // 4] = False
        out = engine.attend_masked(1, number, q, visible, 0.2, softcap=2.0, sinks=sinks)
        np.testing.assert_allclose(out, masked(q, k, v, visible, 0.2, 2.0, sinks), rtol=2e-5, atol=2e-5)
        none = engine.attend_masked(1, number, q, visible, 0.2)
        assert np.isfinite(none).all() and not none[:, 2].any()
        with pytest.raises(ShapeError, match="visible must be of 8 queries"):
            engine.attend_masked(1, number, q, visible[:, 1:], 0.2)
    engine.close()


def test_a_device_takes_no_masks(make, shape, filled):
    engine = make("model", True, PAGE)
    (number,), _ = filled(engine, shape, [5])
    with pytest.raises(UnsupportedError, match="engine must be one that takes masks, not model"):
        engine.attend_masked(1, number, draw(shape, 1, 1)[0][0], np.ones((1, 5), bool))
    assert not engine.takes_masks
    engine.close()


def test_pages_are_read_once_for_all_tokens(make, shape, filled, monkeypatch):
    """In parts of few groups: as many bytes as one dense token reads, and the same numbers."""
    engine = make("cpu", True, PAGE)
    numbers, [(k, v)] = filled(engine, shape, [139])
    q, _ = draw(shape, 40, 1)
    monkeypatch.setattr(cpu.CpuEngine, "logits_at_once", 3 * 40 * 2 * 8 * 2)
    out = engine.attend(1, numbers, q)
    np.testing.assert_allclose(out[0], formula(q[0], k, v, shape.dim**-0.5), rtol=2e-5, atol=2e-5)
    assert engine.counters.take().flash_bytes == {"token": 3 * 16 * 4096}


@pytest.mark.parametrize("new", [0, 4])
@pytest.mark.parametrize("softcap, with_sinks", [(1.5, False), (None, True), (1.5, True)])
def test_softcap_and_sinks(make, shape, filled, softcap, with_sinks, new):
    engine = make("cpu", True, AttentionPolicy())
    numbers, stored = filled(engine, shape, LENGTHS)
    q, sinks = draw(shape, max(new, 1), len(LENGTHS))
    sinks = 3 * sinks if with_sinks else None
    out = engine.attend(1, numbers, q if new else q[:, :, 0], 0.2, softcap=softcap, sinks=sinks)
    for own, (k, v), got in zip(q, stored, out, strict=True):
        want = formula(own, k, v, 0.2, softcap, sinks)
        np.testing.assert_allclose(got, want if new else want[:, 0], rtol=2e-5, atol=2e-5)


def test_an_array_gives_each_engine_its_own_sinks(make, shape, filled):
    engine = make("array", True, AttentionPolicy())
    numbers, [(k, v)] = filled(engine, shape, [70])
    q, sinks = draw(shape, 1, 1)
    out = engine.attend(1, numbers, q[:, :, 0], 0.2, sinks=sinks)
    np.testing.assert_allclose(out[0], formula(q[0], k, v, 0.2, None, sinks)[:, 0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("policy", [
    AttentionPolicy("sparf", score_dims=1.0, top_k=1.0), AttentionPolicy("sparf-page", score_dims=1.0, top_k=1.0),
    AttentionPolicy("sparf-page", score_dims=1.0, top_k=1.0, top_p=0.999999, local_window=4),
], ids=["sparf", "page", "mass"])  # fmt: skip
def test_all_tokens_chosen_are_dense_with_softcap_and_sinks(make, shape, filled, policy):
    engine = make("cpu", True, policy)
    numbers, stored = filled(engine, shape, LENGTHS)
    q, sinks = draw(shape, 1, len(LENGTHS))
    out = engine.attend(1, numbers, q[:, :, 0], 0.2, softcap=2.0, sinks=sinks)
    for own, (k, v), got in zip(q, stored, out, strict=True):
        np.testing.assert_allclose(got, formula(own, k, v, 0.2, 2.0, sinks)[:, 0], rtol=2e-3, atol=2e-3)


def test_a_sink_takes_its_share_from_chosen_and_left_out_alike(make, shape, filled):
    """Few tokens chosen, a sink that is far below: as without it; far above: nothing is left."""
    engine = make("cpu", True, PAGE)
    numbers, _ = filled(engine, shape, [139])
    q, sinks = draw(shape, 1, 1)
    plain, low, high = (
        engine.attend(1, numbers, q[:, :, 0], sinks=one)
        for one in (None, np.full_like(sinks, -80), np.full_like(sinks, 300))
    )
    np.testing.assert_allclose(low, plain, rtol=1e-6, atol=1e-6)
    assert np.abs(high).max() < 1e-6


def test_what_cannot_be_is_an_error(make, shape, filled):
    engine, device = make("cpu", True, PAGE), make("model", True, PAGE)
    for each in (engine, device):
        numbers, _ = filled(each, shape, [3])
        with pytest.raises(ShapeError, match=r"at most the 3 tokens that .*sequence.* has, not 4"):
            each.attend(1, numbers, draw(shape, 4, 1)[0])
    q, sinks = draw(shape, 1, 1)
    for options in ({"softcap": 2.0}, {"sinks": sinks}):
        with pytest.raises(UnsupportedError, match="must be without softcap and sinks, which its kernel has not"):
            device.attend(1, numbers, q[:, :, 0], **options)
    device.close()


def test_a_part_without_tokens_changes_nothing():
    q = torch.randn(1, 2, 1, 4)
    softmax, none = OnlineSoftmax(q, 2, None, None), torch.zeros(1, 0, 4)
    k, v = torch.randn(2, 1, 2, 4)
    softmax.add(none, none, 0)
    softmax.add(k, v, 0)
    softmax.add(none, none, 2)
    np.testing.assert_allclose(softmax.result()[0], formula(q[0].numpy()[None], k.numpy(), v.numpy(), 1.0)[0],
                               rtol=1e-5, atol=1e-5)  # fmt: skip
