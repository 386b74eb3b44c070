"""One of two ranks: runs every scenario and leaves what it found for the tests. Usage: ranks_worker.py RANK FOLDER"""

import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from nearflash.abi.errors import NearflashError
from nearflash.storage import StateStore
from nearflash.training.integrations import process_group
from nearflash.training.integrations.ranks import RankedOptimizer

BITS = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05, "extent_params": 1024}
"""Options of the scenario that one rank is to equal to the bit."""
rank, folder = int(sys.argv[1]), sys.argv[2]


class Branches(torch.nn.Module):
    """Three branches, of which a pass uses those that it names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(20, 3) for _ in range(3))

    def forward(self, x, which):
        return sum(self.parts[i](x) for i in which)


def net(out=3, frozen=False):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(20, 70), torch.nn.Tanh(), torch.nn.Linear(70, out))
    made[0].requires_grad_(not frozen)
    return made


def open_it(params, name, whose=rank, **options):
    return RankedOptimizer(params, path=f"{folder}/{name}{whose}", **({"lr": 1e-2, "extent_params": 1024} | options))


def batch(number, width=20):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(10 * number + rank))


def beside_torch(name, make, inputs, **options):
    """Our optimizer over the ranks and torch's on each, of the same averaged gradients."""
    nets = [make(), make()]
    mine, theirs = open_it(nets[0].parameters(), name), torch.optim.AdamW(nets[1].parameters(), lr=1e-2)
    for each, optimizer in zip(nets, (mine, theirs), strict=True):
        model = DistributedDataParallel(each, **options)
        for number, more in enumerate(inputs):
            optimizer.zero_grad()
            model(batch(number), *more).square().mean().backward()
            optimizer.step()
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return nets[0], mine, max(float((a - b).abs().max()) for a, b in pairs)


def message(call):
    try:
        made = call()
    except NearflashError as error:
        return f"{type(error).__name__}: {error}"
    if made is not None:
        made.close()
    return None


