import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import UnsupportedError
from nearflash.bench.inference.settings import by_policy
from nearflash.inference.cache.predicted import predict_queries
from nearflash.inference.calibration.window import Prefix
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.kv import KvLayout

DENSE = by_policy(AttentionPolicy(), KvLayout(16, False, 32, IndexFormat.INT8, 4096), 16)


def test_queries_are_those_of_the_layer_before_by_the_next_ones_projection(tiny_model):
    ids = torch.randint(97, (30,), generator=torch.Generator().manual_seed(2))
    found = {}

    def attend(given):
        found.setdefault(given.layer, given.predicted)
        return DENSE.attend(given)

    prefix = Prefix(tiny_model, ids[:-4], history=False)
    predicted, _ = prefix.logits(ids[-4:], attend, predicts=True)
    assert torch.equal(predicted, prefix.logits(ids[-4:], DENSE.attend)[0])  # nothing else is changed
    first, second = tiny_model.model.layers
    with torch.no_grad():
        states = first.input_layernorm(tiny_model.model.embed_tokens(ids[None, -4:]))
        q = second.self_attn.q_proj(states).view(1, 4, 4, 16).transpose(1, 2)
        rotation = tiny_model.model.rotary_emb(states, torch.arange(26, 30)[None])
        expected, _ = apply_rotary_pos_emb(q, q, *rotation)
    assert found[0] is None
    torch.testing.assert_close(found[1], expected[0])
    prefix.logits(ids[-4:], attend)
    assert not second.self_attn._forward_pre_hooks


def test_layers_without_such_an_attention_are_rejected():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    with pytest.raises(UnsupportedError, match="layers must have their attention as self_attn"), predict_queries(model):
        pass
