"""transformers models without memory for their parameters, and their settings of generation, from a folder."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import build_glob_alternation

from nearflash.abi.errors import CommandError, NearflashError, UnsupportedError, WeightsError
from nearflash.support.vector_math import prepare_vector_math
from nearflash.weights.file import WeightsTensor
from nearflash.weights.folder import CONFIG, ModelFolder
from nearflash.weights.weights_map import TORCH_DTYPES

__all__ = ["empty_model", "find_dtype", "generation_config_of", "list_kept_dtypes", "load_config", "name_errors"]

_SETTINGS = "generation_config.json"
_SHARED_LAYERS = 256
"""Most layers without a tensor of their own, as those that share another's."""


def empty_model(
    folder: ModelFolder, tensors: Mapping[str, WeightsTensor], dtype: torch.dtype | None = None,
    model_class: Any = AutoModelForCausalLM,
) -> Any:  # fmt: skip
    """A folder's model, its parameters without memory, with its settings of generation; nothing of its tensors is read.

    tensors: of the folder's checkpoint. dtype: of its parameters, but for those that transformers keeps in fp32; None:
    what most of the checkpoint is stored in. Raises WeightsError for far more layers than tensors, UnsupportedError for
    a configuration that transformers cannot build `model_class` from without code of the folder's own.
    """
    prepare_vector_math()
    dtype = dtype or find_dtype(tensors)
    config = load_config(folder, causal=model_class is AutoModelForCausalLM)
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(tensors) + _SHARED_LAYERS:  # transformers would build them for minutes
        raise WeightsError(
            f"{folder.path}: num_hidden_layers must be of the checkpoint's {len(tensors)} tensors, not {layers}: copy "
            f"its {CONFIG} again"
        )
    build = getattr(model_class, "from_config", None) or model_class._from_config
    with name_errors(folder.path, CONFIG), init_empty_weights(include_buffers=False):
        model = build(config, dtype=dtype)
    parameters = dict(model.named_parameters())
    for name, kept in list_kept_dtypes(model, dtype, parameters).items():
        parameters[name].data = parameters[name].data.to(kept)
    if model.can_generate():
        model.generation_config = generation_config_of(folder.path)
    with name_errors(folder.path, CONFIG):
        model.tie_weights()
    return model.eval()


def list_kept_dtypes(model: Any, dtype: torch.dtype, names: Iterable[str]) -> dict[str, torch.dtype]:
    """The dtypes of those parameters, by name, that transformers keeps in another one than `dtype`."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return {}
    pattern, keys, _ = build_glob_alternation(list(plan))
    return {name: plan[keys[str(match.lastgroup)]] for name in names if (match := pattern.search(name))}


def load_config(folder: ModelFolder, *, causal: bool = True) -> Any:
    """transformers' configuration of a folder. causal: of a decoder alone.

    Raises UnsupportedError for one that needs the folder's own code or is malformed, and for encoder-decoders.
    """
    options = {} if folder.gguf is None else {"gguf_file": folder.gguf}
    with name_errors(folder.path, CONFIG):
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False, **options)
    if causal and getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{folder.path}: model must be a decoder, but {config.model_type!r} has an encoder, which decoding attends "
            "to: take a decoder"
        )
    return config


def generation_config_of(folder: Path) -> GenerationConfig:
    """The generation settings of a folder's generation_config.json, or else of its config.json.

    Raises CommandError for a malformed file (transformers would take the other one in silence).
    """
    has_settings = (folder / _SETTINGS).is_file()
    options: dict[str, Any] = {} if has_settings else {"config_file_name": CONFIG, "_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CommandError(
            f"{_SETTINGS if has_settings else CONFIG} of {folder} must be one that transformers takes: {error}"
        ) from error


def find_dtype(tensors: Mapping[str, WeightsTensor]) -> torch.dtype:
    """The floating-point dtype, fp8 left out, of most bytes of a checkpoint; fp32 where it has none."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        dtype = TORCH_DTYPES.get(tensor.dtype, torch.int8)
        if dtype.is_floating_point and dtype.itemsize > 1:
            sizes[dtype] = sizes.get(dtype, 0) + tensor.dense_bytes
    return max(sizes, key=lambda each: sizes[each], default=torch.float32)


@contextmanager
def name_errors(folder: Path, what: str) -> Iterator[None]:
    """Errors of transformers and of what it calls become an UnsupportedError that names `what` of the folder."""
    try:
        yield
    except (NearflashError, MemoryError):
        raise
    except Exception as error:  # it raises whatever it meets: no list of types is complete
        first = (str(error).strip() or "no message").splitlines()[0]
        raise UnsupportedError(
            f"{folder}: its {what} must be such that transformers reads it without code of the folder's own, which "
            f"failed: {type(error).__name__}: {first}"
        ) from error