def bits():
    """Two steps, a crash between commits, a resume, a rank that fails, and the step after it."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))
    model, gradients = DistributedDataParallel(layers), []

    def step(number):
        optimizer.zero_grad()
        model(batch(number, 40)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer = open_it(model.parameters(), "bits", **BITS)
    step(0)
    step(1)
    if rank == 1:
        optimizer.local.rollback()  # as a crash between the commits of the ranks leaves them
    rate = optimizer.param_groups[0]["lr"]
    optimizer.close()
    optimizer = open_it(model.parameters(), "bits", resume=True, **BITS)
    assert optimizer.steps == 1
    optimizer.param_groups[0]["lr"] = rate * 2
    gradients.pop()
    step(1)
    step(2)
    store, error = optimizer.local._optimizer_state.store, None
    real = store.commit

    def fail(*_, **__):
        raise ValueError("no room")  # whatever it is, the other rank hears of it

    store.commit = fail if rank == 0 else real
    before = [p.detach().clone() for p in model.parameters()]
    try:
        step(3)
    except (NearflashError, ValueError) as raised:
        error = str(raised)
    store.commit = real
    assert optimizer.steps == 3 and all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    gradients.pop()
    full = optimizer.full_state_dict()
    step(3)
    found = {"gradients": gradients, "parameters": [p.detach() for p in model.parameters()], "full": full,
             "before": before, "error": error, "norm": optimizer.report.grad_norm}  # fmt: skip
    torch.save(found, f"{folder}/bits{rank}.pt")
    optimizer.close()


def frozen():
    _, optimizer, difference = beside_torch("frozen", lambda: net(frozen=True), [()] * 3)
    updates = [handle["step"] for handle in optimizer.state_dict()["state"].values() if handle["step"]]
    return optimizer.steps, difference, updates


def unused():
    inputs = [([0],), ([0, 1 + rank],), ([0, 1] if rank else [0, 2],), ([0, 1, 2],)]
    _, optimizer, difference = beside_torch("unused", Branches, inputs, find_unused_parameters=True)
    return optimizer.steps, difference


def lacking():
    """Averaged by hand: a rank has no gradient where its own loss has no part, as if it were zero."""
    tensors = [torch.nn.Parameter(torch.ones(40 + i)) for i in range(4)]
    optimizer = open_it(tensors, "lacking")
    for index, tensor in enumerate(tensors):
        tensor.grad = torch.full_like(tensor, 0.5) if (index + rank) % 2 or index == 3 else None
    optimizer.step()
    return optimizer.steps, [float(t[0]) for t in tensors], [t.grad is not None for t in tensors]


def without():
    optimizer = open_it(net().parameters(), "without")
    optimizer.step()
    return optimizer.steps


def not_averaged():
    model = net()
    optimizer = open_it(model.parameters(), "plain")
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(0)).square().mean().backward()
    text = message(optimizer.step)
    return text, optimizer.steps, all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def sparse():
    table = torch.nn.Embedding(9, 4, sparse=True)
    optimizer = open_it([table.weight, torch.nn.Parameter(torch.ones(3))], "sparse")
    if rank:
        table(torch.tensor([1])).sum().backward()
    return message(optimizer.step)


def overflow():
    model = net()
    optimizer = open_it(model.parameters(), "overflow", loss_scale="dynamic")
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    list(model.parameters())[3].grad[0] = float("inf")
    scales = []
    for _ in range(2):
        optimizer.step()
        scales.append(optimizer.loss_scale)
    return optimizer.steps, scales, optimizer.report.skipped_steps


def files():
    """Of two runs, on the wrong ranks, on one rank only, of another number of ranks."""

    def params():
        return list(net(70).parameters())

    for name in ("a", "b"):
        tensors = params()
        with open_it(tensors, name) as optimizer:
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
            optimizer.step()
    alone = [distributed.new_group([each]) for each in range(2)][rank]
    cases = {
        "swapped": lambda: open_it(params(), "a", 1 - rank, resume=True),
        "two runs": lambda: open_it(params(), "ab"[rank], resume=True),
        "same": lambda: open_it(params(), "a", resume=True),
        "one rank, auto": lambda: open_it(params(), "a" if rank else "new", resume="auto"),
        "one rank, new": lambda: open_it(params(), "a" if rank else "new"),
        "another folder": lambda: open_it(params(), "none/" if rank else "new"),
        "fewer": lambda: open_it(params(), "a", resume=True, group=alone),
    }
    return {name: message(case) for name, case in cases.items()}, Path(folder, f"new{rank}").exists()


def released():
    """What is refused meanwhile; a rank whose file is taken leaves all released; then the steps of one that was not."""
    found, nets = {}, [DistributedDataParallel(net(70)) for _ in range(2)]
    with open_it(nets[0].parameters(), "whole") as whole, open_it(nets[1].parameters(), "released") as optimizer:
        for number in range(3):
            for model, one in zip(nets, (whole, optimizer), strict=True):
                one.zero_grad()
                model(batch(number)).square().mean().backward()
                one.step()
            found["parameters"] = message(lambda: optimizer.release(parameters=True))
            optimizer.release(unlock=True)
            distributed.barrier()
            found["step"] = message(optimizer.step)
            found["state_dict"] = message(lambda: optimizer.state_dict() and None)
            found["rollback"] = message(optimizer.rollback)
            with StateStore.open([Path(folder, "released1")]) if rank else nullcontext():
                found["taken"] = message(optimizer.acquire)
            found["still"] = message(optimizer.step)
            optimizer.acquire()
            found["acquired"] = message(optimizer.acquire)
        found["same"] = all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        return found | {"steps": optimizer.steps}


def restored():
    """Back to a snapshot, and the same steps again; a folder without one changes nothing."""
    model = DistributedDataParallel(net(70))
    with open_it(model.parameters(), "restored") as optimizer:
        values = []
        for number in (0, 1, 2, None, 1, 2):
            if number is None:
                missing = message(lambda: optimizer.restore(f"{folder}/no-snapshot") and None)
                steps = optimizer.steps, optimizer.restore(f"{folder}/snapshot")
                continue
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            optimizer.step()
            values.append([p.detach().clone() for p in model.parameters()])
            if len(values) == 1:
                optimizer.snapshot(f"{folder}/snapshot")
        same = all(torch.equal(a, b) for i in (1, 2) for a, b in zip(values[i], values[i + 2], strict=True))
        return missing, steps, same, optimizer.steps


def disagree():
    """Ranks of other models, of steps that are two apart, one whose file is gone, and one that does not come."""
    found = {"layout": message(lambda: open_it(net(70 + rank).parameters(), "layout"))}
    found["left"] = Path(folder, f"layout{rank}").exists()
    model = net(70)
    with open_it(model.parameters(), "apart") as optimizer:
        for number in range(3):
            for tensor in model.parameters():
                tensor.grad = torch.ones_like(tensor)
            optimizer.step()
            if number == 0:
                (saved,) = optimizer.store.snapshot(Path(folder, f"saved{rank}"))
    if rank:
        saved.replace(Path(folder, "apart1"))
    found["steps"] = message(lambda: open_it(net(70).parameters(), "apart", resume=True))
    Path(folder, "apart1").unlink(missing_ok=True)
    distributed.barrier()
    found["missing"] = message(lambda: open_it(net(70).parameters(), "apart", resume=True))
    short = distributed.new_group(timeout=timedelta(seconds=2))
    model = net(70)
    optimizer = open_it(model.parameters(), "absent", group=short)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    if rank:
        time.sleep(5)
    began = time.monotonic()
    found["absent"] = message(optimizer.step)
    return found | {"seconds": time.monotonic() - began}


def checkpoint():
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, optimizer, difference = beside_torch("dcp", net, [()] * 2)
    optimizer.param_groups[0]["lr"] = 0.125
    checkpoint.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=f"{folder}/dcp")
    optimizer.param_groups[0]["lr"] = 0.5
    state = get_optimizer_state_dict(model, optimizer)
    checkpoint.load(state, checkpoint_id=f"{folder}/dcp")
    set_optimizer_state_dict(model, optimizer, state)
    return optimizer.steps, difference, optimizer.param_groups[0]["lr"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    process_group._GRACE_S = 1.0
    warnings.simplefilter("error", FutureWarning)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    scenarios = (
        bits,
        frozen,
        unused,
        lacking,
        without,
        not_averaged,
        sparse,
        overflow,
        files,
        released,
        restored,
        disagree,
        checkpoint,
    )
    found = {scenario.__name__: scenario() for scenario in scenarios}
    Path(folder, f"found{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    os._exit(0)  # gloo's threads may wait for ever otherwise
