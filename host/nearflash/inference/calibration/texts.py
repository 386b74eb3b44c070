"""Beginnings of texts from files, as token ids of a model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearflash.abi.errors import CommandError
from nearflash.weights.pretrained import token_ids

__all__ = ["beginnings"]


def beginnings(tokenizer: Any, files: Sequence[Path], tokens: int) -> Iterator[Tensor]:
    """Token ids (tokens,) of the beginnings of files. Raises CommandError for one that is too short, or no UTF-8."""
    for file in files:
        ids = token_ids(tokenizer, file)[:tokens]
        if len(ids) < tokens:
            raise CommandError(f"texts must have {tokens} tokens at least, not the {len(ids)} of {str(file)!r}")
        yield torch.tensor(ids)
