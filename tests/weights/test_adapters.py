"""Adapters of peft over weights that a budget leaves on disk: right tokens or a named error, however they are added."""

import shutil

import numpy as np
import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.weights import compress_tensor, open_checkpoint, write_file
from nearflash.weights.compress import dense_tensor
from nearflash.weights.convert import layer_weights, write_model
from nearflash.weights.loading import load, merge_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of weights without memory, too
IDS = torch.tensor([[5, 6, 7, 8]])
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose layers are compressed, and beside it adapters: LoRA and DoRA."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    packed = []
    for name, value in model.state_dict().items():
        if value.ndim == 2 and ".layers." in name:
            value[:, ::2] = 0
            packed.append(compress_tensor(name, value.view(torch.int16).numpy().view(np.uint16)))
        else:
            packed.append(dense_tensor(name, "BF16", tuple(value.shape), value.view(-1).view(torch.uint8).numpy()))
    write_file(folder / "model.safetensors", {each.name: (each.dtype, each.shape) for each in packed}, packed)
    model.config.save_pretrained(folder)
    for name, dora in (("lora", False), ("dora", True)):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_dora=dora, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(load(AutoModelForCausalLM, folder), config)
        for each, value in adapted.named_parameters():
            if "lora_A" in each or "lora_B" in each:
                value.data = torch.randn(value.shape).to(value.dtype) * 0.3
        adapted.save_pretrained(folder / name)
    return folder


@pytest.fixture
def on_disk(folder):
    with pytest.raises(CommandError) as error:
        load(AutoModelForCausalLM, folder, budget=0)
    model = load(AutoModelForCausalLM, folder, budget=int(str(error.value).split()[3]))
    assert any(value.is_meta for value in model.parameters())
    return model


def tokens_of(model):
    return model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 4:].tolist()


def test_load_adapter_gives_the_tokens_of_dense_weights(folder, on_disk):
    dense = load(AutoModelForCausalLM, folder)
    plain = tokens_of(dense)
    dense.load_adapter(str(folder / "lora"))
    on_disk.load_adapter(str(folder / "lora"))
    assert tokens_of(on_disk) == tokens_of(dense) != plain
    on_disk.disable_adapters()
    assert tokens_of(on_disk) == plain


def new_adapter(model, folder):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM"))


def load_dora(model, folder):
    model.load_adapter(str(folder / "dora"))
    return model


def hook_replaced(model, folder):
    add_hook_to_module(model.model.layers[1].mlp.up_proj, ModelHook())
    return model


WITHOUT_MEMORY = {
    "get_peft_model": new_adapter,
    "PeftModel.from_pretrained": lambda model, folder: peft.PeftModel.from_pretrained(model, folder / "lora"),
    "DoRA": load_dora,
    "another hook": hook_replaced,
}


@pytest.mark.parametrize("way", WITHOUT_MEMORY)
def test_what_would_compute_without_memory_is_an_error(folder, on_disk, way):
    model = WITHOUT_MEMORY[way](on_disk, folder)
    with pytest.raises(UnsupportedError, match="without budget"):
        tokens_of(model)


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_weights_on_disk_are_not_merged(folder, on_disk, merge):
    model = peft.PeftModel.from_pretrained(on_disk, folder / "lora")
    with pytest.raises(UnsupportedError, match="cannot be merged"):
        getattr(model, merge)()


def test_hooks_that_are_added_beside_ours_or_all_taken_away(folder, on_disk):
    plain = tokens_of(on_disk)
    add_hook_to_module(on_disk.model.layers[1].mlp.up_proj, ModelHook(), append=True)
    assert tokens_of(on_disk) == plain
    remove_hook_from_module(on_disk, recurse=True)
    with pytest.raises(UnsupportedError, match="must stay"):
        tokens_of(on_disk)


@pytest.mark.parametrize(
    "options",
    [{"device": "model"}, {"device": "cuda:99"}, {"device": "meta"}, {"device": 3.5}, {"budget": -1}, {"budget": 1.5},
     {"budget": True}, {"prefetch_bytes": -1}],
)  # fmt: skip
def test_options_of_load_are_checked_first(folder, options):
    with pytest.raises(CommandError, match=f"{next(iter(options))} must be"):
        load(AutoModelForCausalLM, folder, **options)


def test_a_merged_model_has_the_names_of_one_without_an_adapter(folder, tmp_path):
    """What peft registers as it loads an adapter stayed, and the merged weights were written under its names."""
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    for path in (folder / "lora").iterdir():
        shutil.copy(path, both)
    model = load(AutoModelForCausalLM, both)
    merge_adapter(model)
    write_model(model, tmp_path / "small", format="coded", bits=16, dtype=torch.bfloat16, lossless=True,
                compressed=layer_weights(model))  # fmt: skip
    model.config.save_pretrained(tmp_path / "small")
    assert open_checkpoint(tmp_path / "small").keys() == open_checkpoint(folder).keys()
    small = load(AutoModelForCausalLM, tmp_path / "small")
    assert torch.equal(small(IDS).logits, model(IDS).logits)
