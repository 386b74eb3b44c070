"""One of several ranks whose model accelerate or a Trainer shards, beside the same loops with torch's optimizer.

Usage: late_worker.py RANK RANKS FOLDER
"""

import json
import os
import sys
from pathlib import Path

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}  # fmt: skip

import torch  # noqa: E402
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from nearflash.training.integrations.accelerate import save_snapshots  # noqa: E402
from nearflash.training.integrations.shards import ShardedOptimizer  # noqa: E402
from nearflash.training.integrations.trainer import Snapshots, trainer_optimizer  # noqa: E402

OPTIONS = {"extent_params": 1024}


def plugin(**policy):
    return FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **policy)


def force_fsdp(chosen):
    """accelerate ignores the plugin on a CPU, and forgets what is set here whenever it makes a state."""
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": chosen}


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))


def whole(model):
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def close_to(mine, theirs):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(whole(mine), whole(theirs), strict=True))


def accelerated(kind, **options):
    """Two accumulated steps, clipped by accelerate; returns the model, the optimizer and the accelerator."""
    chosen = plugin(auto_wrap_policy="size_based_wrap", min_num_params=500)
    accelerator = Accelerator(cpu=True, fsdp_plugin=chosen, gradient_accumulation_steps=2)
    force_fsdp(chosen)
    model = net()
    own = kind(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)
    model, optimizer = accelerator.prepare(model, own)
    for number in range(4):
        with accelerator.accumulate(model):
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * number + rank))
            accelerator.backward(model(batch).square().sum())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return model, own, accelerator


def with_accelerate():
    theirs, _, _ = accelerated(torch.optim.AdamW)
    mine, own, accelerator = accelerated(ShardedOptimizer, path=folder, **OPTIONS)
    found = {"accelerate": own.steps == 2 and close_to(mine, theirs)}
    save_snapshots(accelerator, own)
    force_fsdp(accelerator.state.fsdp_plugin)
    accelerator.save_state(str(folder / "saved"))
    before = whole(mine)
    force_fsdp(accelerator.state.fsdp_plugin)
    accelerator.load_state(str(folder / "saved"))
    same = all(torch.equal(a, b) for a, b in zip(before, whole(mine), strict=True))
    own.close()
    AcceleratorState._reset_state()
    return found | {"reloaded": same and (folder / "saved").is_dir()}


class ShardingTrainer(Trainer):
    """A Trainer that takes its plugin on a CPU, too."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            force_fsdp(self.plugin)
            self.is_fsdp_enabled = True

    def _save_checkpoint(self, *arguments, **keywords):
        if self.args.fsdp:
            force_fsdp(self.plugin)
        return super()._save_checkpoint(*arguments, **keywords)


class LoadedSharded(LlamaForCausalLM):
    """A model that transformers has loaded as shards."""

    is_distributed_loading_by_transformers = True
    _is_fsdp_managed_module = True


def trained(name, fsdp, near, **more):
    """A Trainer's run of four steps: its model and optimizer."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, use_cache=False)  # fmt: skip
    model = (LlamaForCausalLM if fsdp else LoadedSharded)(config)
    ids = torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(5))
    arguments = TrainingArguments(
        output_dir=str(folder / name), learning_rate=1e-2, max_steps=4, per_device_train_batch_size=2, report_to=[],
        save_steps=2, save_strategy="steps" if near and fsdp else "no", disable_tqdm=True, use_cpu=True, seed=1,
        max_grad_norm=0, dataloader_pin_memory=False, lr_scheduler_type="constant",
        fsdp=fsdp,
    )  # fmt: skip
    if not fsdp:
        for layer in (*model.model.layers, model):
            fully_shard(layer)
    ShardingTrainer.plugin = plugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    options = {"callbacks": [Snapshots()]} if near else {}
    if near:
        path = folder / f"{name}-state"
        options["optimizer_cls_and_kwargs"] = trainer_optimizer(arguments, path=path, sharded=True, **OPTIONS, **more)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = ShardingTrainer(model, arguments, train_dataset=rows, **options)
    trainer.train(resume_from_checkpoint=str(more["checkpoint"]) if "checkpoint" in more else None)
    AcceleratorState._reset_state()
    return trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def with_trainer():
    found = {}
    for name, fsdp in (("swap", True), ("sharded", False)):
        mine, optimizer = trained(name, fsdp, near=True)
        theirs, _ = trained(f"{name}-torch", fsdp, near=False)
        assert all(isinstance(parameter, DTensor) for parameter in mine.parameters())
        found[name] = [optimizer.steps, close_to(mine, theirs)]
        optimizer.close()
        if fsdp:
            again, optimizer = trained(name, fsdp, near=True, checkpoint=folder / name / "checkpoint-2")
            found["resumed"] = all(torch.equal(a, b) for a, b in zip(whole(mine), whole(again), strict=True))
            optimizer.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    found = with_accelerate() | with_trainer()
    (folder / f"late{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)  # without the others, to whom the group would speak
