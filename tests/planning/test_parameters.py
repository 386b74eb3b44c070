"""Shapes from names and sizes of parameters, without any library of models."""

from dataclasses import replace

import pytest

from nearflash.abi.errors import PlanError
from nearflash.planning.parameters import ForwardPass, LayerPass, from_parameters

FORWARD = ForwardPass("model.layers", (LayerPass(kv=16),) * 2, "model.embed.weight", "model.embed.weight", hidden=8,
                      heads=2, kv_heads=2, head_dim=4, max_tokens=128, element_bytes=2)  # fmt: skip
LAYER = {"attn.qkv.weight": (24, 8), "attn.qkv.bias": (24,), "attn.o.weight": (8, 8), "mlp.up.weight": (16, 8),
         "mlp.down.weight": (8, 16), "norm.weight": (8,)}  # fmt: skip


def model(layer=LAYER, count=2, prefix="model.layers", **outside):
    inside = {f"{prefix}.{at}.{name}": shape for at in range(count) for name, shape in layer.items()}
    return {"model.embed.weight": (50, 8), **inside, "model.norm.weight": (8,), **outside}


def test_matrices_and_vectors_are_told_apart_by_their_dimensions():
    shape = from_parameters(model(), FORWARD)
    assert [(each.name, each.rows, each.columns) for each in shape.layers[0].linears] == [
        ("attn.qkv.weight", 24, 8), ("attn.o.weight", 8, 8), ("mlp.up.weight", 16, 8), ("mlp.down.weight", 8, 16),
    ]  # fmt: skip
    assert shape.layers[0].vectors == 24 + 8 and shape.vectors == 8
    assert shape.embedding == shape.head == 400 and shape.tied


def test_a_head_of_its_own_is_not_tied():
    shape = from_parameters(model(**{"lm_head.weight": (50, 8)}), replace(FORWARD, head="lm_head.weight"))
    assert not shape.tied and shape.head == shape.embedding == 400 and shape.outside == 808


def test_positions_count_with_the_embedding():
    shape = from_parameters(model(**{"model.positions.weight": (32, 8)}), FORWARD)
    assert shape.embedding == 400 + 256 and shape.head == 400


def test_another_list_of_layers_lies_outside():
    """A vision tower has numbered layers, too: fewer, or smaller ones."""
    tower = {f"vision.blocks.{at}.w.weight": (8, 8) for at in range(2)}
    shape = from_parameters(model(**tower), FORWARD)
    assert shape.layers[0].parameters == 24 * 8 + 64 + 2 * 128 + 32
    assert shape.parameters == 2 * shape.layers[0].parameters + 400 + 8 + 2 * 64


def test_layers_at_the_top_level_have_no_prefix():
    shape = from_parameters(model(prefix="h"), replace(FORWARD, prefix="h"))
    assert len(shape.layers) == 2 and shape.layers[1] == shape.layers[0]


@pytest.mark.parametrize("kept", ["together", "apart", "below each other"])
def test_experts_count_once_each_with_their_biases(kept):
    forward = replace(FORWARD, layers=(LayerPass(experts=4, experts_per_token=2),) * 2)
    router = {"mlp.router.weight": (4, 8), "attn.o.weight": (8, 8)}
    if kept == "together":
        experts = {"mlp.experts.up": (4, 8, 16), "mlp.experts.up_bias": (4, 16), "mlp.experts.down": (4, 16, 8)}
    elif kept == "below each other":
        experts = {
            "mlp.experts.mlp.up": (4 * 16, 8),
            "mlp.experts.mlp.up_bias": (4, 16),
            "mlp.experts.mlp.down": (4 * 8, 16),
        }
    else:
        one = {"up.weight": (16, 8), "up.bias": (16,), "down.weight": (8, 16)}
        experts = {f"mlp.experts.{at}.{name}": size for at in range(4) for name, size in one.items()}
    shape = from_parameters(model({**router, **experts}), forward)
    layer = shape.layers[0]
    assert (layer.experts, layer.experts_per_token) == (4, 2)
    assert layer.expert_vectors == 16 and layer.expert == 2 * 128 + 16 and layer.shared == 32 + 64
    assert layer.active_parameters == 96 + 2 * 272 and layer.parameters == 96 + 4 * 272


def test_experts_that_are_not_as_many_are_refused():
    forward = replace(FORWARD, layers=(LayerPass(experts=4, experts_per_token=2),) * 2)
    with pytest.raises(PlanError, match="must have 4 experts in its first dimension, not 6"):
        from_parameters(model({"mlp.experts.up": (6, 8, 16)}), forward)


def test_a_dense_layer_between_has_no_experts():
    forward = replace(FORWARD, layers=(LayerPass(), LayerPass(experts=4, experts_per_token=1)))
    parameters = model({"attn.o.weight": (8, 8)})
    parameters |= {"model.layers.0.mlp.up.weight": (16, 8), "model.layers.1.mlp.experts.up": (4, 8, 16)}
    shape = from_parameters(parameters, forward)
    assert [layer.experts for layer in shape.layers] == [0, 4]
    assert [layer.parameters for layer in shape.layers] == [64 + 128, 64 + 4 * 128]
    assert len(shape.kinds) == 2
