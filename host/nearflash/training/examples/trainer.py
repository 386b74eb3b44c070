"""transformers' Trainer with its optimizer's state on flash; with --resume it resumes from a checkpoint.

python -m nearflash.training.examples.trainer --model tests/data/doclm-7m --text tests/data/finetune.txt \
    --output build/tuned --path /nvme/state --steps 20
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import Trainer, TrainingArguments

from nearflash.training.finetune import load_model, load_tokens
from nearflash.training.integrations.trainer import Snapshots, trainer_optimizer

__all__ = ["main"]

WINDOW = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Train, with a checkpoint (and a snapshot of the state in it) half way and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--path", type=Path, required=True, help="state file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", type=Path, help="checkpoint folder")
    given = parser.parse_args(argv)
    model, tokenizer = load_model(given.model, "bf16")
    tokens = load_tokens(given.text, tokenizer, model.config.vocab_size)
    windows = [{"input_ids": window, "labels": window} for window in tokens.unfold(0, WINDOW, WINDOW)]
    arguments = TrainingArguments(
        output_dir=str(given.output), max_steps=given.steps, per_device_train_batch_size=2, learning_rate=5e-4,
        save_steps=max(1, given.steps // 2), logging_steps=1, report_to=[], dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=windows, callbacks=[Snapshots()],
        optimizer_cls_and_kwargs=trainer_optimizer(
            arguments, path=given.path, checkpoint=given.resume, param_dtype="bf16"
        ),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(given.resume) if given.resume else None)
    trainer.optimizer.optimizer.close()  # which accelerate has wrapped
    return 0


if __name__ == "__main__":
    sys.exit(main())
