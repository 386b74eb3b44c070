"""Tiny random models of every family that is served: the tokens of transformers' own cache, 64 of them.

transformers' attention gets q, K and V as they are stored, rounded to fp16 after the first call: two logits that nearly
tie would else decide.
"""

import copy
import sys
from functools import partial

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.distributed import DistributedConfig
from transformers.masking_utils import eager_mask

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.cache.decoder import flash_layers, kv_shape_of
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import open_engine

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
#: Configuration class, and what differs from SMALL.
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied-rope": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2} | WINDOW),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"sliding_window": None} | EXPERTS),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0} | WINDOW),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 20} | WINDOW),
    "phi3": ("Phi3", {"head_dim": None}),
    "olmo2": ("Olmo2", {"head_dim": None}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "head_dim": None}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}),
    "gpt-oss": ("GptOss", EXPERTS | WINDOW),
    "wide-heads": ("Llama", {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 1}),
    "linear": ("Qwen3Next", EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
    }),
}  # fmt: skip
NEW = 64


def rounded_attention(module, query, key, value, mask, **options):
    """transformers' own of the model's family, over what a flash holds."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if options.get("sliding_window") is None and key.shape[2] > query.shape[2]:
        query, key, value = (x.half().to(x) for x in (query, key, value))
    return eager(module, query, key, value, mask, **options)


AttentionInterface.register("rounded", rounded_attention)
AttentionMaskInterface.register("rounded", eager_mask)


def make(family, **more):
    """A model with transformers' attention, to compare with."""
    name, options = FAMILIES[family]
    torch.manual_seed(7)
    settings = {key: value for key, value in (SMALL | options | more).items() if value is not None}
    if "sliding_window" in options:
        settings["sliding_window"] = options["sliding_window"]
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    model.set_attn_implementation("rounded")
    return model


def inputs_of(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 97, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[int(t >= max(lengths) - n) for t in range(max(lengths))] for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, inputs, cache, new=NEW, **options):
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, past_key_values=cache, **settings).tolist()


@pytest.fixture(params=FAMILIES)
def both(request):
    """The same model twice: with transformers' attention, and attached."""
    model = make(request.param)
    return model, attach(copy.deepcopy(model))


@pytest.mark.parametrize("new", [12, pytest.param(NEW, marks=pytest.mark.full)])
def test_tokens_of_three_unequal_prompts_are_those_of_the_models_own_cache(both, make_engine, new):
    """By the engine in plain arrays, and by the one on a flash."""
    model, attached = both
    inputs = inputs_of([73 - new, 68 - new, 77 - new])  # a page group and its tail
    own = generate(model, inputs, DynamicCache(config=model.config), new)
    flash = flash_layers(model.config)
    engine = make_engine(kv_shape_of(model.config).kv_heads if flash else 1)
    with NearflashCache(engine, attached.config) as cache:
        assert generate(attached, inputs, cache, new) == own
        assert [sorted(layers) for layers in engine.stored.values()] == [list(range(len(flash)))] * (3 if flash else 0)
    if flash:
        with open_engine(kv_shape_of(model.config), AttentionPolicy(), tokens=80, sequences=3) as engine:
            assert generate(attached, inputs, NearflashCache(engine, attached.config), new) == own


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
class TestSearch:
    """What transformers' generate does beside one token after another."""

    @pytest.fixture(params=["arrays", "flash"])
    def run(self, request, family, make_engine):
        model = make(family)
        attached = attach(copy.deepcopy(model))
        arrays = request.param == "arrays"
        flash = partial(open_engine, kv_shape_of(model.config), AttentionPolicy(), tokens=50, sequences=9)

        def both(lengths, **options):
            inputs, found = inputs_of(lengths), []
            engine = make_engine(2) if arrays else flash()
            for own, cache in (
                (model, DynamicCache(config=model.config)),
                (attached, NearflashCache(engine, model.config)),
            ):
                torch.manual_seed(5)
                found.append(generate(own, inputs, cache, 24, **options))
            cache.reset()
            assert not (engine.stored if arrays else engine.store.lengths)
            engine.close()
            return found

        return both

    def test_beam_search(self, run):
        own, near = run([9, 4], num_beams=3)
        assert own == near

    def test_samples_of_one_prompt(self, run):
        own, near = run([9], do_sample=True, num_return_sequences=4, temperature=1.5)
        assert own == near and len({tuple(row) for row in near}) == 4

    def test_a_prompt_in_chunks(self, run):
        own, near = run([19, 6, 14], prefill_chunk_size=5)
        assert own == near

    def test_assisted_generation(self, run, family):
        assistant = make(
            family, num_hidden_layers=2, **({"layer_types": WINDOW["layer_types"][:2]} if family != "llama" else {})
        )
        own, near = run([9], assistant_model=assistant)
        assert own == near

    def test_prompt_lookup(self, run):
        own, near = run([12], prompt_lookup_num_tokens=3)
        assert own == near


REFUSED = {
    "T5": ({"is_encoder_decoder": True}, "AutoModelForSeq2SeqLM", "has an encoder"),
    "Bloom": ({}, "AutoModelForCausalLM", "has attention of its own"),
    "Falcon": ({"alibi": True, "head_dim": None, "num_hidden_layers": 1}, "AutoModelForCausalLM", "adds ALiBi biases"),
    "Mpt": ({}, "AutoModelForCausalLM", "adds ALiBi biases"),
    "DeepseekV3": ({}, "AutoModelForCausalLM", r"keeps latents in place of K and V \(MLA\)"),
    "Mamba": ({}, "AutoModelForCausalLM", "has no attention"),
    "Llama": ({"head_dim": 258}, "AutoModelForCausalLM", "has heads that pages do not take: dim must be a multiple"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_when_attached(family):
    options, auto, reason = REFUSED[family]
    small = {} if family in ("T5", "Mamba") else SMALL
    sizes = (
        {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
        if family == "T5"
        else {}
    )
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 50} if family == "Mamba" else {}
    settings = {key: value for key, value in (small | sizes | options).items() if value is not None}
    model = getattr(transformers, auto).from_config(getattr(transformers, f"{family}Config")(**settings))
    before = model.config._attn_implementation
    with pytest.raises(
        UnsupportedError, match=f"model must be a decoder with plain softmax attention, but '.*' {reason}"
    ):
        attach(model)
    assert model.config._attn_implementation == before


def test_a_model_without_full_attention_has_nothing_for_flash():
    with pytest.raises(UnsupportedError, match="must have a layer with full attention, but 'mistral' has none"):
        kv_shape_of(make("mistral-window").config)


def test_a_window_without_the_configuration_is_an_error(make_engine):
    model = attach(make("gemma2"))
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"pass the model's configuration, NearflashCache\("):
        model(**inputs_of([4]), past_key_values=NearflashCache(make_engine(2)))


def attach_a_part(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto")
    )  # fmt: skip
    try:
        attach(model)
    except UnsupportedError as error:
        return str(error)


def test_a_model_that_its_tp_plan_divides_is_refused(tmp_path, fork_ranks):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1})).save_pretrained(
        tmp_path
    )
    found = fork_ranks(attach_a_part, tmp_path)
    assert set(found) == {0, 1}
    assert all("whole in each process, but its tp_plan divides it among 2 ranks" in each for each in found.values())
