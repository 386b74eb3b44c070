"""Long documents summarised as one batch; only the page groups that matter are read back from flash.

python -m nearflash.inference.examples.summarise --model smollm2 report.txt minutes.txt
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearflash.inference.generate import Generated, generate
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import CPU, open_engine
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["POLICY", "main", "summarise"]

POLICY = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.25, top_p=0.95, min_tokens=256)
"""KV page groups until their approximate probabilities reach 0.95, at most a quarter of them (or 256 tokens)."""


def summarise(
    model: Any, tokenizer: Any, documents: Sequence[str], *, device: str = CPU, policy: AttentionPolicy = POLICY,
    max_new_tokens: int = 80,
) -> Generated:  # fmt: skip
    """A summary of each document."""
    chat = bool(tokenizer.chat_template)
    prompts = [f"Summarise this text in two sentences.\n\n{document}\n\nSummary:" for document in documents]
    tokens = max(len(ids) for ids in tokenizer(prompts)["input_ids"]) + max_new_tokens + 128
    with open_engine(kv_shape(model), policy, tokens=tokens, sequences=len(prompts), device=device) as engine:
        return generate(model, tokenizer, prompts, engine, chat=chat, max_new_tokens=max_new_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a summary of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    arguments = parser.parse_args(argv)
    model, tokenizer = load_model(arguments.model)
    done = summarise(
        model, tokenizer, [file.read_text() for file in arguments.files],
        device=arguments.device, max_new_tokens=arguments.max_new_tokens,
    )  # fmt: skip
    for file, text in zip(arguments.files, done.texts, strict=True):
        print(f"{file}: {text.strip()}\n")
    print(
        f"{done.tokens_per_s:.1f} tokens/s, {done.flash_bytes_per_token / 1e6:.2f} MB of flash a token", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
