import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, MistralConfig, MistralForCausalLM

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.attention import NAME, attach
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


@pytest.mark.parametrize("option", ["softcap", "sliding_window", "s_aux", "position_bias"])
def test_attention_of_another_kind_is_refused(make_model, make_engine, option):
    model = make_model()
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match=f"attention near storage must be causal, without {option}"),
    ):
        model(torch.tensor([[1, 2]]), past_key_values=NearflashCache(make_engine(2)), **{option: 3})


def test_models_of_another_kind_are_not_attached():
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(
        UnsupportedError, match="full attention in every layer, not 'mistral' with full_attention, window 8"
    ):
        attach(MistralForCausalLM(config))


def test_a_compiled_model_is_not_attached(make_model):
    with pytest.raises(UnsupportedError, match=r"model must be attached before torch\.compile"):
        attach(torch.compile(make_model()))
