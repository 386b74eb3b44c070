import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers

from nearflash.abi.errors import CommandError, NonFiniteError, UnsupportedError
from nearflash.weights.layers import layer_matrices, layers_with_matrices
from nearflash.weights.prune import METHODS, prune

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, max_position_embeddings=64)
CONFIGS = {
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64),
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2),
    "qwen": lambda: transformers.Qwen2Config(**SIZES, intermediate_size=96, num_key_value_heads=2),
}
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 100, (6, 40)))


def made(name="llama", dtype=torch.float32):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    return model.eval()


def weights_of(model):
    return {name: matrix.weight.detach().clone() for layer in layers_with_matrices(model)
            for name, matrix in layer_matrices(model, layer).items()}  # fmt: skip


def first_inputs(model):
    """Inputs (tokens, features) of the first layer's linear layers."""
    seen, hooks = {}, []
    for name in layer_matrices(model, layers_with_matrices(model)[0]):
        parts, module = seen.setdefault(name, []), model.get_submodule(name.removesuffix(".weight"))
        hooks.append(
            module.register_forward_pre_hook(lambda _, given, parts=parts: parts.append(given[0].flatten(0, 1)))
        )
    with torch.no_grad():
        for row in TOKENS:
            model(row[None])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_keeps_its_share(name, method, dtype):
    model = made(name, dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    layers = list(prune(model, TOKENS, method=method, sparsity=0.25))
    after = model.state_dict()
    assert [layer.name for layer in layers] == list(weights_of(model))
    for layer in layers:
        weight = after[layer.name]
        assert layer.density == pytest.approx(0.75) and layer.seconds >= 0
        if method != "sparsegpt":  # which keeps the share of all rows together
            assert ((weight != 0).float().mean(1) == 0.75).all()
    others = before.keys() - {layer.name for layer in layers}
    assert others and all(torch.equal(before[key], after[key]) for key in others)


@pytest.mark.parametrize("method", METHODS)
def test_two_of_four(method):
    model = made()
    for layer in prune(model, TOKENS, method=method, pattern=(2, 4)):
        weight = model.state_dict()[layer.name]
        assert ((weight.reshape(-1, 4) != 0).sum(1) == 2).all()


def test_wanda_is_the_weight_times_the_norm_of_its_input():
    model = made()
    dense, inputs = weights_of(model), first_inputs(model)
    list(prune(model, TOKENS, method="wanda"))
    for name, module in layer_matrices(model, layers_with_matrices(model)[0]).items():
        scores = dense[name].abs() * inputs[name].norm(dim=0)
        for row, kept, score in zip(dense[name], module.weight, scores, strict=True):
            lowest = score.argsort()[: len(row) // 2]
            expected = row.clone()
            expected[lowest] = 0
            assert torch.equal(kept.detach(), expected)


def test_later_layers_see_what_the_pruned_ones_before_them_give():
    model, other = made(), made()
    list(prune(model, TOKENS, method="wanda"))
    with torch.no_grad():
        for name, module in layer_matrices(other, layers_with_matrices(other)[0]).items():
            module.weight.copy_(model.get_parameter(name))
    # the first layer is pruned already: pruning keeps it, and the second one's inputs are the same
    list(prune(other, TOKENS, method="wanda"))
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, weights_of(other)[name])


def errors(model, dense, inputs):
    return sum(float((inputs[name] @ (module.weight.detach() - dense[name]).T).square().sum())
               for name, module in layer_matrices(model, layers_with_matrices(model)[0]).items())  # fmt: skip


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_each_method_loses_less_than_the_simpler_one(pattern):
    found = {}
    for method in METHODS:
        model = made()
        dense, inputs = weights_of(model), first_inputs(model)
        list(prune(model, TOKENS, method=method, pattern=pattern))
        found[method] = errors(model, dense, inputs)
    assert found["sparsegpt"] < 0.9 * found["wanda"] and found["wanda"] <= found["magnitude"]


def naive_surgeon(weight, inputs, pruned):
    """Column by column, each time with the inverse of what remains of the Hessian, in fp64 (OBS, Hassibi 1993)."""
    weight = weight.double().clone()
    hessian = inputs.double().T @ inputs.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    for column in range(weight.shape[1]):
        inverse = torch.linalg.inv(hessian[column:, column:])
        error = torch.where(pruned[:, column], weight[:, column], 0) / inverse[0, 0]
        weight[:, column:] -= error[:, None] * inverse[0]
        weight[pruned[:, column], column] = 0
    return weight


def test_sparsegpt_makes_up_for_each_column_with_those_behind_it():
    model = made()
    dense, inputs = weights_of(model), first_inputs(model)
    list(prune(model, TOKENS, method="sparsegpt"))
    for name, module in layer_matrices(model, layers_with_matrices(model)[0]).items():
        expected = naive_surgeon(dense[name], inputs[name], module.weight == 0)
        torch.testing.assert_close(module.weight.detach().double(), expected, rtol=1e-3, atol=1e-4)


def test_an_input_that_is_never_used_is_pruned_first():
    model = made()
    with torch.no_grad():
        for layer in layers_with_matrices(model):
            layer.input_layernorm.weight[5] = 0
    list(prune(model, TOKENS, method="sparsegpt"))
    assert (layers_with_matrices(model)[0].self_attn.q_proj.weight[:, 5] == 0).all()


def test_stopping_early_leaves_the_model_as_it_was_used():
    model = made().train()
    model.get_decoder().layers[0].eval()
    modes = [module.training for module in model.modules()]
    layers = prune(model, TOKENS)
    next(layers)
    layers.close()
    assert model.training and [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS, {"method": "best"}, "method must be one of wanda, sparsegpt, magnitude, not 'best'"),
        (TOKENS, {"sparsity": 0}, "sparsity must be above 0 and below 1, not 0"),
        (TOKENS, {"sparsity": 1.0}, "not 1.0"),
        (TOKENS, {"pattern": (4, 4)}, "pattern must be n of m with 0 < n < m, not 4 of 4"),
        (TOKENS, {"pattern": (2, 5)}, "pattern 2 of 5 must divide the 64 inputs of model.layers.0"),
        (None, {}, r"tokens must have the shape \(sequences, length\) for the method wanda"),
        (TOKENS[0], {}, "tokens must have the shape"),
        (TOKENS[:0], {"method": "sparsegpt"}, "tokens must have the shape"),
        (TOKENS + 90, {}, "tokens must be of the model's vocabulary of 100"),
    ],
)
def test_bad_options_change_nothing(tokens, options, message):
    model = made()
    before = weights_of(model)
    with pytest.raises(CommandError, match=message):
        prune(model, tokens, **options)
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(model).items())


