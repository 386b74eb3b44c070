"""The bench of a model larger than memory, on a tiny one whose processes have no limit."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("scipy")

from transformers import AutoModelForCausalLM, LlamaConfig

from nearflash.abi.errors import PlanError
from nearflash.bench.offload import larger
from nearflash.planning.profile import load_machine
from nearflash.weights import open_checkpoint
from nearflash.weights.loading import load

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 97, "tie_word_embeddings": True}  # fmt: skip


def test_dense_and_coded_are_one_model(tmp_path):
    config = LlamaConfig(**SIZES, dtype="bfloat16")
    total = larger.write_llama(tmp_path / "dense", config, "dense")
    assert larger.write_llama(tmp_path / "coded", config, "coded") == total
    files = sorted(file.name for file in (tmp_path / "dense").glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]  # AirLLM reads the numbers
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", local_files_only=True, dtype="auto")
    coded = load(AutoModelForCausalLM, tmp_path / "coded")
    assert total == sum(each.nbytes for each in dense.parameters())
    for (name, one), (_, other) in zip(dense.named_parameters(), coded.named_parameters(), strict=True):
        assert one.equal(other), name
    assert {each.form for each in open_checkpoint(tmp_path / "coded").values()} == {"dense", "coded"}


@pytest.mark.full
def test_every_case_has_a_row_and_the_same_tokens(tmp_path, monkeypatch):
    @contextmanager
    def unlimited(limit_bytes):
        yield "nothing", lambda: None

    monkeypatch.delenv(larger.AIRLLM, raising=False)
    monkeypatch.setattr("nearflash.bench.disk._PROBE_BYTES", 32 << 20)
    monkeypatch.setattr(larger, "OWN_BYTES", -(1 << 30))
    monkeypatch.setattr(larger, "limit_memory", unlimited)
    monkeypatch.setattr(larger, "measure_machine", lambda *_: load_machine("gpu24"))
    disk, *rows = larger.measure(tmp_path, SIZES, (2,))
    assert disk["read_gb_per_s"] > 0 and disk["limit_bytes"] == disk["model_bytes"] // 3
    assert [row["case"] for row in rows] == ["accelerate", "airllm", "dense", "coded", "transformers", "dense"]
    assert "make airllm" in rows[1]["skipped"]
    for row in rows[2:4]:
        assert row["same_tokens"] and row["speedup_over_accelerate"] > 0
        assert row["planned_peak_bytes"]["gpu"] > 0 and row["held_peak_bytes"]["gpu"] > 0
    assert rows[-1]["same_tokens"] and rows[-1]["speedup_over_transformers"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_case_that_fails_states_why(tmp_path):
    row = larger._case("transformers", tmp_path, 1, None)
    assert row["skipped"].startswith("transformers did not end: ") and row["limited_by"] == "nothing"


def test_a_limit_that_no_plan_fits_leaves_the_peers_rows(tmp_path, monkeypatch):
    class Planner:
        def plan(self, batch, limit_bytes):
            raise PlanError(f"a model must fit {limit_bytes} bytes")

    monkeypatch.setattr(larger, "_case", lambda case, *_: {"tokens_per_second": 2.0, "tokens": [[1]], "of": case})
    rows = list(larger._rows(tmp_path, {"dense": Planner()}, 4, 100))
    assert [row["case"] for row in rows] == ["accelerate", "airllm", "dense"]
    assert rows[2]["skipped"] == "a model must fit 100 bytes" and rows[1]["speedup_over_accelerate"] == 1


def test_the_form_that_is_predicted_to_be_faster_is_chosen(tmp_path, monkeypatch):
    class Planner:
        folder = tmp_path

        def __init__(self, speed):
            self._plan = SimpleNamespace(peaks={}, prediction=SimpleNamespace(tokens_per_second=speed))

        def plan(self, batch, limit_bytes):
            return self._plan

    monkeypatch.setattr(larger, "_case", lambda case, *_: {"tokens_per_second": 2.0, "tokens": [[1]]})
    monkeypatch.setattr(larger, "write_plan", lambda *_: None)
    for dense, coded, chosen in ((3.0, 4.0, "coded"), (4.0, 3.0, "dense")):
        rows = larger._rows(tmp_path, {"dense": Planner(dense), "coded": Planner(coded)}, 4, 100)
        assert [row["case"] for row in rows if row.get("chosen")] == [chosen]
