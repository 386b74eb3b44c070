"""Generation by GpuEngine, on a GPU or under Triton's interpreter: the model's tensors go to it and come back."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, NonFiniteError, UnsupportedError
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.cache.masks import Columns
from nearflash.inference.engines.gpu.engine import GpuEngine
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import check_gpu, open_engine
from nearflash.storage.kv import KvLayout

POLICY = AttentionPolicy("sparf-page", score_dims=0.5, top_k=3, local_window=4)
LAYOUT = KvLayout(8, True, 64, IndexFormat.INT4, 4096)


@pytest.fixture
def on_gpu(doclm, gpu):
    """doclm there; the other tests' stays where it is."""
    return copy.deepcopy(doclm).to(gpu)


def opened(doclm, gpu, policy=POLICY):
    """An engine on a temporary file; the CPU's, or with a GPU one for tensors."""
    cpu = open_engine(kv_shape(doclm), policy, tokens=300, sequences=2, layout=LAYOUT, suffix_bytes=0)
    return GpuEngine(cpu.store, policy, gpu, page_cache_bytes=1 << 20) if gpu else cpu


@pytest.mark.parametrize(
    "policy", [AttentionPolicy(), pytest.param(POLICY, marks=pytest.mark.full)], ids=["dense", "page"]
)
def test_the_tokens_are_those_of_the_cpus_engine(doclm, on_gpu, gpu, tokenizer, policy):
    texts = ["The committee met in the spring of that year. " * 2, "Water"]
    ids = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    tokens = []
    for model, device in ((doclm, ""), (on_gpu, gpu)):
        with opened(model, device, policy) as engine, NearflashCache(engine, model.config) as cache:
            out = model.generate(
                **ids.to(model.device), past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0
            )
            assert engine.counters.flash_bytes["token"]
            assert engine.torch_device == (torch.empty(0, device=device).device if device else None)
        tokens.append(out.tolist())
    assert tokens[0] == tokens[1]


def test_masks_over_stored_tokens_are_read(doclm, on_gpu, gpu):
    ids = torch.arange(5, 29).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 3:7] = 0
    found = []
    for model, device in ((doclm, ""), (on_gpu, gpu)):
        with opened(model, device) as engine, NearflashCache(engine, model.config) as cache, torch.no_grad():
            model(ids[:, :9].to(model.device), past_key_values=cache)
            new, seen = ids[:, 9:].to(model.device), mask.to(model.device)
            found.append(model(new, attention_mask=seen, past_key_values=cache).logits.cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_a_query_that_fp16_cannot_hold_is_named(on_gpu, gpu):
    with opened(on_gpu, gpu) as engine, NearflashCache(engine, on_gpu.config) as cache:
        ids = torch.ones(1, 9, dtype=torch.int64, device=gpu)
        with torch.no_grad():
            on_gpu(ids, past_key_values=cache)
            key = torch.zeros(1, on_gpu.config.num_key_value_heads, 1, on_gpu.config.head_dim, device=gpu)
            layer = cache.layers[0]
            tokens, _ = layer.update(key, key)
            query = torch.full((1, on_gpu.config.num_attention_heads, 1, on_gpu.config.head_dim), 1e6, device=gpu)
            with pytest.raises(NonFiniteError, match="query of layer 0 must be finite in fp16"):
                tokens.attend(query, Columns(None), None, None, None)


def test_without_a_gpu_the_device_is_an_error(doclm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = kv_shape(doclm)
    with pytest.raises(UnsupportedError, match="GPU that torch can use; it finds none"):
        open_engine(shape, AttentionPolicy(), tokens=10, sequences=1, device="cuda")
    with pytest.raises(CommandError, match="nand_block_pages must be 0"):
        open_engine(shape, AttentionPolicy(), tokens=10, sequences=1, device="cuda:1", nand_block_pages=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_gpu("cuda")
    check_gpu("cuda:0")
    for name in ("cuda:1", "cuda:x", "cuda:-1"):
        with pytest.raises(UnsupportedError, match=f"device '{name}' must be a GPU that torch can use; it finds 1"):
            check_gpu(name)
    with open_engine(shape, AttentionPolicy(), tokens=10, sequences=1) as engine:
        with pytest.raises(UnsupportedError, match="takes tensors, not cpu"):
            engine.attend_tensor(0, [], torch.zeros(1))
