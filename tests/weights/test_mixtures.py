"""Mixtures of experts compressed whole: as they are stored, and by their layers' matrices; loaded to the bit."""

import pytest

pytest.importorskip("accelerate")

import torch
import transformers
from transformers import AutoModelForCausalLM

from nearflash.weights import open_checkpoint
from nearflash.weights.convert import copy_others, layer_weights, write_checkpoint, write_model
from nearflash.weights.loading import load

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts=8, n_routed_experts=8,
    num_experts_per_tok=2, max_position_embeddings=128, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
    qk_nope_head_dim=16, v_head_dim=16, n_group=1, topk_group=1, first_k_dense_replace=1, num_shared_experts=1,
    shared_expert_intermediate_size=96, n_shared_experts=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_sparse_step=1, moe_layer_start_index=0,
)  # fmt: skip
#: Experts one by one in the checkpoint and fused in memory, with the inputs last; fused in both, with the inputs first.
FIRST = ("Mixtral", "GptOss")
OTHERS = ("Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Olmoe", "GraniteMoe", "Ernie4_5_Moe", "Glm4Moe",
          "Phimoe", "MiniMax", "Jamba", "FlexOlmo", "Llama4Text", "JetMoe", "HunYuanMoEV1", "Qwen3Next")  # fmt: skip


@pytest.fixture(params=[*FIRST, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def mixture(request, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "dense")
    return model


def assert_equal(model, folder, rounded=False):
    """rounded: what a module itself makes in fp32 (HunYuan's router) is written in the model's dtype."""
    found = load(AutoModelForCausalLM, folder).state_dict()
    for name, value in model.state_dict().items():
        equal = torch.equal(value, found[name])
        assert equal or (rounded and torch.equal(value.bfloat16().to(value.dtype), found[name])), name


def coded_share(written):
    return sum(each.elements for each in written if each.form == "coded") / sum(each.elements for each in written)


def test_a_checkpoint_as_it_is_stored(mixture, tmp_path):
    """Experts, which are most of a mixture, stayed dense, and the summary spoke of the rest."""
    written = []
    tensors = open_checkpoint(tmp_path / "dense")
    write_checkpoint(tensors, tmp_path / "small", written=written.append)
    copy_others(None, None, tmp_path / "dense", tmp_path / "small")
    assert [each.name for each in written if each.form == "coded"] and coded_share(written) >= 0.95
    assert {each.name for each in written} == tensors.keys()
    assert_equal(mixture, tmp_path / "small")


def test_the_matrices_of_its_layers(mixture, tmp_path):
    names, written = layer_weights(mixture), []
    every = [value for name, value in mixture.named_parameters() if ".layers." in name and value.ndim > 1]
    covered = sum(mixture.get_parameter(name).numel() for name in names)
    assert covered >= 0.95 * sum(value.numel() for value in every)
    with torch.no_grad():
        for name in names:
            weight = mixture.get_parameter(name)
            weight[weight.abs() < weight.abs().median()] = 0
    write_model(mixture, tmp_path / "small", format="coded-bitmap", bits=16, dtype=torch.bfloat16, compressed=names,
                lossless=True, written=written.append)  # fmt: skip
    copy_others(mixture, None, tmp_path / "dense", tmp_path / "small")
    assert {each.name for each in written} == open_checkpoint(tmp_path / "dense").keys()  # as transformers saves them
    assert {each.form for each in written if each.is_chosen and each.elements > 1024} == {"bitmap"}
    assert_equal(mixture, tmp_path / "small", rounded=True)
