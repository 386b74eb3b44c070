"""Two ranks with half of the layers each give the tokens of one; and the command that they are started with."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.cli import main as cli
from nearflash.offload import generate
from nearflash.offload.commands.options import shares
from nearflash.offload.schedule.pipeline import PipelineStage, place_rank
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.stages import STATES_SENT, TOKENS_SENT

PROMPT, NEW = 64, 5


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks on GPUs need a machine with two of them")
def test_two_ranks_have_a_gpu_each(saved, prompt_file, plain):
    folder, model = saved("llama")
    rows, file = prompt_file
    assert start(2, folder, file, "--device", "cuda", "--weights", "host=1", "--batch-size", "4")[0] == plain(
        model, rows, 4, 9
    )


def print_rows(folder, file, *options):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(["generate", "--json", "--model", folder, "--prompts", file, "--max-new-tokens", 9, *options])
    return code, [json.loads(line)["tokens"] for line in output.getvalue().splitlines()]


def test_ranks_draw_the_same_tokens(saved, prompt_file, fork_ranks):
    folder, _ = saved("llama")
    rows, file = prompt_file
    drawn = ["--temperature", "1.3", "--seed", "4"]
    printed = fork_ranks(print_rows, folder, file, *drawn, "--weights", "disk=1", "--batch-size", "4")
    assert printed[1] == (0, [])
    code, found = printed[0]
    assert code == 0
    policy = OffloadPolicy(4, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1))
    assert found == generate(folder, rows, policy, max_new_tokens=9, temperature=1.3, seed=4).tokens


def count_bytes(folder, rows, policy, scratch):
    return generate(folder, rows, policy, max_new_tokens=NEW, stop_tokens=(), scratch=scratch).report.link_bytes


@pytest.mark.parametrize(
    ("num_batches", "weights", "cache", "activations"),
    [
        (2, Shares(disk=1), Shares(disk=1), Shares(disk=1)),
        (3, Shares(gpu=0.5, disk=0.5), Shares(host=1), Shares(gpu=1)),
    ],
    ids=["all on disk", "half of the weights, groups of two and of one batch"],
)
def test_bytes_of_two_ranks_are_the_plans(saved, tmp_path, fork_ranks, num_batches, weights, cache, activations):
    pytest.importorskip("scipy")
    from nearflash.offload.machine.plan import model_shape
    from nearflash.planning.pipeline import plan_pipeline
    from nearflash.planning.profile import load_machine
    from nearflash.planning.terms import Workload

    folder, _ = saved("llama", num_hidden_layers=5, hidden_size=256, eos_token_id=None)
    policy = OffloadPolicy(4, num_batches, weights, cache, activations, cpu_attention=True)
    rows = torch.randint(3, 97, (policy.block_size, PROMPT), generator=torch.Generator().manual_seed(2)).tolist()
    plan = plan_pipeline(model_shape(folder)[0], load_machine("gpu24"), Workload(PROMPT, NEW), policy, 2)
    found = fork_ranks(count_bytes, folder, rows, policy, tmp_path)
    for rank, stage in enumerate(plan.stages):
        planned = {link: size * policy.block_size * NEW for link, size in stage.prediction.bytes_per_token.items()}
        names = {link for link in {*planned, *found[rank]} if "gpu" not in link}  # memory of one machine: no link
        assert names >= {"weights disk to host", (STATES_SENT, TOKENS_SENT)[rank]}
        for link in names:
            assert found[rank].get(link, 0) == pytest.approx(planned.get(link, 0), rel=0.02), (rank, link)


def test_one_rank_owns_all_layers():
    stage = PipelineStage(0, 1, 4)
    assert stage.is_last and all(stage.owns(number) for number in range(4)) and not stage.owns(4)


def test_layers_are_split_evenly():
    bounds = [(each.first, each.end) for each in (PipelineStage(rank, 3, 8) for rank in range(3))]
    assert bounds == [(0, 2), (2, 5), (5, 8)]
    assert [PipelineStage(1, 3, 8).owns(number) for number in (1, 2, 4, 5)] == [False, True, True, False]
    assert PipelineStage(2, 3, 8).is_last and not PipelineStage(1, 3, 8).is_last
    with pytest.raises(CommandError, match="ranks must be between 1 and 2"):
        PipelineStage(0, 3, 2)


def test_a_rank_has_the_gpu_of_its_local_number(monkeypatch):
    assert place_rank("cuda:1", 4) == "cuda:1"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert place_rank("cpu", 0) == "cpu" and place_rank("cuda", 2) == "cuda:1"
    with pytest.raises(CommandError, match="must have a GPU each: local rank 1 finds 1 GPUs"):
        place_rank("cuda", 1)
    with pytest.raises(CommandError, match=r"device must be cuda with several ranks, .* not cuda:1"):
        place_rank("cuda:1", 2)


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
