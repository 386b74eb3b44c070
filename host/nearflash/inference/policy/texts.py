"""Texts from files, as token ids of a model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearflash.abi.errors import CommandError

__all__ = ["token_ids"]


def token_ids(tokenizer: Any, files: Sequence[Path], tokens: int) -> Iterator[Tensor]:
    """Token ids (tokens,) of the beginnings of files. Raises CommandError for one that is too short, or no UTF-8."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"texts must be readable UTF-8 files, not {str(file)!r}: {error}") from error
        ids = tokenizer(text, verbose=False)["input_ids"][:tokens]
        if len(ids) < tokens:
            raise CommandError(f"texts must have {tokens} tokens at least, not the {len(ids)} of {str(file)!r}")
        yield torch.tensor(ids)
