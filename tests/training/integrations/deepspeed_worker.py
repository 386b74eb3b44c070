"""One of two ranks under DeepSpeed's engine, whose loop is the same with torch's AdamW and with ours.

Usage: deepspeed_worker.py RANK FOLDER, with DeepSpeed's Python (`make baseline`).
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

from nearflash.training.integrations.shards import ShardedOptimizer

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def train(stage, bf16, make, steps, clipping=0.05):
    """The parameters after so many steps, and the optimizer's."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    model = model.bfloat16() if bf16 else model
    config = {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_clipping": clipping,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": bf16},
    }  # fmt: skip
    optimizer = make(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in steps:
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(batch.bfloat16() if bf16 else batch).square().mean())
        engine.step()
    return [parameter.detach().float() for parameter in model.parameters()]


def main():
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for stage in (1, 2):
        for bf16 in (False, True):
            name = f"stage {stage}, {'bf16' if bf16 else 'fp32'}"
            own = folder / name
            own.mkdir(exist_ok=True)
            made = []

            def near(parameters, own=own, made=made, **more):
                made.append(ShardedOptimizer(parameters, path=own, extent_params=1024, **OPTIONS, **more))
                return made[-1]

            theirs = train(stage, bf16, lambda p: torch.optim.AdamW(p, **OPTIONS), range(4))
            mine = train(stage, bf16, near, range(4))
            difference = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
            found[name] = [made[0].steps, difference]
            made[0].close()
    (folder / "clipped").mkdir(exist_ok=True)
    optimizer = []
    train(2, False, lambda p: optimizer.append(
        ShardedOptimizer(p, path=folder / "clipped", max_grad_norm=0.05, **OPTIONS)) or optimizer[0], range(1), 0.0,
    )  # fmt: skip
    found["norm"] = optimizer[0].report.grad_norm
    (folder / f"found{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
