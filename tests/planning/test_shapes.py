import re
from math import prod

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from nearflash.abi.errors import PlanError  # noqa: E402
from nearflash.planning.parameters import from_parameters  # noqa: E402
from nearflash.planning.shapes import LayerShape, Linear, bytes_of, from_config  # noqa: E402

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
GQA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 96}
MOE = {**GQA, "num_experts_per_tok": 2}
#: Configuration class and settings; full-size ones where the class's defaults are a real model.
FAMILIES = {
    "llama": ("LlamaConfig", {**GQA, "attention_bias": True, "tie_word_embeddings": True}),
    "llama-full": ("LlamaConfig", {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                                   "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}),
    "qwen2": ("Qwen2Config", GQA),
    "qwen3": ("Qwen3Config", {**GQA, "head_dim": 32}),
    "mistral": ("MistralConfig", GQA),
    "mixtral": ("MixtralConfig", {**MOE, "num_local_experts": 8}),
    "mixtral-full": ("MixtralConfig", {}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen2-moe": ("Qwen2MoeConfig", {**MOE, "num_experts": 6, "moe_intermediate_size": 48,
                                     "shared_expert_intermediate_size": 80}),
    "gpt-oss": ("GptOssConfig", {**MOE, "num_local_experts": 8, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**GQA, "head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GQA, "head_dim": 32}),
    "gemma3": ("Gemma3TextConfig", {**GQA, "head_dim": 32}),
    "phi": ("PhiConfig", GQA),
    "phi3": ("Phi3Config", {**GQA, "pad_token_id": 0}),
    "opt": ("OPTConfig", {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 64}),
    "opt-projected": ("OPTConfig", {**SMALL, "ffn_dim": 256, "word_embed_proj_dim": 32}),
    "gpt-neox": ("GPTNeoXConfig", {**SMALL, "intermediate_size": 256}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000}),
    "stablelm": ("StableLmConfig", GQA),
    "starcoder2": ("Starcoder2Config", GQA),
    "olmo2": ("Olmo2Config", GQA),
    "granite": ("GraniteConfig", GQA),
    "cohere": ("CohereConfig", GQA),
}  # fmt: skip


def meta_model(family):
    name, settings = FAMILIES[family]
    config = getattr(transformers, name)(**settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict(), {name: tuple(each.shape) for name, each in model.named_parameters()}


def matrices(parameters):
    return sum(prod(shape) for name, shape in parameters.items() if len(shape) > 1 and not name.endswith("bias"))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_give_the_exact_count(family):
    config, parameters = meta_model(family)
    shape = from_parameters(parameters, config)
    assert shape.parameters == sum(map(prod, parameters.values()))
    assert shape.tied == config["tie_word_embeddings"]
    inside = [prod(size) for name, size in parameters.items() if re.search(r"(layers|h)\.1\.", name)]
    assert shape.layers[1].parameters == sum(inside)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_alone_gives_every_matrix(family):
    config, parameters = meta_model(family)
    by_rule, exact = from_config(config), from_parameters(parameters, config)
    inside = [sum(each.parameters for each in layer.linears) for layer in by_rule.layers]
    assert inside == [sum(each.parameters for each in layer.linears) for layer in exact.layers]
    assert by_rule.outside - by_rule.vectors + sum(inside) == matrices(parameters)
    routing = [(layer.experts, layer.experts_per_token) for layer in by_rule.layers]
    assert routing == [(layer.experts, layer.experts_per_token) for layer in exact.layers]


@pytest.mark.parametrize("family", ["llama-full", "mixtral-full"])
def test_vectors_are_little_of_a_real_model(family):
    config, parameters = meta_model(family)
    assert from_config(config).parameters == pytest.approx(sum(map(prod, parameters.values())), rel=1e-3)


def test_one_tensor_an_expert_counts_as_the_fused_one():
    config, fused = meta_model("mixtral")
    apart = {name: shape for name, shape in fused.items() if "experts." not in name}
    for layer in range(3):
        for expert in range(8):
            for name, shape in {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}.items():
                apart[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = shape
    one, other = from_parameters(apart, config), from_parameters(fused, config)
    assert one.parameters == other.parameters and one.layers[0].expert == other.layers[0].expert == 3 * 96 * 64


def test_experts_read_by_more_tokens_saturate():
    layer = LayerShape((Linear("attention.q", 4, 4), Linear("mlp.experts.up", 2, 4, 8)), 0, 8, 2)
    assert layer.distinct_experts(1) == 2
    assert layer.distinct_experts(2) == pytest.approx(8 * (1 - 0.75**2))
    assert layer.distinct_experts(1000) == pytest.approx(8)
    assert layer.read_parameters(1) == 16 + 2 * 8 and layer.parameters == 16 + 8 * 8


def test_four_bits_cost_four_and_a_half():
    assert bytes_of(128, 16, 2) == 256 and bytes_of(128, 16, 4) == 512 and bytes_of(128, 4, 4) == 72
    shape = from_config(FAMILIES["opt"][1])
    sixteen, four = shape.layer_bytes(), shape.layer_bytes(4)
    vectors = 4 * 64 * 2
    assert four[0] - vectors == pytest.approx((sixteen[0] - vectors) * 4.5 / 16)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_model_in_fp32_has_twice_the_bytes(key):
    """It was planned as fp16: peaks came out at half of what the run took."""
    half, whole = (from_config({**FAMILIES["opt"][1], key: name}) for name in ("float16", "float32"))
    assert half.element_bytes == 2 and whole.element_bytes == 4
    assert whole.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    assert whole.weight_bytes()[0] == 2 * half.weight_bytes()[0]
    assert from_config(FAMILIES["opt"][1]).element_bytes == 2


def test_equal_layers_are_counted_once():
    shape = from_config({**MOE, "num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [1]})
    assert [number for _, number in shape.kinds] == [2, 1]
    assert shape.weight_bytes() == (sum(shape.layer_bytes()), max(shape.layer_bytes()))
    total, largest = shape.weight_bytes(4, 0.5)
    assert 0.4 < total / sum(shape.layer_bytes(4)) < 0.6 and largest < max(shape.layer_bytes(4))


def test_a_shape_has_a_digest_of_its_own():
    shape = from_config(FAMILIES["opt"][1])
    assert shape.digest() == from_config(FAMILIES["opt"][1]).digest() and len(shape.digest()) == 64
    assert shape.digest() != from_config({**FAMILIES["opt"][1], "ffn_dim": 128}).digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "must have one of hidden_size"),
        ({"num_hidden_layers": 0}, "1 at least, not 0"),
        ({"vocab_size": "many"}, "vocab_size in the model's config must be a whole number"),
        ({"num_key_value_heads": -1}, "whole number, 0 or more, not -1"),
        ({"num_local_experts": 4}, "num_experts_per_tok"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "experts in the model's config must be 4 at most, not 5"),
        ({"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 1}, "mlp_only_layers .* must be a list"),
        ({"num_hidden_layers": 10**9}, "layers of the model's config must be 10000 at most"),
        ({"vocab_size": 10**400}, "at most, not 1000"),
        ({"num_attention_heads": 65}, "heads of 1 dim at least"),
        ({"num_key_value_heads": 8}, "no more KV heads than heads"),
    ],
)
def test_configs_without_a_shape_are_rejected(change, message):
    with pytest.raises(PlanError, match=message):
        from_config({**GQA, **change})


def test_one_kv_head_where_the_config_states_multi_query():
    config = {key: value for key, value in GQA.items() if key != "num_key_value_heads"}
    one, every = ({**config, "multi_query": flag} for flag in (True, False))
    assert from_config(one) == from_config({**config, "num_key_value_heads": 1})
    assert from_config(every) == from_config(config)


def test_parameters_of_another_model_are_rejected():
    config, parameters = meta_model("llama")
    with pytest.raises(PlanError, match="must have a list of 4 layers, as the config has, not lists of 3"):
        from_parameters(parameters, {**config, "num_hidden_layers": 4})
    config, parameters = meta_model("mixtral")
    with pytest.raises(PlanError, match="must have 4 experts in its first dimension, not 8"):
        from_parameters(parameters, {**config, "num_local_experts": 4})
