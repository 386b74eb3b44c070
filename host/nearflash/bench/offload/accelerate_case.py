"""The peer: transformers' generate with accelerate's disk_offload.

accelerate maps its files into memory. Where memory is smaller than the weights, the page cache cannot keep them from
one token to the next: `cold` drops them from it before each forward pass.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import disk_offload
from transformers import AutoModelForCausalLM

from nearflash.bench.disk import drop, write_back
from nearflash.support.closing import Closing
from nearflash.weights.pretrained import silent_transformers

__all__ = ["AccelerateCase", "greedy"]


@torch.no_grad()
def greedy(model: Any, rows: Sequence[Sequence[int]], batch_size: int, new_tokens: int) -> list[list[int]]:
    """New tokens of each prompt, batch after batch, padded on the left; no text ends early."""
    tokens = []
    for at in range(0, len(rows), batch_size):
        batch = [list(row) for row in rows[at : at + batch_size]]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        with silent_transformers():
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        tokens += out[:, width:].tolist()
    return tokens


class AccelerateCase(Closing):
    """A folder's model with all its weights in files under `path`. Close it, or use it as a context manager."""

    def __init__(self, model: Path, path: Path, *, cold: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=".nearflash-accelerate-", dir=path)
        with silent_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype="auto").eval()
        disk_offload(self.model, self._folder.name, execution_device=torch.device("cpu"))
        self._files = sorted(Path(self._folder.name).iterdir())
        write_back(self._files)
        if cold:
            self.model.register_forward_pre_hook(lambda *_: drop(self._files))
        drop(self._files)

    def run(self, rows: Sequence[Sequence[int]], batch_size: int, new_tokens: int) -> tuple[list[list[int]], float]:
        """New tokens, and seconds."""
        start = perf_counter()
        tokens = greedy(self.model, rows, batch_size, new_tokens)
        return tokens, perf_counter() - start

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
