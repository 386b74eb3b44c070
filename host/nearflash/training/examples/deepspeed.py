"""A script's DeepSpeed configuration, read by nearflash instead: the loop stays, the engine goes.

python -m nearflash.training.examples.deepspeed --config ds_config.json --model tests/data/doclm-7m \
    --text tests/data/finetune.txt --steps 10
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nearflash.training.blocks import stream_blocks
from nearflash.training.finetune import Data, fine_tune, load_model, load_tokens
from nearflash.training.integrations.deepspeed import from_deepspeed

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what of the configuration has no effect, then the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args(argv)
    chosen = from_deepspeed(given.config)
    print(f"without effect here: {', '.join(chosen.without_effect) or 'nothing'}")
    model, tokenizer = load_model(given.model, chosen.options.get("param_dtype", "fp32"))
    data = Data(load_tokens(given.text, tokenizer, model.config.vocab_size), seq_length=64, batch_size=2, seed=0)
    with chosen.optimizer(model.parameters(), resume="auto", **chosen.options) as optimizer, ExitStack() as streams:
        if chosen.stream_blocks:
            streams.enter_context(stream_blocks(model, optimizer))
        for progress in fine_tune(model, data, optimizer, given.steps):
            print(f"{progress.step:>5}  {progress.loss:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