def test_weights_whose_inputs_come_first():
    """GPT-2's layers are transformers' Conv1D, whose weights are (inputs, outputs)."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100, initializer_range=0.3)
    model = transformers.GPT2LMHeadModel(config).eval()
    dense, inputs = weights_of(model), first_inputs(model)
    assert len(dense) == 8 and dense["transformer.h.0.attn.c_attn.weight"].shape == (64, 192)
    list(prune(model, TOKENS, method="wanda"))
    for name, matrix in layer_matrices(model, layers_with_matrices(model)[0]).items():
        scores = dense[name].abs() * inputs[name].norm(dim=0)[:, None]
        lowest = scores.argsort(dim=0)[: scores.shape[0] // 2]
        assert torch.equal(matrix.weight.detach(), dense[name].scatter(0, lowest, 0))


def naive_expert_inputs(model, layer):
    """For each expert of Mixtral's first layer, what comes to its two matrices, by its router's choice."""
    experts = layer.mlp.experts
    found = {}

    def see(_, given):
        hidden, chosen, _ = given
        for number in range(8):
            rows = hidden[(chosen == number).any(1)]
            gate, up = (rows @ experts.gate_up_proj[number].T).chunk(2, dim=-1)
            found.setdefault((number, "gate_up_proj"), []).append(rows)
            found.setdefault((number, "down_proj"), []).append(torch.nn.functional.silu(gate) * up)

    hook = experts.register_forward_pre_hook(see)
    with torch.no_grad():
        for row in TOKENS:
            model(row[None])
    hook.remove()
    return {key: torch.cat(parts) for key, parts in found.items()}


@pytest.fixture
def mixture():
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=8,
                                        num_experts_per_tok=2, initializer_range=0.3)  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def test_each_expert_is_pruned_by_what_comes_to_it(mixture):
    model = mixture
    inputs = naive_expert_inputs(model, model.model.layers[0])
    dense = weights_of(model)
    assert [len(inputs[number, "down_proj"]) > 0 for number in range(8)] == [True] * 8
    list(prune(model, TOKENS, method="wanda"))
    for (number, leaf), rows in inputs.items():
        name = f"model.layers.0.mlp.experts.{leaf}"
        scores = dense[name][number].abs() * rows.norm(dim=0)
        lowest = scores.argsort(dim=1)[:, : scores.shape[1] // 2]
        assert torch.equal(model.get_parameter(name)[number].detach(), dense[name][number].scatter(1, lowest, 0))


@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_experts_keep_their_share(mixture, method):
    layers = {layer.name: layer.density for layer in prune(mixture, TOKENS, method=method)}
    assert [name for name in layers if "experts" in name] and not any("gate.weight" in name for name in layers)
    assert list(layers.values()) == [pytest.approx(0.5)] * len(layers)
    assert mixture.config._experts_implementation != "eager"  # as it was


def test_experts_whose_inputs_come_first():
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=16,
                                       num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3)  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    names = [layer.name for layer in prune(model, TOKENS, pattern=(2, 4))]
    experts = [name for name in names if "experts" in name]
    assert [name.rpartition(".")[2] for name in experts] == ["gate_up_proj", "down_proj"] * 2
    for name in experts:
        weight = model.get_parameter(name).transpose(1, 2)
        assert ((weight.reshape(-1, 4) != 0).sum(1) == 2).all()


def test_models_without_matrices():
    model = made()
    for layer in model.model.layers:
        layer.self_attn = layer.mlp = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="must have decoder layers with linear layers, not LlamaForCausalLM"):
        prune(model, TOKENS)


def test_a_layer_that_is_used_twice_is_named():
    model = made()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedError, match="must be modules of their own: LlamaForCausalLM uses one twice"):
        prune(model, TOKENS)


def test_activations_that_are_not_finite_are_named():
    model = made()
    with torch.no_grad():
        layers_with_matrices(model)[1].self_attn.v_proj.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"inputs of model.layers.1.self_attn.o_proj must be finite"):
        list(prune(model, TOKENS))
