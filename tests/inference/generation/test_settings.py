"""Every field of transformers' GenerationConfig: the tokens of transformers' own generate, or an error that names it.

`python tests/inference/generation/test_settings.py` writes the table of docs/contracts/generation.md.
"""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CompileConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

from nearflash.abi.errors import CommandError, NearflashError, UnsupportedError
from nearflash.inference import AttentionPolicy, attach, open_engine
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.generate import generate
from nearflash.inference.session import Session
from nearflash.inference.settings import FIELDS, Caller, generation_settings
from nearflash.offload import OffloadedModel
from nearflash.planning.policy import OffloadPolicy, Shares

PAGE = Path(__file__).parents[3] / "docs/contracts/generation.md"
NEW = 8
#: Options for which the field matters: its own value, and what it needs beside. Drawn tokens have one candidate left.
DRAW = {"do_sample": True, "top_k": 0}
BEAMS = {"num_beams": 3, "eos_token_id": 7}
LOOKUP = {"prompt_lookup_num_tokens": 3}
EXAMPLES = {
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 9, "eos_token_id": list(range(90))},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(90))},
    "early_stopping": {"early_stopping": True, **BEAMS},
    "max_time": {"max_time": 60.0},
    "stop_strings": {"stop_strings": "made"},
    "do_sample": {**DRAW, "temperature": 1e-4},
    "num_beams": {"num_beams": 3},
    "use_mtp": {"use_mtp": True},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "cache_config": {"cache_config": {"backend": "quanto"}},
    "max_cache_len": {"max_cache_len": 64},
    "temperature": {**DRAW, "temperature": 1e-4},
    "top_k": {"do_sample": True, "top_k": 1},
    "top_p": {**DRAW, "top_p": 1e-6},
    "min_p": {**DRAW, "min_p": 1.0},
    "top_h": {**DRAW, "top_h": 1e-6},
    "typical_p": {**DRAW, "typical_p": 1e-6},
    "epsilon_cutoff": {**DRAW, "epsilon_cutoff": 0.9999},
    "eta_cutoff": {**DRAW, "eta_cutoff": 0.9999, "temperature": 0.001},
    "repetition_penalty": {"repetition_penalty": 0.2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "length_penalty": {"length_penalty": -3.0, **BEAMS},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1, "sequence_bias": [[[9], 50.0]]},
    "bad_words_ids": {"bad_words_ids": "first"},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.7},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 4.0), "eos_token_id": 9},
    "suppress_tokens": {"suppress_tokens": "first"},
    "begin_suppress_tokens": {"begin_suppress_tokens": "first"},
    "sequence_bias": {"sequence_bias": [[[9], 50.0]]},
    "token_healing": {"token_healing": True},
    "guidance_scale": {"guidance_scale": 2.5},
    "watermarking_config": {"watermarking_config": {"bias": 9.0, "seeding_scheme": "lefthash"}},
    "num_return_sequences": {"num_return_sequences": 2, "num_beams": 2},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "output_scores": {"output_scores": True},
    "output_logits": {"output_logits": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 5},
    "bos_token_id": {"bos_token_id": 5},
    "eos_token_id": {"eos_token_id": list(range(60))},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[41], 50.0], [[51], 40.0]]},
    "decoder_start_token_id": {"decoder_start_token_id": 5},
    "is_assistant": {"is_assistant": True},
    "num_assistant_tokens": {"num_assistant_tokens": 4, **LOOKUP},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic", **LOOKUP},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9, **LOOKUP},
    "prompt_lookup_num_tokens": LOOKUP,
    "max_matching_ngram_size": {"max_matching_ngram_size": 3, **LOOKUP},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "assistant_lookbehind": {"assistant_lookbehind": 4, **LOOKUP},
    "target_lookbehind": {"target_lookbehind": 4, **LOOKUP},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "speculation_type": {"speculation_type": "dflash"},
    "compile_config": {"compile_config": "made"},
    "disable_compile": {"disable_compile": True},
    "continuous_batching_config": {"continuous_batching_config": {"block_size": 16}},
    "low_memory": {"low_memory": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "diversity_penalty": {"diversity_penalty": 1.0},
    "num_beam_groups": {"num_beam_groups": 2, "num_beams": 2},
    "constraints": {"constraints": [1]},
    "force_words_ids": {"force_words_ids": [[9]]},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
}  # fmt: skip
ALONE = {"repetition_penalty", "guidance_scale"} | {
    name for name, options in EXAMPLES.items() if LOOKUP.items() <= options.items()
}
"""Of one prompt: transformers takes no more, or mixes what lies before prompts into their tokens."""


