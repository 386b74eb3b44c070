"""Generation by policy kvswap: queries that the layer before predicts, their groups, and what is rejected."""

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.inference import NearflashCache, attach
from nearflash.inference.generate import generate
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import open_engine

LONG = ["Water", "In the spring the river rose above the lower town, and the council met again. " * 20]
QUARTER = AttentionPolicy("kvswap", score_dims=0.25, top_k=0.25, local_window=16)
INDEX_BYTES = 2 * 6 * (2 * 32) * (2 * 450 + 4 * 2 * 128)
"""Of two sequences; no KV page groups are kept beside it."""


@pytest.fixture
def open_with(doclm):
    def open_one(policy, **options):
        return open_engine(kv_shape(doclm), policy, tokens=450, sequences=2, **{"cache_bytes": INDEX_BYTES} | options)

    return open_one


def test_everything_is_dense_and_less_reads_less(doclm, tokenizer, open_with):
    done = []
    for policy in (AttentionPolicy(), AttentionPolicy("kvswap", top_k=1.0), QUARTER):
        with open_with(policy) as engine:
            done.append(generate(doclm, tokenizer, LONG, engine, max_new_tokens=4))
    dense, every, less = done
    assert every.tokens == dense.tokens
    assert 0 < less.counters.flash_bytes["token"] < 0.8 * every.counters.flash_bytes["token"]


def test_reads_ahead_change_no_token(doclm, tokenizer):
    policy = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=16)
    done, options = [], {"tokens": 450, "sequences": 2, "cache_bytes": 1_600_000}
    for read_ahead in (False, True):
        with open_engine(kv_shape(doclm), policy, read_ahead=read_ahead, **options) as engine:
            done.append(generate(doclm, tokenizer, LONG, engine, max_new_tokens=4))
    assert done[0].tokens == done[1].tokens
    without, ahead = (each.counters.flash_bytes["token"] for each in done)
    assert without < ahead < 2 * without  # the index is in memory, KV page groups have no room there


def test_predictions_are_those_of_the_layer_before(doclm, tokenizer, open_with, monkeypatch):
    """Of every layer but the first, in every step of decode; nothing else is changed by them."""
    given, begun, ids = {}, [], torch.tensor([tokenizer.encode(LONG[1])[:40]])
    with open_with(QUARTER) as engine, NearflashCache(engine, doclm.config) as cache:
        attend = engine.attend
        monkeypatch.setattr(engine, "predict", lambda layer, sequences, q: given.update({layer: q}))
        monkeypatch.setattr(
            engine,
            "attend",
            lambda layer, *rest, **more: (begun.append((layer, len(given))), attend(layer, *rest, **more))[1],
        )
        model = attach(attach(doclm))
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
            assert not given
            states = model(ids[:, -1:], past_key_values=cache, output_hidden_states=True).hidden_states
    layers = doclm.model.layers
    assert sorted(given) == list(range(1, len(layers)))
    assert begun == [(layer, min(layer + 1, len(layers) - 1)) for layer in range(len(layers))]  # a layer early
    attention = layers[2].self_attn
    assert len(attention._forward_pre_hooks) == 1
    with torch.no_grad():
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q = attention.q_proj(layers[1].input_layernorm(states[1])).view(1, 1, -1, attention.head_dim).transpose(1, 2)
        rotation = doclm.model.rotary_emb(states[1], torch.tensor([[39]]))
        expected = apply_rotary_pos_emb(q, q, *rotation)[0]
    np.testing.assert_allclose(given[2].reshape(-1), expected.reshape(-1).numpy(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_named(doclm, tokenizer, open_with, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    for place in ({"device": "model:attend-tiny"}, {"path": [tmp_path / "a", tmp_path / "b"]}, {"num_devices": 2}):
        with pytest.raises(UnsupportedError, match="attention kvswap must be on device cpu, with one file"):
            open_with(QUARTER, **place)
    with pytest.raises(UnsupportedError, match="read_ahead must be on device cpu, with one file, not on model:attend"):
        open_with(AttentionPolicy(), device="model:attend-tiny", read_ahead=True)
    with pytest.raises(CommandError, match=r"cache_bytes must be \d+ at least, for the index of policy kvswap, not 9"):
        open_with(QUARTER, cache_bytes=9)
    assert not [*tmp_path.iterdir()]
    other = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2))
    with (
        open_engine(kv_shape(other), QUARTER, tokens=64, sequences=1, cache_bytes=1 << 20) as engine,
        pytest.raises(UnsupportedError, match="layers must have their attention as self_attn"),
    ):
        generate(other, tokenizer, LONG[:1], engine, max_new_tokens=2)
