"""Two ranks with half of the layers each give the tokens of one; and the command that they are started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.cli import main as cli
from nearflash.offload import generate
from nearflash.offload.commands.options import shares
from nearflash.offload.schedule.pipeline import PipelineStage
from nearflash.planning.policy import OffloadPolicy, Shares


def main(argv):
    return cli.main([str(each) for each in argv])


def start(ranks, folder, file, *options):
    program = str(Path(sys.executable).with_name("nearflash"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--no-python", program, "generate", "--json",
               "--model", str(folder), "--prompts", str(file), "--max-new-tokens", "9", *options]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [row["tokens"] for row in rows], done.stderr


@pytest.fixture
def prompt_file(prompts, tmp_path):
    rows = prompts(7)
    file = tmp_path / "prompts"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows, file


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ["--weights", "disk=1", "--cache", "gpu=0.5,disk=0.5", "--batch-size", "2", "--num-batches", "2"]),
        ("gemma2", ["--weights", "gpu=1", "--activations", "disk=1", "--batch-size", "3", "--num-batches", "1"]),
    ],
)
def test_two_ranks_give_the_tokens_of_one(saved, prompt_file, plain, family, options):
    folder, model = saved(family)
    rows, file = prompt_file
    found, log = start(2, folder, file, *options)
    assert found == plain(model, rows, int(options[-3]), 9)
    assert "rank 0:" in log and "rank 1:" in log


def test_ranks_draw_the_same_tokens(saved, prompt_file):
    folder, _ = saved("llama")
    rows, file = prompt_file
    drawn = ["--temperature", "1.3", "--seed", "4"]
    found, _ = start(2, folder, file, *drawn, "--weights", "disk=1", "--batch-size", "4")
    policy = OffloadPolicy(4, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1))
    assert found == generate(folder, rows, policy, max_new_tokens=9, temperature=1.3, seed=4).tokens


def test_one_rank_owns_all_layers():
    stage = PipelineStage(0, 1, 4)
    assert stage.is_last and all(stage.owns(number) for number in range(4)) and not stage.owns(4)


def test_layers_are_split_evenly():
    bounds = [(each.first, each.end) for each in (PipelineStage(rank, 3, 8) for rank in range(3))]
    assert bounds == [(0, 2), (2, 5), (5, 8)]
    assert [PipelineStage(1, 3, 8).owns(number) for number in (1, 2, 4, 5)] == [False, True, True, False]
    assert PipelineStage(2, 3, 8).is_last and not PipelineStage(1, 3, 8).is_last
    with pytest.raises(CommandError, match="ranks must be at most 2"):
        PipelineStage(0, 3, 2)


def test_the_command_writes_results_and_a_trace(saved, prompt_file, plain, tmp_path, capsys):
    folder, model = saved("llama")
    rows, file = prompt_file
    results, trace = tmp_path / "results", tmp_path / "trace.json"
    options = ["--max-new-tokens", "5", "--weights", "disk=1", "--batch-size", "3"]
    options += ["--results", results, "--trace", trace]
    assert main(["generate", "--json", "--model", folder, "--prompts", file, *options]) == 0
    shown = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert shown == plain(model, rows, 3, 5)
    assert len(results.read_text().splitlines()) == 8
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_command_names_what_is_wrong(saved, prompt_file, tmp_path, capsys):
    _, file = prompt_file
    assert main(["generate", "--model", tmp_path, "--prompts", file, "--weights", "disk=1"]) == 2
    assert "config.json" in capsys.readouterr().err
    for wrong in ("gpu=2", "gpu", "disc=1", "gpu=0.5", "gpu=x"):
        with pytest.raises(SystemExit):
            main(["generate", "--model", tmp_path, "--prompts", file, "--weights", wrong])
    assert shares("gpu=0.25,disk=0.75") == Shares(gpu=0.25, disk=0.75)
