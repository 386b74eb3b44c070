import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.attention import NAME, attach, near_storage_attention
from nearflash.inference.cache.cache import NearflashCache


def test_both_registries_have_the_name():
    assert NAME in AttentionInterface() and NAME in AttentionMaskInterface()
    assert not any(word in NAME for word in ("flash", "sdpa", "flex_attention", "/", "|"))


def test_without_a_nearflash_cache_it_is_sdpa(make_model):
    model = make_model()
    ids, mask = torch.arange(2, 14).reshape(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
        model.set_attn_implementation("sdpa")
        assert torch.equal(ours, model(ids, attention_mask=mask).logits)


def test_prefill_is_causal(make_model, make_engine):
    """What a later token is changes nothing before it."""
    model = make_model()
    ids = torch.arange(2, 14).reshape(2, 6)
    other = ids.clone()
    other[:, -1] += 1
    with torch.no_grad():
        one, two = (model(x, past_key_values=NearflashCache(make_engine(2))).logits for x in (ids, other))
    assert torch.equal(one[:, :-1], two[:, :-1]) and not torch.equal(one[:, -1], two[:, -1])


def test_attention_of_another_kind_is_refused(make_model, make_engine):
    model = make_model()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="must be causal, without position_bias"):
        model(torch.tensor([[1, 2]]), past_key_values=NearflashCache(make_engine(2)), position_bias=3)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_softcap_and_sinks_are_the_formula(new, masked):
    """Against a loop over heads and tokens in double precision."""
    draw = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(2, heads, tokens, 8, generator=draw) for heads, tokens in ((4, new), (2, 6), (2, 6))
    )
    sinks, hidden = torch.randn(4, generator=draw), torch.zeros(2, 1, new, 6, dtype=torch.bool)
    hidden[1, :, :, :2] = masked
    causal = torch.arange(6) > torch.arange(6 - new, 6)[:, None]
    mask = ~(hidden | causal) if masked else None
    out, _ = near_storage_attention(torch.nn.Module(), query, key, value, mask, 0.4, softcap=1.5, s_aux=sinks)
    for row, head, token in ((r, h, t) for r in range(2) for h in range(4) for t in range(new)):
        seen = ~(causal[token] | hidden[row, 0, token])
        logits = 1.5 * torch.tanh(query[row, head, token].double() @ key[row, head // 2][seen].double().T * 0.4 / 1.5)
        weights = torch.cat([logits, sinks[head : head + 1].double()]).softmax(0)[:-1]
        torch.testing.assert_close(out[row, token, head].double(), weights @ value[row, head // 2][seen].double(),
                                   rtol=1e-5, atol=1e-6)  # fmt: skip


def test_a_compiled_model_is_not_attached(make_model):
    with pytest.raises(UnsupportedError, match=r"model must be attached before torch\.compile"):
        attach(torch.compile(make_model()))
