"""A transformers Trainer whose optimizer state is near storage.

    arguments = TrainingArguments(...)
    trainer = Trainer(model, arguments, ..., callbacks=[Snapshots()],
                      optimizer_cls_and_kwargs=trainer_optimizer(arguments, path="/nvme/state"))
    trainer.train()

A model in bf16 or fp16 needs param_dtype="bf16" or param_dtype="fp16". `optimizers=(optimizer, None)` works, too: then
the Trainer clips the gradients, and the optimizer's `max_grad_norm` must be None, or they are clipped twice.
overlap="backward" gains nothing here: the Trainer multiplies all gradients (by 1 where it does not clip) when backward
has ended, so that each speculative step is a misprediction.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from nearflash.training.integrations.checkpoints import FOLDER, restore
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.optimizer import NearStorageOptimizer

__all__ = ["Snapshots", "trainer_optimizer"]


def trainer_optimizer(
    arguments: TrainingArguments,
    *,
    path: str | Path | Sequence[str | Path],
    kind: type[NearStorageOptimizer] = NearStorageAdamW,
    checkpoint: str | Path | None = None,
    **options: Any,
) -> tuple[type[NearStorageOptimizer], dict[str, Any]]:
    """`optimizer_cls_and_kwargs` of a Trainer with these arguments; `options` are the optimizer's, and come first.

    Learning rate, betas and eps are those of `arguments`. Clipping becomes the optimizer's, which knows the norm
    anyway: arguments.max_grad_norm is 0 afterwards. resume is "auto" unless given.
    checkpoint: as the Trainer will resume from; its snapshot replaces the state. Raises as `restore`.
    """
    chosen: dict[str, Any] = {"path": path, "resume": "auto", "lr": arguments.learning_rate}
    if issubclass(kind, NearStorageAdamW):
        chosen |= {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    if arguments.max_grad_norm:
        chosen["max_grad_norm"] = arguments.max_grad_norm
        arguments.max_grad_norm = 0.0
    if checkpoint is not None:
        device = options.get("device", "")
        restore(checkpoint, path, devices=1 if isinstance(device, str) else len(device))
    return kind, chosen | options


class Snapshots(TrainerCallback):
    """At each save of the Trainer a snapshot of the state, in the folder `nearflash` of the checkpoint."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See TrainerCallback."""
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        optimizer.store.snapshot(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER)
