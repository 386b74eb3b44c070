"""A few steps of each case, and what the rows say of them."""

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.training import curves


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(curves, "WINDOW", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.full
def test_rows(tmp_path):
    rows = {
        row["case"]: row for row in curves.run(["fp32-state", "topk", "torch-memory"], steps=10, path=tmp_path / "new")
    }
    assert next(iter(rows)) == "torch-memory" and rows["torch-memory"]["last_loss_over_torch_percent"] == 0
    exact, sparse = rows["fp32-state"], rows["topk"]
    assert abs(exact["last_loss_over_torch_percent"]) < 0.01 and exact["gradient_bytes_per_param"] == 4
    assert exact["loss_by_tenth"] == pytest.approx(rows["torch-memory"]["loss_by_tenth"], rel=1e-4)
    assert 0.66 < sparse["gradient_bytes_per_param"] < 0.68  # 1 % of the gradients, and 4 bits of what is left out
    assert sparse["loss_by_tenth"] != exact["loss_by_tenth"]
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.full
def test_muon_from_random_weights_is_torchs(tmp_path):
    mine, theirs = "muon", "torch-muon"
    rows = {row["case"]: row for row in curves.run([mine, theirs], weights="random", steps=10, path=tmp_path)}
    assert rows[mine]["torch_case"] == theirs and abs(rows[mine]["last_loss_over_torch_percent"]) < 0.1
    assert rows[mine]["loss_by_tenth"][0] == rows[theirs]["loss_by_tenth"][0]
    assert len({*rows[theirs]["loss_by_tenth"]}) == 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parts": ["fp4-state"]}, "parts must be of torch-memory, .*, not fp4-state"),
        ({"model": "gpt"}, "model must be doclm-7m or doclm-30m, not 'gpt'"),
        ({"model": "gpt", "weights": "random"}, "model must be doclm-7m or doclm-30m, not 'gpt'"),
        ({"weights": "old"}, "weights must be of trained, random, not old"),
        ({"steps": 25}, "steps must be a multiple of 10, not 25"),
        ({"model": "doclm-30m"}, "where NEARFLASH_MODELS, a folder with doclm-30m, is not set"),
    ],
)
def test_unknown_names(options, message, monkeypatch):
    monkeypatch.delenv("NEARFLASH_MODELS", raising=False)
    with pytest.raises(CommandError, match=message):
        list(curves.run(**options))
