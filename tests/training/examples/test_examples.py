"""The examples run, learn, and go on where they stopped."""

import json
import re
from pathlib import Path

import pytest
import torch

from nearflash.training.examples import deepspeed, plain, reinforce, trainer

DATA = Path(__file__).parents[2] / "data"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_plain(tmp_path, capsys):
    text = (DATA / "finetune.txt").read_bytes()
    whole = plain.train(text, tmp_path / "whole", 24, "host:update-smartssd")
    first = plain.train(text, tmp_path / "parts", 12, "host:update-smartssd")
    second = plain.train(text, tmp_path / "parts", 24, "host:update-smartssd")
    assert first + second == whole and whole[-1] < whole[0] - 1
    assert plain.main([str(DATA / "finetune.txt"), "--path", str(tmp_path / "new"), "--steps", "11"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("   10  ")


@pytest.mark.full
def test_trainer(tmp_path, capsys):
    common = [
        "--model",
        str(DATA / "doclm-7m"),
        "--text",
        str(DATA / "finetune.txt"),
        "--path",
        str(tmp_path / "state"),
    ]
    assert trainer.main([*common, "--output", str(tmp_path / "a"), "--steps", "4"]) == 0
    whole = losses(capsys.readouterr().out)
    resume = ["--resume", str(tmp_path / "a" / "checkpoint-2")]
    assert trainer.main([*common, "--output", str(tmp_path / "b"), "--steps", "4", *resume]) == 0
    assert len(whole) == 4 and losses(capsys.readouterr().out) == whole[2:]


def losses(out):
    return re.findall(r"'loss': '?([0-9.]+)", out)


def test_reinforce(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reinforce, "STEPS", 2)
    assert reinforce.main([str(DATA / "doclm-7m"), str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    memory = [[float(size) for size in re.findall(r"[0-9.]+(?=, | MB of)", line)[-3:]] for line in lines]
    assert memory[1][1] < memory[1][0] - 50, lines  # of 256 MiB of state that stays on the device between steps
    names = sorted(path.name for path in (tmp_path / "versions").glob("*.json"))
    assert names == ["version-00000001.json", "version-00000002.json"]


def test_deepspeed(tmp_path, capsys):
    config = {
        "bf16": {"enabled": True}, "gradient_clipping": 1.0, "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
                              "offload_param": {"device": "nvme"}},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(config))
    arguments = ["--config", str(tmp_path / "ds.json"), "--model", str(DATA / "doclm-7m")]
    assert deepspeed.main([*arguments, "--text", str(DATA / "finetune.txt"), "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "without effect here: train_batch_size, zero_optimization.stage"
    assert float(lines[-1].split()[1]) < float(lines[1].split()[1])
