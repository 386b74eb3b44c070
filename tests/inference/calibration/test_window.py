"""The window of a tiny model: dense attention is the model's own, later layers see what earlier ones made."""

import pytest
import torch

from nearflash.abi.attention.pages import IndexFormat
from nearflash.bench.inference.settings import BASELINES, baseline, by_policy
from nearflash.inference.calibration.window import NAME, FlashUse, Prefix
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

LAYOUT = KvLayout(16, False, 32, IndexFormat.INT8, 4096)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(97, (150,), generator=torch.Generator().manual_seed(6))


def test_dense_is_the_models_own_attention(tiny_model, ids):
    with torch.no_grad():
        own = tiny_model(ids[None]).logits[0, -20:]
    prefix, dense = Prefix(tiny_model, ids[:-20]), by_policy(AttentionPolicy(), LAYOUT, 16)
    logits, use = prefix.logits(ids[-20:], dense.attend)
    torch.testing.assert_close(logits, own, atol=2e-3, rtol=0)  # K and V are fp16
    loss, again = prefix.loss(ids[-20:], dense.attend)
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(own[:-1], ids[-19:])), abs=1e-3)
    assert again == use and use.index == use.suffix == 0 and 1 <= use.gather + use.memory < 1.2  # whole codewords


@pytest.mark.parametrize("mode", ["sparf", "sparf-page"])
def test_a_window_is_the_same_token_by_token(tiny_model, ids, mode):
    setting = by_policy(AttentionPolicy(mode, score_dims=4, top_k=0.25, local_window=8), LAYOUT, 16)
    prefix = Prefix(tiny_model, ids[:-6])
    together, _ = prefix.logits(ids[-6:], setting.attend)
    alone, _ = prefix.logits(ids[-6:-3], setting.attend)
    torch.testing.assert_close(together[:3], alone, atol=1e-4, rtol=0)
    dense, _ = prefix.logits(ids[-6:], by_policy(AttentionPolicy(), LAYOUT, 16).attend)
    assert (together - dense).abs().max() > 1e-4


@pytest.mark.parametrize("mode", BASELINES)
def test_a_baseline_with_all_tokens_is_dense(tiny_model, ids, mode):
    prefix, dense = Prefix(tiny_model, ids[:-6]), by_policy(AttentionPolicy(), LAYOUT, 16)
    every, use = prefix.logits(ids[-6:], baseline(mode, 1.2).attend)
    torch.testing.assert_close(every, prefix.logits(ids[-6:], dense.attend)[0], atol=2e-3, rtol=0)
    # Pages have bounds, 1/16 of them; all of it is after the last block of 1,024 tokens.
    assert use.all == 0 and use.memory == pytest.approx(1 + (mode == "quest") / 16)
    _, less = prefix.logits(ids[-6:], baseline(mode, 0.25).attend)
    assert 0.1 < less.memory < 0.4


@pytest.fixture(scope="module")
def mixed_model():
    """A random model of four layers: sliding windows of 16 tokens and full attention in turns."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(7)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=16, layer_types=kinds,
        attn_implementation=NAME,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("history", [True, False])
def test_a_model_with_sliding_windows_goes_back_to_its_prefix(mixed_model, ids, history):
    """Once `nearflash calibrate` ended in a traceback: windows of K and V cannot be cropped."""
    with torch.no_grad():
        own = mixed_model(ids[None]).logits[0, -20:]
    prefix, dense = Prefix(mixed_model, ids[:-20], history=history), by_policy(AttentionPolicy(), LAYOUT, 16)
    first, _ = prefix.logits(ids[-20:], dense.attend, gradients=True)
    again, _ = prefix.logits(ids[-20:], dense.attend)
    torch.testing.assert_close(first, own, atol=2e-3, rtol=0)
    assert torch.equal(first, again)


def test_means_of_flash_use():
    use = FlashUse.mean([FlashUse(0.1, 0.2, 0.3, 0.4, 0.7), FlashUse(0.3, 0.2, 0.1, 0.2, 0.9)])
    assert (use.index, use.suffix, use.gather, use.memory, use.pages) == pytest.approx((0.2, 0.2, 0.2, 0.3, 0.8))
    assert use.all == pytest.approx(0.6)
