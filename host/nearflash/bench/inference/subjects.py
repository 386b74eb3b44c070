"""Models and held-out texts of the accuracy bench.

Texts are of `eval_tokens.npy` (rows of 4,096 token ids of the doclm tokenizer, one stream) in the folder that the
environment variable names, or of files. doclm-30m takes a row as it is; SmolLM2 the text of two rows, or a file, in its
own tokens, cut to 4,096. Texts with even numbers are for finding settings, those with odd numbers for reporting.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from nearflash.abi.errors import CommandError
from nearflash.inference.models import SMOLLM2, load_model
from nearflash.inference.policy.window import NAME

__all__ = ["DOCLM", "MODELS_VARIABLE", "SUBJECTS", "TOKENS", "held_out", "model_folder", "subject"]

MODELS_VARIABLE = "NEARFLASH_MODELS"
"""Environment variable: folder with doclm-30m and eval_tokens.npy."""
TOKENS = 4096
DOCLM = "doclm-30m"
SUBJECTS = {"SmolLM2-135M-Instruct": SMOLLM2, DOCLM: DOCLM}
"""Names in rows, and for `load_model` (a folder's name in the folder of models)."""


def model_folder() -> Path | None:
    """The folder of models, None where there is none."""
    named = os.environ.get(MODELS_VARIABLE)
    return Path(named) if named and (Path(named) / DOCLM / "config.json").is_file() else None


def subject(name: str, folder: Path | None) -> tuple[Any, Any]:
    """Model, its attention to be replaced, and tokenizer. Raises CommandError for a name that is not in SUBJECTS.

    SmolLM2 is where its package is, and needs no folder.
    """
    if name not in SUBJECTS:
        raise CommandError(f"model must be one of {', '.join(SUBJECTS)}, not {name!r}")
    source = SUBJECTS[name]
    model, tokenizer = load_model(source if folder is None or source == SMOLLM2 else folder / source)
    model.set_attn_implementation(NAME)
    return model, tokenizer


def held_out(name: str, tokenizer: Any, folder: Path, numbers: list[int]) -> Iterator[Tensor]:
    """Token ids (TOKENS,) of the texts with these numbers, 0 to 63 (0 to 31 for SmolLM2)."""
    rows = np.load(folder / "eval_tokens.npy").reshape(-1, TOKENS).astype(np.int64)
    if name == DOCLM:
        yield from (torch.from_numpy(rows[number]) for number in numbers)
        return
    writer = AutoTokenizer.from_pretrained(folder / DOCLM, local_files_only=True)
    for number in numbers:
        text = writer.decode(rows[2 * number : 2 * number + 2].reshape(-1), skip_special_tokens=True)
        yield torch.tensor(tokenizer(text, verbose=False)["input_ids"][:TOKENS])
