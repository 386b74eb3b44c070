"""Shapes of models as transformers builds them, of many families."""

import json
import re
from math import prod

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from nearflash.abi.errors import UnsupportedError  # noqa: E402
from nearflash.offload.machine.shape import measure_shape  # noqa: E402
from nearflash.planning.shapes import from_config  # noqa: E402
from nearflash.weights.folder import ModelFolder  # noqa: E402

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
    "gpt-neox, a key of others": ("GPTNeoXConfig", {**SMALL, "intermediate_size": 256, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000}),
    "stablelm": ("StableLmConfig", GQA),
    "starcoder2": ("Starcoder2Config", GQA),
    "olmo2": ("Olmo2Config", GQA),
    "granite": ("GraniteConfig", GQA),
    "cohere": ("CohereConfig", GQA),
}  # fmt: skip

#: As published: parameters in billions, KV heads, head dimension, experts and those of a token.
PUBLISHED = {
    "dbrx": (131.6, 8, 128, (16, 4), {
        "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "max_seq_len": 32768,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
        "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }),
    "falcon": (6.92, 1, 64, (0, 0), {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
                                     "multi_query": True, "vocab_size": 65024}),
    "deepseek_v3": (671.0, 1, 512, (256, 8), {}),
    "mixtral": (46.7, 8, 128, (8, 2), {}),
}  # fmt: skip


def make_config(family):
    name, settings = FAMILIES[family]
    return getattr(transformers, name)(**settings)


def measure(config, folder):
    config.architectures = None
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    return measure_shape(ModelFolder(folder, json.loads((folder / "config.json").read_text())))


def list_parameters(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_counted_and_k_and_v_are_what_the_cache_is_given(family, tmp_path):
    config = make_config(family)
    shape, parameters = measure(config, tmp_path), list_parameters(config)
    assert shape.parameters == sum(map(prod, parameters.values()))
    assert shape.tied == config.tie_word_embeddings
    inside = [prod(size) for name, size in parameters.items() if re.search(r"(layers|h)\.1\.", name)]
    assert shape.layers[1].parameters == sum(inside)
    assert shape.hidden == config.hidden_size and shape.vocabulary == config.vocab_size
    if "full" in family:
        return
    cache = transformers.DynamicCache(config=config)
    transformers.AutoModelForCausalLM.from_config(config)(torch.ones(1, 5, dtype=torch.long), past_key_values=cache)
    kept = [(layer.keys.numel() + layer.values.numel()) // layer.keys.shape[2] for layer in cache.layers]
    assert [layer.kv for layer in shape.layers] == kept
    assert [layer.window for layer in shape.layers] == [getattr(each, "sliding_window", None) for each in cache.layers]


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_models_have_their_published_size(family, tmp_path):
    """DBRX was planned at .147 of its parameters, Falcon's K and V at 71 times theirs, DeepSeek's at 25 times."""
    billions, heads, dim, experts, settings = PUBLISHED[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **settings}))
    shape = measure_shape(ModelFolder(tmp_path, {}))
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert (shape.kv_heads, shape.head_dim) == (heads, dim)
    assert (shape.layers[-1].experts, shape.layers[-1].experts_per_token) == experts
    latent = 512 + 64 if family == "deepseek_v3" else 2 * heads * dim
    assert shape.kv_bytes_per_token == 2 * latent * len(shape.layers)


def test_windows_bound_what_is_read_and_not_what_is_kept(tmp_path):
    config = transformers.Gemma3TextConfig(**GQA, head_dim=32, sliding_window=16,
                                           layer_types=["sliding_attention"] * 2 + ["full_attention"])  # fmt: skip
    shape = measure(config, tmp_path)
    assert [layer.window for layer in shape.layers] == [16, 16, None]
    assert shape.kv_bytes_per_token == 3 * shape.kv_layer_bytes
    assert shape.visible_kv_bytes(100) == (16 + 16 + 100) * shape.kv_layer_bytes
    assert shape.visible_tokens(100) == 132 and shape.visible_tokens(10) == 30


def test_a_model_that_looks_at_values_is_as_its_configuration_states(tmp_path):
    config = transformers.BioGptConfig(**SMALL, intermediate_size=96)
    shape = measure(config, tmp_path)
    assert shape.layers[0].kv == 2 * 64 and (shape.kv_heads, shape.head_dim, shape.hidden) == (4, 16, 64)
    assert shape.parameters == sum(map(prod, list_parameters(config).values()))


def test_what_transformers_does_not_build_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    with pytest.raises(UnsupportedError, match="must be such that transformers reads it"):
        measure_shape(ModelFolder(tmp_path, {}))
    with pytest.raises(UnsupportedError, match="model must cache K and V, but 'mamba' has no such layer"):
        measure(transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=100), tmp_path / "mamba")


@pytest.mark.parametrize("family", ["llama-full", "mixtral-full", "opt"])
def test_tables_of_published_models_give_every_matrix(family, tmp_path):
    config = make_config(family)
    by_rule, exact = from_config(config.to_dict()), measure(config, tmp_path)
    inside = [sum(each.parameters for each in layer.linears) for layer in by_rule.layers]
    assert inside == [sum(each.parameters for each in layer.linears) for layer in exact.layers]
    assert (by_rule.embedding, by_rule.head, by_rule.tied) == (exact.embedding, exact.head, exact.tied)
    states = [(layer.experts, layer.experts_per_token, layer.kv) for layer in by_rule.layers]
    assert states == [(layer.experts, layer.experts_per_token, layer.kv) for layer in exact.layers]


@pytest.mark.parametrize("family", ["llama-full", "mixtral-full"])
def test_vectors_are_little_of_a_real_model(family, tmp_path):
    config = make_config(family)
    assert from_config(config.to_dict()).parameters == pytest.approx(measure(config, tmp_path).parameters, rel=1e-3)
