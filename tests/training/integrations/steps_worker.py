"""One of several ranks with a sharded model, which goes on to step LAST from where its files are.

Every step has gradients of its own, whole and the same for any number of ranks, so that bits can be compared.
Usage: steps_worker.py FOLDER LAST [--rank R --ranks N] [--save N] [--kill STEP [--kill_one RANK]] [--resume STEP]
[--pause SECONDS] [--master split]; torchrun says itself which rank it is; of its restarts only the first run is killed.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nearflash.training.integrations.shards import ShardedOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("last", type=int)
for option in ("rank", "ranks", "save", "kill", "kill_one", "resume"):
    parser.add_argument(f"--{option}", type=int)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--master", default="fp32", help="split: the first layer is bf16")


def net(dtype):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
    made[0].to(dtype)
    for layer in (*made, made):
        fully_shard(layer, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return made


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    optimizer.step()


def save(model, optimizer, folder):
    """By torch.distributed.checkpoint what is the script's, and a snapshot of the state beside it."""
    optimizer.snapshot(folder / "optimizer")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=folder / "dcp")


def load(model, optimizer, folder):
    """Back to a checkpoint, whatever step the files are at."""
    optimizer.restore(folder / "optimizer")
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def main():
    options = parser.parse_args()
    folder = options.folder
    rank = int(os.environ["RANK"]) if options.rank is None else options.rank
    torch.set_num_threads(1)
    if options.rank is None:
        distributed.init_process_group("gloo")
    else:
        meet = f"file://{folder}/meet"
        distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=options.ranks)
    model = net(torch.bfloat16 if options.master == "split" else torch.float32)
    optimizer = ShardedOptimizer(
        model.parameters(), path=folder, lr=1e-2, weight_decay=0.1, extent_params=1024, resume="auto",
        master=options.master,
    )  # fmt: skip
    if options.resume is not None:
        load(model, optimizer, folder / f"step-{options.resume}")
        assert optimizer.steps == options.resume
    print(f"begins at {optimizer.steps}", flush=True)
    while optimizer.steps < options.last:
        step(model, optimizer, optimizer.steps)
        time.sleep(options.pause)
        if options.save and optimizer.steps % options.save == 0:
            save(model, optimizer, folder / f"step-{optimizer.steps}")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if optimizer.steps == options.kill and first and options.kill_one in (None, rank):
            os.kill(os.getpid(), 9)
    values = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    if rank == 0:
        torch.save({"values": values, "steps": optimizer.steps}, folder / "result.pt")
    optimizer.close()
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at its own end the process group waits for the rank that was lost
