"""A model's shape as transformers itself has it: its parameters, and what a pass of one token does, without memory.

The model is built on torch's meta device, where a pass takes milliseconds and no weights. What a configuration's keys
mean is nobody's guess here: the cache says what K and V it was given, the experts how many they were called for.
"""

from collections import Counter
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.decoder import head_counts
from nearflash.offload.cache.kv_cache import find_cached_layers
from nearflash.planning.parameters import ForwardPass, LayerPass, from_parameters
from nearflash.planning.shapes import ModelShape
from nearflash.weights.empty import load_config, name_errors
from nearflash.weights.folder import CONFIG, ModelFolder
from nearflash.weights.layers import decoder_layers
from nearflash.weights.pretrained import silent_transformers

__all__ = ["measure_shape"]

_Cached: TypeAlias = tuple[int, int, int, int | None]
_NO_LIMIT = 1 << 20
"""Tokens of a model whose configuration states no most."""


def measure_shape(folder: ModelFolder) -> ModelShape:
    """The shape of a folder's model, or of one whose path is a config.json.

    Raises UnsupportedError for a configuration that transformers cannot build a decoder from without code of the
    folder's own, and for one without layers that are alike.
    """
    with silent_transformers():
        config = load_config(folder)
        with name_errors(folder.path, CONFIG):
            with init_empty_weights(include_buffers=True):
                model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
            model.tie_weights()
            model = model.to("meta").eval()
            forward = _run_token(model)
    return from_parameters({name: tuple(value.shape) for name, value in model.named_parameters()}, forward)


def _run_token(model: Any) -> ForwardPass:
    """Run one token, and state what the model did; what a pass without values cannot show, by its configuration."""
    text = model.config.get_text_config(decoder=True)
    prefix, layers = decoder_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise UnsupportedError(f"model must have an embedding and a head, but {model.config.model_type!r} has not")
    routed = [_observe_experts(layer, text) for layer in layers]
    hidden: list[int] = []
    layers[0].register_forward_pre_hook(partial(_note_width, hidden), with_kwargs=True)
    cached = _run_cached(model, text)
    if cached is None:  # the model looks at a value, of which there are none
        heads = [head_counts(text.per_layer_config[number]) for number in range(len(layers))]
        windows = find_cached_layers(model.config)
        cached = [(*heads[number], 2 * prod(heads[number]), windows.get(number)) for number in range(len(layers))]
    usual = Counter(layer[:2] for layer in cached if layer[0]).most_common(1)
    if not usual:
        raise UnsupportedError(f"model must cache K and V, but {model.config.model_type!r} has no such layer")
    ((kv_heads, head_dim), _), *_ = usual
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return ForwardPass(
        prefix,
        tuple(LayerPass(kv, window, *experts) for (_, _, kv, window), experts in zip(cached, routed, strict=True)),
        names[id(embedding.weight)], names[id(head.weight)], (hidden or [text.hidden_size])[0],
        heads=getattr(text, "num_attention_heads", None) or kv_heads, kv_heads=kv_heads, head_dim=head_dim,
        max_tokens=getattr(text, "max_position_embeddings", None) or _NO_LIMIT, element_bytes=model.dtype.itemsize,
    )  # fmt: skip


def _run_cached(model: Any, text: Any) -> list[_Cached] | None:
    """KV heads, their dimension, elements of K and V, and window of what each layer caches: none of these where nothing
    is cached that grows. None where the model looks at a value.
    """
    cache = DynamicCache(config=text)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        return None
    layers = (cache.layers[number] if number < len(cache.layers) else None for number in range(text.num_hidden_layers))
    return [_measure(layer) for layer in layers]


def _measure(layer: Any) -> _Cached:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return 0, 0, 0, None
    _, heads, _, dim = keys.shape
    return heads, dim, keys.numel() + values.numel(), getattr(layer, "sliding_window", None)


def _note_width(hidden: list[int], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden.append((args[0] if args else kwargs["hidden_states"]).shape[-1])


def _observe_experts(layer: nn.Module, text: Any) -> list[int]:
    """A layer's experts and those that a token is routed to: the second once it has been called, else as stated."""
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] == "experts":
            count = getattr(module, "num_experts", None) or len(list(module.children()))
            routed = [int(count), getattr(text, "num_experts_per_tok", None) or 1]
            module.forward = partial(_route, routed)  # what experts compute depends on values
            return routed
    return [0, 0]


def _route(routed: list[int], states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In the place of experts: note for how many of them they were called."""
    values = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    routed[1] = next((value.shape[-1] for value in values if not value.is_floating_point()), routed[1])
    return states
