from dataclasses import replace

import pytest

from nearflash.abi.errors import PlanError
from nearflash.planning.shapes import LayerShape, Linear, bytes_of, from_config

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
GQA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 96}
MOE = {**GQA, "num_local_experts": 8, "num_experts_per_tok": 2}
OPT = {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 64}


def test_experts_read_by_more_tokens_saturate():
    layer = LayerShape((Linear("attention.q", 4, 4), Linear("mlp.experts.up", 2, 4, 8)), 0, 8, 2)
    assert layer.distinct_experts(1) == 2
    assert layer.distinct_experts(2) == pytest.approx(8 * (1 - 0.75**2))
    assert layer.distinct_experts(1000) == pytest.approx(8)
    assert layer.read_parameters(1) == 16 + 2 * 8 and layer.parameters == 16 + 8 * 8


def test_four_bits_cost_four_and_a_half():
    assert bytes_of(128, 16, 2) == 256 and bytes_of(128, 16, 4) == 512 and bytes_of(128, 4, 4) == 72
    shape = from_config(OPT)
    sixteen, four = shape.layer_bytes(), shape.layer_bytes(4)
    vectors = 4 * 64 * 2
    assert four[0] - vectors == pytest.approx((sixteen[0] - vectors) * 4.5 / 16)


def test_a_model_in_fp32_has_twice_the_bytes():
    """It was planned as fp16: peaks came out at half of what the run took."""
    half = from_config(OPT)
    whole = replace(half, element_bytes=4)
    assert whole.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    assert whole.weight_bytes()[0] == 2 * half.weight_bytes()[0]


def test_equal_layers_are_counted_once():
    routed, dense = from_config(MOE).layers[0], from_config(GQA).layers[0]
    shape = replace(from_config(MOE), layers=(routed, dense, routed))
    assert [number for _, number in shape.kinds] == [2, 1]
    assert shape.weight_bytes() == (sum(shape.layer_bytes()), max(shape.layer_bytes()))
    total, largest = shape.weight_bytes(4, 0.5)
    assert 0.4 < total / sum(shape.layer_bytes(4)) < 0.6 and largest < max(shape.layer_bytes(4))


def test_a_shape_has_a_digest_of_its_own():
    shape = from_config(OPT)
    assert shape.digest() == from_config(OPT).digest() and len(shape.digest()) == 64
    assert shape.digest() != from_config({**OPT, "ffn_dim": 128}).digest()


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_experts_per_tok"])
def test_tables_without_a_key_are_refused(key):
    with pytest.raises(PlanError, match=f"a model's table must have {key}"):
        from_config({name: value for name, value in MOE.items() if name != key})
