"""One of several ranks with a sharded model: runs every scenario and leaves what it found.

Usage: shards_worker.py RANK RANKS FOLDER
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from nearflash.abi.errors import NearflashError
from nearflash.training.integrations.shards import ShardedOptimizer

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "extent_params": 1024}


def net(mesh=None):
    """Three ranks have 17, 17 and 16 rows of the first matrix; of two rows of the last one, one has none."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    for layer in (*made, made):
        fully_shard(layer, mesh=mesh or init_device_mesh("cpu", (ranks,)))
    return made


def open_it(model, name, **options):
    (folder / name).mkdir(exist_ok=True)
    return ShardedOptimizer(model.parameters(), path=folder / name, **(OPTIONS | options))


def whole(tensors):
    return [tensor.full_tensor().detach().clone() for tensor in tensors]


def train(model, optimizer, number):
    """One step of a batch that each rank has its own of; returns the whole gradients."""
    optimizer.zero_grad()
    batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * number + rank))
    model(batch).square().sum().backward()
    gradients = whole(parameter.grad for parameter in model.parameters())
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5
    return gradients


def message(call):
    try:
        call()
    except NearflashError as error:
        return f"{type(error).__name__}: {error}"
    return None


def bits():
    """Steps, a crash between commits, a resume, a rank that fails; the state, whole, for one rank to go on from."""
    model = net()
    optimizer = open_it(model, "bits")
    gradients = [train(model, optimizer, 0), train(model, optimizer, 1)]
    if rank == min(1, ranks - 1):
        optimizer.local.rollback()  # as a crash between the commits of the ranks leaves them
    rate = optimizer.param_groups[0]["lr"]
    optimizer.close()
    optimizer = open_it(model, "bits", resume=True)
    assert optimizer.steps == 1 and optimizer.state
    optimizer.param_groups[0]["lr"] = rate * 2
    gradients[1] = train(model, optimizer, 1)
    store, before = optimizer.local._optimizer_state.store, whole(model.parameters())
    real = store.commit

    def fail(*_, **__):
        raise ValueError("no room")

    store.commit = fail if rank == 0 else real
    try:
        error = train(model, optimizer, 2)
    except (NearflashError, ValueError) as raised:
        error = str(raised)
    store.commit = real
    unchanged = all(torch.equal(a, b) for a, b in zip(before, whole(model.parameters()), strict=True))
    full = optimizer.full_state_dict()
    state = {
        index: {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}
        for index, values in full["state"].items()
    }
    gradients.append(train(model, optimizer, 2))
    torch.save(
        {"gradients": gradients, "before": before, "after": whole(model.parameters()), "error": error,
         "unchanged": unchanged, "full": {**full, "state": state}},
        folder / f"bits{rank}.pt",
    )  # fmt: skip
    optimizer.close()
    return [values["step"] for values in optimizer.state.values()]


def norm():
    """Of all shards, and of replicas once; beside torch's optimizer over the same shards, which torch clips."""
    found = []
    replicated = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicas", "shards"))
    for number, (mesh, limit) in enumerate([(None, 0.05), (replicated, 0.05), (None, None)]):
        mine, theirs = net(mesh), net(mesh)
        optimizer = open_it(mine, f"norm{number}", max_grad_norm=limit)
        other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
        for turn in range(3):
            for model, one in ((mine, optimizer), (theirs, other)):
                one.zero_grad()
                batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * turn + rank))
                model(batch).square().sum().backward()
            for model in (theirs, *([mine] if limit is None else [])):
                total = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
            optimizer.step()
            other.step()
        pairs = zip(whole(mine.parameters()), whole(theirs.parameters()), strict=True)
        ratio = optimizer.report.grad_norm / (total if limit else min(total, 0.05))
        found.append([ratio, max(float((a - b).abs().max()) for a, b in pairs)])
        optimizer.close()
    return found


def checkpoints():
    """Save at step 2, go on, restore in another process's place: the same third step."""
    model = net()
    optimizer = open_it(model, "steps")
    for number in range(2):
        train(model, optimizer, number)
    saved = whole(model.parameters())
    checkpoint.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "dcp")
    optimizer.snapshot(folder / "snapshot")
    checkpoint.save(optimizer.full_state_dict()["state"][0], checkpoint_id=folder / "dcp-state")
    train(model, optimizer, 2)
    third = whole(model.parameters())
    refused = message(lambda: load_settings(model, optimizer))
    assert optimizer.restore(folder / "snapshot") == 2
    restored = whole(model.parameters())
    rate = optimizer.param_groups[0]["lr"]
    load_settings(model, optimizer)
    loaded = optimizer.param_groups[0]["lr"]
    train(model, optimizer, 2)
    values = optimizer.full_state_dict()["state"][0]
    checkpoint.load(values, checkpoint_id=folder / "dcp-state")
    optimizer.close()
    return {
        "refused": refused,
        "restored": all(torch.equal(a, b) for a, b in zip(saved, restored, strict=True)),
        "third": all(torch.equal(a, b) for a, b in zip(third, whole(model.parameters()), strict=True)),
        "lr": [rate, loaded],
        "step": float(values["step"]),
    }


