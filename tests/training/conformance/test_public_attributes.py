"""Each public attribute of an optimizer, edited, saved and loaded as scripts do: as torch, or a named error.

What runs is in nearflash.training.checks, one behaviour after another; `python -m nearflash.training.checks` prints
what came of each as a table.
"""

import itertools

import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.training import NearStorageAdamW, NearStorageSGD
from nearflash.training.checks import BEHAVIOURS, BehaviourResult, compare
from nearflash.training.integrations.ranks import RankedOptimizer

KINDS = {
    "one, step": (NearStorageAdamW, torch.optim.AdamW, {}),
    "one, backward": (NearStorageAdamW, torch.optim.AdamW, {"overlap": "backward"}),
    "ranks": (RankedOptimizer, torch.optim.AdamW, {}),
    "SGD": (NearStorageSGD, torch.optim.SGD, {"momentum": 0.9}),
}
REJECTED = {
    "parameters written after a step",
    "p.data written after a step",
    "two Parameters in the same memory",
    'group["params"] edited',
    "load_state_dict at a later step",
    "copy.deepcopy of the optimizer",
    "optimizer.state.clear()",
    "optimizer.state.pop(parameter)",
    "optimizer.state = {}",
    'state[p]["exp_avg"] = zeros',
    'state[p]["step"] = 0',
    "param_groups: the last parameter removed",
    "param_groups.clear()",
    "param_groups: a group appended by hand",
}
"""What is a named error; each has a way on in its message."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    ["one, backward", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("ranks", "one, step", "SGD"))],
)
def test_each_behaviour(tmp_path, kind):
    mine, theirs, options = KINDS[kind]
    numbers = itertools.count()
    shared = {"lr": 0.01} | {key: value for key, value in options.items() if key == "momentum"}

    def make(params):
        return mine(params, path=tmp_path / str(next(numbers)), extent_params=1024, **(shared | options))

    rows = [BehaviourResult(text, *compare(text, make, lambda params: theirs(params, **shared))) for text in BEHAVIOURS]
    assert [row for row in rows if row.outcome == "differs"] == []
    assert {row.behaviour for row in rows if row.outcome == "rejected"} == REJECTED


@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor(1), 1.0, None, True])
def test_handles_of_other_kinds(open_optimizer, value):
    tensor = torch.nn.Parameter(torch.ones(5))
    optimizer = open_optimizer([tensor])
    tensor.grad = torch.ones(5)
    optimizer.step()
    optimizer.state[tensor]["step"] = value
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(StateError, match="load_full_state_dict"):
            call()
    assert optimizer.steps == 1
    optimizer.load_full_state_dict(optimizer.full_state_dict())
    optimizer.step()
