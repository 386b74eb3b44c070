import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch
import transformers

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.verify.fixtures.files import rot
from nearflash.weights import compress_tensor, open_checkpoint, write_file
from nearflash.weights.compress import dense_tensor
from nearflash.weights.convert import layer_weights, write_model
from nearflash.weights.loading import load
from nearflash.weights.weights_map import WeightsMap

TOKENS = torch.arange(24).reshape(2, 12)
SIZES = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=100, max_position_embeddings=32)
CONFIGS = {
    "opt": lambda: transformers.OPTConfig(**SIZES, ffn_dim=256, word_embed_proj_dim=128),
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=320, num_key_value_heads=2),
    "qwen": lambda: transformers.Qwen2Config(**SIZES, intermediate_size=320, num_key_value_heads=2),
}


def made(name, **options):
    torch.manual_seed(1)
    config = CONFIGS[name]()
    config.update(options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for each in model.modules():
        if isinstance(each, torch.nn.Linear) and each is not model.lm_head:
            weight = each.weight.data
            weight[weight.abs() < weight.abs().float().median().to(weight.dtype)] = 0
    return model


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def saved(model, folder, leave_out=()):
    tied = model.all_tied_weights_keys
    packed = []
    for name, tensor in model.state_dict().items():
        if name in tied or name in leave_out:
            continue
        if tensor.ndim == 2 and (tensor == 0).float().mean() > 0.3:
            packed.append(compress_tensor(name, as_bytes(tensor).view(np.uint16).reshape(tensor.shape)))
        else:
            packed.append(dense_tensor(name, "BF16", tuple(tensor.shape), as_bytes(tensor)))
    write_file(folder / "model.safetensors", {each.name: (each.dtype, each.shape) for each in packed}, packed)
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(params=CONFIGS)
def model_and_folder(request, tmp_path):
    model = made(request.param)
    return model, saved(model, tmp_path)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def smallest_budget(folder):
    with pytest.raises(CommandError, match=r"budget must be \d+ bytes at least") as error:
        load(transformers.AutoModelForCausalLM, folder, budget=0)
    return int(str(error.value).split()[3])


def test_all_in_memory_dense(model_and_folder):
    model, folder = model_and_folder
    loaded = load(transformers.AutoModelForCausalLM, folder)
    assert loaded.dtype == torch.bfloat16 and not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    assert {name: value.data_ptr() for name, value in loaded.named_parameters()}.keys() == {
        name for name, _ in model.named_parameters()
    }


def test_every_budget_gives_the_same_logits(model_and_folder):
    model, folder = model_and_folder
    expected, least = logits(model), smallest_budget(folder)
    stored = sum(each.stored_bytes for each in open_checkpoint(folder).values() if each.form != "dense")
    residents = []
    for budget in (least, least + stored // 2, least + stored, least + 2 * stored, least + 9 * stored):
        loaded = load(transformers.AutoModelForCausalLM, folder, budget=budget)
        residents.append(sum(not parameter.is_meta for parameter in loaded.parameters()))
        for _ in range(3):
            assert torch.equal(logits(loaded), expected)
    assert residents[0] == residents[2] < residents[3] < residents[-1] == len(list(model.parameters()))


def test_a_budget_with_everything_compressed(tmp_path):
    """A compressed embedding that the head is tied to had no memory in the head."""
    model = made("llama", tie_word_embeddings=True)
    write_model(model, tmp_path, format="coded", bits=16, dtype=torch.bfloat16, compressed=layer_weights(model),
                lossless=True)  # fmt: skip
    model.config.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path)["model.embed_tokens.weight"].form == "coded"
    least = smallest_budget(tmp_path)
    for budget in (least, 2 * least):
        loaded = load(transformers.AutoModelForCausalLM, tmp_path, budget=budget)
        assert torch.equal(logits(loaded), logits(model))


def test_generation_with_layers_on_disk(model_and_folder):
    model, folder = model_and_folder
    loaded = load(type(model), folder, budget=smallest_budget(folder))
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(loaded.generate(TOKENS, **options), model.generate(TOKENS, **options))


def test_a_layer_that_is_missing_loads_nothing(tmp_path):
    model = made("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=f"tensor '{name}' must be in the checkpoint, as the model has it"):
        load(transformers.AutoModelForCausalLM, saved(model, tmp_path, leave_out=[name]))


def test_another_models_configuration(tmp_path):
    folder = saved(made("llama"), tmp_path)
    config = CONFIGS["llama"]()
    config.intermediate_size = 352
    config.save_pretrained(folder)
    with pytest.raises(
        WeightsError, match=r"down_proj.weight', .* its shape must be \(128, 352\), .* not \(128, 320\)"
    ):
        load(transformers.AutoModelForCausalLM, folder)


def test_damage_on_disk_is_met_when_the_layer_is_read(tmp_path):
    folder = saved(made("llama"), tmp_path)
    loaded = load(transformers.AutoModelForCausalLM, folder, budget=smallest_budget(folder))
    tensor = open_checkpoint(folder)["model.layers.2.mlp.up_proj.weight"]
    rot(folder / "model.safetensors", b"\xff\x00\xff", tensor.offset + 1000)
    with pytest.raises(WeightsError, match=r"tensor 'model.layers.2.mlp.up_proj.weight', at byte"):
        logits(loaded)
    (folder / "model.safetensors").touch()
    with pytest.raises(WeightsError, match=r"it was changed while it was in use"):
        logits(loaded)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 16, 1 << 30])
@pytest.mark.parametrize("seed", [1, 2])
def test_tensors_are_right_in_any_order(tmp_path, prefetch_bytes, seed):
    model = made("opt")
    tensors, state = open_checkpoint(saved(model, tmp_path)), model.state_dict()
    order = np.random.default_rng(seed)
    with WeightsMap(tensors, prefetch_bytes, in_memory=list(tensors)[::3]) as weights:
        assert len(weights) == len(tensors) and list(weights) == list(tensors)
        for _ in range(3):
            for name in order.choice(list(tensors), 20):
                assert torch.equal(weights[name], state[name])
        held = {name: weights[name] for name in tensors}
        assert all(torch.equal(held[name], state[name]) for name in tensors)
        with pytest.raises(KeyError):
            weights["gate"]
        weights.close()