def released():
    """Between the steps of one of two runs."""
    models = [net(), net()]
    with open_it(models[0], "whole") as whole_run, open_it(models[1], "released") as optimizer:
        for number in range(3):
            train(models[0], whole_run, number)
            train(models[1], optimizer, number)
            optimizer.release()
            found = {"step": message(optimizer.step), "snapshot": message(lambda: optimizer.snapshot(folder / "none"))}
            optimizer.acquire()
        pairs = zip(whole(models[0].parameters()), whole(models[1].parameters()), strict=True)
        return found | {"same": all(torch.equal(a, b) for a, b in pairs)}


def partitions():
    """As DeepSpeed's engine: each rank's own part of a flat tensor in the place of the model's; and replicas."""
    norms = []
    for name, size in (("partition", 30), ("replica", 60)):
        (folder / name).mkdir(exist_ok=True)
        given = [torch.nn.Parameter(torch.ones(60))]
        with ShardedOptimizer(given, path=folder / name, max_grad_norm=1.0, **OPTIONS) as optimizer:
            optimizer.param_groups[0]["params"] = [own := torch.nn.Parameter(torch.ones(size))]
            own.grad = torch.full_like(own, 1.0 + rank if size == 30 else 1.0)
            optimizer.step()
            norms.append(optimizer.report.grad_norm**2)
    return norms


def load_settings(model, optimizer):
    state = get_optimizer_state_dict(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    set_optimizer_state_dict(model, optimizer, state)


def whole_states():
    """Whole tensors, and those sharded otherwise, into an optimizer of shards."""
    model = net()
    with open_it(model, "from") as first:
        train(model, first, 0)
        full = first.full_state_dict()
        wanted = {index: first.local.full_state_dict()["state"][index]["exp_avg"] for index in range(4)}
    found = []
    for change in (lambda value: value.full_tensor(), lambda value: value.redistribute(placements=[Replicate()])):
        state = {
            index: {name: change(value) if isinstance(value, DTensor) else value for name, value in values.items()}
            for index, values in full["state"].items()
        }
        with open_it(model, f"to{len(found)}") as second:
            second.load_full_state_dict({**full, "state": state})
            own = second.local.full_state_dict()["state"]
            found.append(all(torch.equal(own[index]["exp_avg"], values) for index, values in wanted.items()))
    return found


def refused():
    """Placements, gradients and memory that do not fit."""
    model, mesh = net(), init_device_mesh("cpu", (ranks,))
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    optimizer = open_it(model, "refused")
    found = {"partial": message(lambda: ShardedOptimizer([partial], path=folder, lr=1e-2))}
    first = next(iter(model.parameters()))
    first.grad = DTensor.from_local(torch.ones(50, 40), mesh, [Replicate()]) if rank else None
    found["some"] = message(optimizer.step)
    first.grad = DTensor.from_local(torch.ones(50, 40), mesh, [Replicate()])
    found["replicated"] = message(optimizer.step)
    full = optimizer.full_state_dict()
    full["state"] = {0: {"exp_avg": torch.ones(3)}}
    found["shape"] = message(lambda: optimizer.load_full_state_dict(full))
    first.grad = None
    first._local_tensor = first._local_tensor.clone()
    found["moved"] = message(optimizer.step)
    found["steps"] = optimizer.steps
    optimizer.close()
    found["rate"] = message(lambda: open_it(model, "rate", lr=-1.0 if rank == 0 else 1.0))
    found["left"] = (folder / "rate" / f"rank{rank}.state").exists()
    return found


def lost():
    """The last rank is killed within a step: the others are told, and do not wait for ever."""
    model = net()
    optimizer = open_it(model, "lost")
    train(model, optimizer, 0)
    if rank == ranks - 1:
        optimizer.local.step = lambda: os._exit(0)
    found = {"lost": message(lambda: train(model, optimizer, 1))}
    optimizer.close()
    (folder / f"lost{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    scenarios = (bits, norm, checkpoints, whole_states, released, partitions, refused)
    found = {scenario.__name__: scenario() for scenario in scenarios}
    (folder / f"found{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    lost()
    os._exit(0)  # without the others, to whom the group would speak
