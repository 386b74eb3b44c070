"""A layer of the user's model, timed as transformers computes it: random weights of its shapes, in its dtype.

Matrices of a model are seldom of the sizes at which a processor is fastest, and norms, rotation and activations take
time beside them; all of it is in what a layer takes.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel

from nearflash.abi.errors import UnsupportedError
from nearflash.offload.machine.machine_file import available_bytes
from nearflash.offload.machine.stopwatch import seconds_between, seconds_of
from nearflash.planning.shapes import ModelShape
from nearflash.weights.empty import load_config, name_errors
from nearflash.weights.folder import open_folder
from nearflash.weights.layers import decoder_layers
from nearflash.weights.pretrained import silent_transformers

__all__ = ["STEP_TOKENS", "LayerRates", "measure_layer", "prefill_attention_rate"]

STEP_TOKENS = (1, 4, 16, 32, 64, 128, 256)
"""Of products of few tokens."""
_PREFILL, _ATTENDED = (16, 128), (4, 512)
"""Sequences and tokens of each: of a layer's prefill, and of attention alone, which takes little of a layer's."""
_PREFILL_S, _STEP_S = 3.0, 0.5
"""That a prefill, and a step of so many tokens, is timed for."""
_LAYERS, _LEAST_BYTES = 25, 384 << 20
"""At most so many layers, and weights of which the caches hold little."""
_MEMORY_SHARE = 0.25
"""Of free memory."""


@dataclass(frozen=True)
class LayerRates:
    """Operations and bytes of weights a second, and the factors of few tokens, as in planning's Compute."""

    flops_per_s: float
    bytes_per_s: float
    tokens: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, parameters: int, size_bytes: int, steps: Sequence[float], many: int, many_s: float) -> "LayerRates":
        """Rates by the parameters and bytes of weights, seconds of products of STEP_TOKENS tokens, and of `many`."""
        token_s = many_s / many
        factors = tuple(took / max(tokens * token_s, steps[0]) for tokens, took in zip(STEP_TOKENS, steps, strict=True))
        tokens = *map(float, STEP_TOKENS), float(many)
        return cls(2 * parameters / token_s, size_bytes / steps[0], tokens, (*factors, 1.0))


def prefill_attention_rate(heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a prompt's attention; `heads` of queries, of keys and values, and their dimension.

    Each token counts as one that attends to the whole prompt, as in the cost model.
    """
    queries, keys, dim = heads
    query, key, value = (torch.randn(_ATTENDED[0], n, _ATTENDED[1], dim, dtype=dtype, device=device)
                         for n in (queries, keys, keys))  # fmt: skip
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=queries != keys)
    return _attention_operations(queries * dim, *_ATTENDED) / seconds_of(device, partial(attend, query, key, value))


def _attention_operations(width: int, sequences: int, tokens: int) -> float:
    return 4.0 * sequences * tokens * tokens * width


def measure_layer(
    model: Path, shape: ModelShape, device: torch.device, dtype: torch.dtype, attention_rate: float
) -> LayerRates | None:
    """Rates of the largest layer; None where it has experts, does not fit, or transformers does not know its model.

    model: a folder with config.json, or that file. A pass of several layers less one of one layer is what is timed;
    attention, of which the cost model has a term, is taken off a prefill at its `attention_rate`.
    """
    layer = shape.largest_layer
    size = layer.parameters * dtype.itemsize
    count = min(_LAYERS, len(shape.layers), max(3, 1 + _LEAST_BYTES // size))
    if layer.experts or count < 3 or count * size > _MEMORY_SHARE * available_bytes():
        return None
    try:
        single, several = (_decoder(model, layers, device, dtype) for layers in (1, count))
    except (ValueError, KeyError, UnsupportedError):  # a model of another library, or built in another way
        return None
    with torch.inference_mode():

        def seconds(sequences: int, tokens: int, least_s: float) -> float:
            ids = torch.zeros(sequences, tokens, dtype=torch.long, device=device)
            of_all, of_one = (partial(decoder, input_ids=ids, use_cache=False) for decoder in (several, single))
            return max(seconds_between(device, of_all, of_one, least_s) / (count - 1), 1e-7)

        prefill = seconds(*_PREFILL, _PREFILL_S)
        attention = _attention_operations(shape.heads * shape.head_dim, *_PREFILL) / attention_rate
        steps = [seconds(tokens, 1, _STEP_S) for tokens in STEP_TOKENS]
    matrices = max(prefill - attention, prefill / 2)
    return LayerRates.of(layer.active_parameters, size, steps, _PREFILL[0] * _PREFILL[1], matrices)


def _decoder(model: Path, layers: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """So many layers of a model's configuration, without its vocabulary."""
    with name_errors(model, "configuration"):
        if model.is_file():
            config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        else:
            config = load_config(open_folder(model, gguf=True))
    config = copy.deepcopy(config.get_text_config(decoder=True))
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = layers, 16, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with silent_transformers(), torch.device(device):
        made = AutoModel.from_config(config, dtype=dtype).eval()
    decoder_layers(made)  # refuses what has none
    return made