def make_tokenizer(**options):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({"<e>": 0} | {letter: n + 1 for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, **({"eos_token": "<e>", "pad_token": "<e>"} | options))


def make_plain(**options):
    torch.manual_seed(3)
    sizes = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
                 initializer_range=0.2)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | options))).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def plain():
    return make_plain()


@pytest.fixture(scope="module")
def near(plain):
    return attach(copy.deepcopy(plain))


@pytest.fixture(scope="module")
def planned(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    plain.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    policy = OffloadPolicy(2, 1, weights=Shares(gpu=1), cache=Shares(gpu=1), activations=Shares(gpu=1))
    with OffloadedModel(folder, policy) as model:
        yield model


def rows_of(name, caller):
    if name == "forced_bos_token_id":
        return [[40]]
    return [[40, 41, 42]] if caller is Caller.SESSION or name in ALONE else [[40, 41, 42], [50, 51, 52, 53, 54]]


def options_of(name, plain, rows):
    """Of the example, with a token that transformers would choose first where one is to be kept out."""
    options = {"max_new_tokens": NEW} | EXAMPLES[name]
    first, _, third = own_tokens(plain, rows, {"max_new_tokens": 3})[0]
    made = {"bad_words_ids": [[first]], "suppress_tokens": [first], "begin_suppress_tokens": [first],
            "compile_config": CompileConfig(), "stop_strings": [make_tokenizer().decode([third]), "no"]}  # fmt: skip
    return options | {key: value for key, value in made.items() if options.get(key) in ("made", "first")}


def own_tokens(plain, rows, options, tokenizer=None):
    """Of transformers' generate in memory, up to each text's end."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"pad_token_id": 0} | {key: value for key, value in options.items() if value is not None}
    if isinstance(options.get("watermarking_config"), dict):
        options["watermarking_config"] = WatermarkingConfig(**options["watermarking_config"])
    torch.manual_seed(11)
    out = plain.generate(ids, attention_mask=mask, **({"tokenizer": tokenizer} if tokenizer else {}), **options)
    out = out if isinstance(out, torch.Tensor) else out.sequences
    ends = options.get("eos_token_id", 0)
    ends = {ends} if isinstance(ends, int) else set(ends)
    found = []
    for row in out[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row))
        found.append(row[: end + 1])
    strings = options.get("stop_strings") or []
    return [cut_at(row, strings, tokenizer) for row in found]


def cut_at(tokens, strings, tokenizer):
    for length in range(1, len(tokens) + 1):
        if any(string in tokenizer.decode(tokens[:length]) for string in strings):
            return tokens[:length]
    return tokens


def our_tokens(caller, near, planned, tokenizer, rows, options, folder=None):
    """Tokens by a caller; `folder`: the options are the model's own, not the call's."""
    model = planned.model if caller is Caller.PLAN else near
    before = model.generation_config
    if folder is not None:
        model.generation_config = folder
        options = {}
    try:
        if caller is Caller.PLAN:
            return planned.generate(rows, **options).tokens
        with open_engine(kv_shape_of(near.config), AttentionPolicy(), tokens=64, sequences=8) as engine:
            try:
                if caller is Caller.SESSION:
                    with Session(near, tokenizer, engine) as session:
                        return session.generate(rows[0], seed=11, **options).tokens
                return generate(near, tokenizer, rows, engine, seed=11, **options).tokens
            except NearflashError:
                assert engine.lengths == {}, "nothing was stored before the error"
                raise
    finally:
        model.generation_config = before


@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("caller", Caller, ids=str)
def test_a_field_gives_transformers_tokens_or_an_error_that_names_it(name, caller, plain, near, planned, tokenizer):
    rows = rows_of(name, caller)
    options = options_of(name, plain, rows)
    folder = GenerationConfig(**{"eos_token_id": 0} | options)
    if name in rejected_fields(caller, options):
        for source in (None, folder):
            with pytest.raises(UnsupportedError, match=rf"\b({'|'.join(rejected_fields(caller, options))}) must be"):
                our_tokens(caller, near, planned, tokenizer, rows, options, source)
        return
    needed = rejected_fields(caller, options)
    options = {key: value for key, value in options.items() if key not in needed}  # as beams, which a session has not
    folder = GenerationConfig(**{"eos_token_id": 0} | options)
    own = own_tokens(plain, rows, options, tokenizer)
    assert our_tokens(caller, near, planned, tokenizer, rows, options) == own
    assert our_tokens(caller, near, planned, tokenizer, rows, options, folder) == own


def rejected_fields(caller, options):
    return [name for name in options if caller in FIELDS[name].rejected and name not in ("cache_implementation",)]


CHANGING = ("max_length", "max_new_tokens", "min_length", "stop_strings", "num_beams", "repetition_penalty",
            "encoder_repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id",
            "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "sequence_bias", "guidance_scale", "watermarking_config", "eos_token_id",
            "encoder_no_repeat_ngram_size")  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_the_examples_change_tokens(name, plain, tokenizer):
    """Else the comparison above would not see that one is dropped."""
    rows = rows_of(name, Caller.GENERATE)
    options = options_of(name, plain, rows)
    bare = {key: value for key, value in options.items() if key != name and value is not None}
    bare = {"max_new_tokens": NEW} | bare
    assert own_tokens(plain, rows, options, tokenizer) != own_tokens(plain, rows, bare, tokenizer)


def test_every_field_of_transformers_has_a_rule_and_an_example():
    """A field of a later transformers fails here, until it is supported or rejected."""
    fields = set(vars(GenerationConfig())) - {"_from_model_config", "transformers_version"}
    assert fields == FIELDS.keys() == EXAMPLES.keys()


def table():
    lines = ["| field | generate | --session | --plan |", "|---|---|---|---|"]
    for name, rule in sorted(FIELDS.items()):
        cells = []
        for caller in Caller:
            if caller not in rule.rejected:
                cells.append("supported" + (f": {rule.note}" if rule.note else ""))
            elif name == "cache_implementation":
                cells.append(f"supported, but `quantized`, which is rejected: {rule.rejected[caller]}")
            else:
                cells.append(f"rejected: {rule.rejected[caller]}")
        same = len(set(cells)) == 1
        lines.append(f"| `{name}` | " + " | ".join([cells[0], "as generate", "as generate"] if same else cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table():
    assert PAGE.read_text("utf-8").endswith("\n" + table()), f"run python {Path(__file__).name} to write it"


def test_drawn_tokens_are_transformers_own(plain, near, planned, tokenizer):
    """The same random numbers in memory; of a plan others, which a batch does not change."""
    rows = [[40, 41, 42]]
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "max_new_tokens": NEW}
    own = own_tokens(plain, rows, options)
    for caller in (Caller.GENERATE, Caller.SESSION):
        assert our_tokens(caller, near, planned, tokenizer, rows, options) == own
        assert (
            our_tokens(caller, near, planned, tokenizer, rows, {}, GenerationConfig(eos_token_id=0, **options)) == own
        )
    drawn = [planned.generate(rows * 3, seed=seed, **options).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len({tuple(row) for row in drawn[0]}) == 3


@pytest.mark.parametrize(("options", "message"), [
    ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more, not 0"),
    ({"max_new_tokens": True}, "max_new_tokens must be a whole number, not True"),
    ({"max_length": 3}, "max_length must be 6 or more, not 3; the longest prompt has 5 tokens"),
    ({"max_new_tokens": 252}, "max_new_tokens must be 251 or less after 5 tokens, not 252: the model has 256"),
    ({"max_new_token": 4}, "max_new_token must be left out: it is no field"),
    ({"input_ids": [1]}, "input_ids must be left out"),
    ({"streamer": None}, "streamer must be left out"),
    ({"temperature": 0.0, "do_sample": True}, "must be values that transformers takes: `temperature`"),
    ({"num_return_sequences": -1}, "num_return_sequences must be 1"),
    ({"repetition_penalty": "high"}, "must be values that transformers takes"),
    ({"eos_token_id": "<e>"}, "eos_token_id must be a whole number"),
    ({"stop_strings": [""]}, "stop_strings must be texts that are not empty"),
    ({"sequence_bias": {(300,): 1.0}}, "sequence_bias must have tokens of the model, 0 to 256, not 300"),
    ({"bad_words_ids": [[-4]]}, "bad_words_ids must have tokens of the model"),
    ({"forced_eos_token_id": 257}, "forced_eos_token_id must have tokens of the model"),
    ({"watermarking_config": {"bias": 1.0, "seeding_scheme": "none"}}, "must be values that transformers takes"),
    ({"generation_config": {"top_k": 3}}, "generation_config must be a GenerationConfig, not dict"),
    ({"cache_implementation": "quantized"}, "cache_implementation must be 'dynamic' .*it stores K and V in fewer bits"),
    ({"stop_strings": ["a"], "num_beams": 2}, "num_beams must be 1 with stop_strings"),
    ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens must be None where a batch has several prompts"),
    ({"do_sample": True, "mini_batches": 2}, "mini_batches must be 1 where tokens are drawn"),
    ({"stopping_criteria": 3}, "stopping_criteria must be a list of StoppingCriteria"),
    ({"num_beams": 0}, "num_beams must be 1 or more"),
    ({"num_beams": 2.0}, "num_beams must be a whole number"),
    ({"prefill_chunk_size": 0}, "prefill_chunk_size must be 1 or more"),
    ({"prompt_lookup_num_tokens": -1}, "prompt_lookup_num_tokens must be 1 or more"),
    ({"max_time": "long"}, "max_time must be a number of seconds"),
    ({"exponential_decay_length_penalty": (3,), "eos_token_id": 5}, "must be a token's number and a factor"),
    ({"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": []}, "must be given with eos_token_id"),
])  # fmt: skip
def test_values_are_checked_before_anything_is_stored(near, planned, tokenizer, options, message):
    with pytest.raises((CommandError, UnsupportedError), match=message):
        our_tokens(Caller.GENERATE, near, planned, tokenizer, [[40, 41, 42], [50, 51, 52, 53, 54]], options)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, "x", 1.0])
def test_seeds_that_torch_does_not_take(near, planned, tokenizer, seed):
    with open_engine(kv_shape_of(near.config), AttentionPolicy(), tokens=64, sequences=1) as engine:
        calls = (
            lambda: generate(near, tokenizer, "a", engine, seed=seed),
            lambda: Session(near, tokenizer, engine).generate("a", seed=seed),
            lambda: planned.generate("a", seed=seed),
        )
        for call in calls:
            with pytest.raises(CommandError, match="seed must be a whole number of at most 64 bits"):
                call()
        assert not engine.lengths


def test_the_call_comes_before_the_models_own():
    own = GenerationConfig(max_new_tokens=9, eos_token_id=3, temperature=0.5, min_length=4)

    def settings(options, lengths=(3,)):
        return generation_settings(own, Caller.GENERATE, lengths, vocabulary=10, positions=32, options=options)

    assert settings({}).max_new_tokens == 9 and settings({}).stops == (3,)
    assert settings({"max_length": 8}).max_new_tokens == 5
    assert settings({"eos_token_id": None}).stops == () and settings({"eos_token_id": torch.tensor([1, 2])}).stops == (
        1,
        2,
    )
    whole = GenerationConfig(max_new_tokens=4, temperature=0.7)
    both = settings({"generation_config": whole, "max_new_tokens": 6})
    assert both.max_new_tokens == 6 and both.fields["temperature"] == 0.7 and both.fields["min_new_tokens"] == 1
    assert json.dumps(both.stated) and both.stated["temperature"] == 0.7 and "top_p" not in both.stated
    free = generation_settings(GenerationConfig(), Caller.PLAN, [20], vocabulary=10, positions=32)
    assert free.max_new_tokens == 12, "as many as there are positions for"
    assert generation_settings(GenerationConfig(), Caller.PLAN, [20], vocabulary=10).max_new_tokens == 64


def test_a_field_without_a_rule_is_rejected(monkeypatch):
    monkeypatch.delitem(FIELDS, "top_h")
    with pytest.raises(UnsupportedError, match="top_h must be left out of the generation configuration"):
        generation_settings(GenerationConfig(top_h=0.5), Caller.GENERATE, [3], vocabulary=10)


if __name__ == "__main__":
    head = PAGE.read_text("utf-8").partition("\n| field |")[0]
    PAGE.write_text(f"{head}\n{table()}", "utf-8")
    sys.exit()
