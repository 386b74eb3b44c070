"""The bench's mixture: a checkpoint that transformers reads, and rows for routed experts, all experts, accelerate."""

import json

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM

from nearflash.bench.offload import mixture
from nearflash.weights import open_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "vocab_size": 97}  # fmt: skip


def test_transformers_reads_every_tensor_of_it(tmp_path):
    total = mixture.write_mixture(tmp_path, SIZES)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, local_files_only=True, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    assert total == sum(each.numel() * each.element_size() for each in model.parameters())
    assert total == sum(tensor.dense_bytes for tensor in open_checkpoint(tmp_path).values())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and len(set(index["weight_map"].values())) == 2


def test_it_is_the_same_each_time(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        mixture.write_mixture(tmp_path / name, SIZES)
    for file in (tmp_path / "one").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_activations_stay_finite_from_layer_to_layer(tmp_path):
    mixture.write_mixture(tmp_path, SIZES | {"num_hidden_layers": 4})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, dtype="auto").eval()
    with torch.no_grad():
        logits = model(torch.arange(24).reshape(2, 12) * 4).logits.float()
    assert logits.isfinite().all() and 0.1 < logits.std() < 100


@pytest.mark.full
def test_a_quarter_of_the_bytes_holds_experts(tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    rows = list(mixture.measure(tmp_path, SIZES | {"num_local_experts": 32}))
    cases = {row["case"]: row for row in rows}
    assert {"planned", "all-experts", "accelerate", "accelerate-cold", "ratios"} <= cases.keys()
    for row in rows:
        assert row["expert_memory_bytes"] == row["model_bytes"] // 4
    routed, every = cases["planned"], cases["all-experts"]
    assert routed["same_fraction"] == 1
    assert 0 <= routed["expert_hit_rate"] <= 1 and every["expert_hit_rate"] is None
    assert routed["disk_bytes_per_token"] < every["disk_bytes_per_token"]
    assert not list(tmp_path.iterdir())
