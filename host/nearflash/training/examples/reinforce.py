"""REINFORCE: generate without the optimizer's memory, step, and publish which weights the step changed.

python -m nearflash.training.examples.reinforce tests/data/doclm-7m build/rl

The reward is a text's share of vowels. build/rl/versions is what a serving engine follows, version by version.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nearflash.storage.state.weight_patch import publish_patch
from nearflash.support.process import resident_bytes
from nearflash.training import NearStorageAdamW
from nearflash.training.finetune import load_model

__all__ = ["main"]
STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Print, for each step, mean reward, bytes of the patch, and memory before, while and after it generates."""
    source, folder = map(Path, sys.argv[1:] if argv is None else argv)
    torch.manual_seed(0)
    model, tokenizer = load_model(source, "bf16")
    prompt = tokenizer("The", return_tensors="pt")["input_ids"]
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = NearStorageAdamW(
        model.named_parameters(), lr=1e-5, path=folder, delta_bytes=1 << 30, resident_bytes=1 << 28, max_grad_norm=1.0
    )
    for step in range(STEPS):
        memory = [resident_bytes()]
        optimizer.zero_grad()
        optimizer.release()
        memory.append(resident_bytes())
        texts = model.generate(prompt, do_sample=True, num_return_sequences=8, max_new_tokens=24, pad_token_id=0)
        optimizer.acquire()
        reward = torch.tensor([sum(c in "aeiou" for c in text) / len(text) for text in tokenizer.batch_decode(texts)])
        chances = model(texts[:, :-1]).logits.log_softmax(-1).gather(2, texts[:, 1:, None])[..., 0].sum(1)
        (-(reward - reward.mean()) * chances).mean().backward()
        optimizer.step()
        patch = publish_patch(optimizer.delta(since=step), folder / "versions")
        shown = ", ".join(f"{size / 1e6:.1f}" for size in (*memory, resident_bytes()))
        print(f"step {step}: reward {reward.mean():.3f}, patch {patch.size_bytes / 1e6:.2f} MB, {shown} MB of memory")
    optimizer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
