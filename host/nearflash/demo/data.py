"""The demo's model and text."""

from contextlib import nullcontext
from os import environ
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.errors import StateError

__all__ = ["Windows", "load_model"]


def load_model(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """(causal language model, tokenizer) of a transformers folder. Raises StateError where it is missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from nearflash.weights.pretrained import silent_transformers

    if not (folder / "config.json").is_file():
        raise StateError(f"{folder} must hold a transformers model; run from the repository, or pass --model")
    with nullcontext() if environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "0" else silent_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


class Windows:
    """A text as consecutive windows of `length` tokens; batches of `batch` windows go round it.

    Raises StateError for a text shorter than one window.
    """

    def __init__(self, tokenizer: Any, text: str, length: int, batch: int) -> None:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        if len(ids) < length:
            raise StateError(f"the text must have at least {length} tokens, not {len(ids)}")
        self.all = ids[: len(ids) // length * length].view(-1, length)
        self._batch = batch

    def batch(self, step: int) -> torch.Tensor:
        """Token ids of step `step` (from 0), (batch, length)."""
        return self.all[[(step * self._batch + i) % len(self.all) for i in range(self._batch)]]
