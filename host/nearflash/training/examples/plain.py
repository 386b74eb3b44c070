"""A plain loop over the bytes of a text: the one line that differs from torch is the optimizer's.

python -m nearflash.training.examples.plain README.md --path /nvme/state --steps 100
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nearflash.training import NearStorageAdamW

__all__ = ["main", "train"]

WINDOW = 64
"""Bytes that the model sees before the one that it predicts."""


def train(text: bytes, path: Path, steps: int, device: str) -> list[float]:
    """Losses (nats a byte) of steps up to `steps`; resumes from the state on `path` where there is one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(16 * WINDOW, 128), torch.nn.GELU(),
        torch.nn.Linear(128, 256),
    )  # fmt: skip
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, WINDOW + 1, 1)
    losses = []
    with NearStorageAdamW(
        model.parameters(), lr=1e-3, path=path, device=device, resume="auto", max_grad_norm=1.0
    ) as optimizer:
        while optimizer.steps < steps:
            generator = torch.Generator().manual_seed(optimizer.steps)
            batch = windows[torch.randint(len(windows), (32,), generator=generator)]
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Print the loss of every tenth step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--path", type=Path, required=True, help="state file")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="host")
    arguments = parser.parse_args(argv)
    for index, loss in enumerate(train(arguments.text.read_bytes(), arguments.path, arguments.steps, arguments.device)):
        if index % 10 == 0:
            print(f"{index:>5}  {loss:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
