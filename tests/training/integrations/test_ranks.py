"""Two ranks give the bits of one; a crash between their commits, a failure of one, another number of ranks."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, NonFiniteError, StateError
from nearflash.training import NearStorageAdamW
from nearflash.training.integrations.ranks import RankedOptimizer, assign_ranks

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "extent_params": 1024}

RANK = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from nearflash.abi.errors import NearflashError
from nearflash.training.integrations.ranks import RankedOptimizer

rank, folder, options = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
model, gradients = DistributedDataParallel(net), []

def open_it(resume):
    return RankedOptimizer(model.parameters(), path=f"{folder}/state{rank}", resume=resume, **options)

def step(number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 40, generator=generator)).square().sum().backward()
    gradients.append([p.grad.clone() for p in model.parameters()])
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5

optimizer = open_it(False)
step(0); step(1)
if rank == 1:
    optimizer.local.rollback()  # as a crash between the commits of the ranks leaves them
rate = optimizer.param_groups[0]["lr"]
optimizer.close()
optimizer = open_it(True)
assert optimizer.steps == 1
optimizer.param_groups[0]["lr"] = rate * 2
gradients.pop()
step(1); step(2)
failing, error = optimizer.local._optimizer_state.store, None
if rank == 0:
    def fail(*_): raise ValueError("no room")  # whatever it is, the other rank hears of it
    failing.commit, real = fail, failing.commit
before = [p.detach().clone() for p in model.parameters()]
try:
    step(3)
except (NearflashError, ValueError) as raised:
    error = str(raised)
if rank == 0:
    failing.commit = real
assert optimizer.steps == 3 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
gradients.pop()
full = optimizer.full_state_dict()
step(3)
torch.save({"gradients": gradients, "parameters": [p.detach() for p in model.parameters()], "full": full,
            "before": before, "error": error, "norm": optimizer.report.grad_norm}, f"{folder}/rank{rank}.pt")
optimizer.close()
distributed.destroy_process_group()
"""


def parameters():
    torch.manual_seed(0)
    return list(torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).parameters())


def advance(optimizer, tensors, gradients):
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.clone()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def same(one, other):
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(one, other, strict=True))


def test_two_ranks(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path), repr(OPTIONS)], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=280)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert same(found[0]["parameters"], found[1]["parameters"])
    assert found[0]["error"] == "no room" and "must work on every rank, and failed on [0]" in found[1]["error"]
    gradients = found[0]["gradients"]
    assert len(gradients) == 4 and all(same(a, b) for a, b in zip(gradients, found[1]["gradients"], strict=True))

    tensors = parameters()
    with NearStorageAdamW(tensors, path=tmp_path / "one", **OPTIONS) as single:
        for step, given in enumerate(gradients):
            if step == 3:
                assert same(tensors, found[0]["before"])
            advance(single, tensors, given)
        assert same(tensors, found[0]["parameters"]) and single.report.grad_norm == found[0]["norm"] > 0.05

    resharded = parameters()
    with torch.no_grad():
        for tensor, value in zip(resharded, found[0]["before"], strict=True):
            tensor.copy_(value)
    with NearStorageAdamW(resharded, path=tmp_path / "resharded", **OPTIONS) as other:
        other.load_full_state_dict(found[1]["full"])
        advance(other, resharded, gradients[3])
    assert same(resharded, found[0]["parameters"])


def test_largest_first():
    assert assign_ranks([10, 1, 6, 5], 2) == [0, 0, 1, 1]
    assert assign_ranks([1, 1, 1], 1) == [0, 0, 0] and sorted(assign_ranks([0, 0], 2)) == [0, 1]


def test_one_rank_is_the_optimizer(tmp_path):
    mine, theirs = parameters(), parameters()
    generator = torch.Generator().manual_seed(1)
    groups = [[{"params": tensors[:1], "lr": 1.0}, {"params": tensors[1:]}] for tensors in (mine, theirs)]
    with (
        RankedOptimizer(groups[0], path=tmp_path / "a", **OPTIONS) as a,
        NearStorageAdamW(groups[1], path=tmp_path / "b", **OPTIONS) as b,
    ):
        for _ in range(3):
            gradients = [torch.randn(tensor.shape, generator=generator) for tensor in mine]
            advance(a, mine, gradients)
            advance(b, theirs, gradients)
        assert same(mine, theirs) and a.steps == b.steps == 3
        assert a.param_groups[1]["betas"] == (0.9, 0.999)
        full = a.full_state_dict()["state"]
        assert all(np.array_equal(full[i]["exp_avg"], b.full_state_dict()["state"][i]["exp_avg"]) for i in full)
        a.load_full_state_dict(b.full_state_dict())
        a.load_state_dict(a.state_dict())
        mine[0].grad[0, 0] = float("nan")
        with pytest.raises(NonFiniteError, match="gradients must be finite"):
            a.step()
        with pytest.raises(StateError, match="must be complete when ranks divide them"):
            a.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_what_ranks_cannot_do(tmp_path):
    with pytest.raises(CommandError, match="overlap must be 'step' with ranks, not 'backward'"):
        RankedOptimizer(parameters(), path=tmp_path / "x", overlap="backward")
    assert list(tmp_path.iterdir()) == []
